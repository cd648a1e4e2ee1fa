"""A ``nats-server`` that is too old, or none at all, is an error that says what was found where."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpukeeper.cli.natsbinary import VERSION_MIN, NoServerBinary, find_server


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_server_installed_beside_this_python_is_found_without_a_path() -> None:
    found = find_server(None, {"PATH": ""})

    assert found.version >= VERSION_MIN
    assert os.access(found.path, os.X_OK)


@pytest.mark.parametrize(
    ("says", "version"),
    [("nats-server: v2.14.4", (2, 14, 4)), ("nats-server: v2.14.5-RC.1", (2, 14, 5)), ("v3.0.0", (3, 0, 0))],
)
def test_a_server_that_is_new_enough_is_taken(tmp_path: Path, says: str, version: tuple[int, int, int]) -> None:
    path = program(tmp_path / "nats-server", f"echo {says}")

    assert find_server(path, {}).version == version


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo nats-server: v2.14.3", r"nats-server: version v2\.14\.3, too old"),
        ("echo nats-server: v2.14.4-RC.2", r"version v2\.14\.4-RC\.2, too old"),
        ("echo nats-server: v2.9.25", r"version v2\.9\.25, too old"),
        ("echo hello", r"did not tell its version: 'hello'"),
        ("echo v9.9.9; exit 3", r"did not tell its version"),
        ("echo broken >&2; exit 1", r"did not tell its version: 'broken'"),
    ],
)
def test_a_server_that_will_not_do_is_named_with_what_it_said(tmp_path: Path, text: str, words: str) -> None:
    path = program(tmp_path / "nats-server", text)

    with pytest.raises(NoServerBinary, match=words) as caught:
        find_server(path, {})

    assert str(path) in str(caught.value)
    assert "no nats-server 2.14.4 or newer" in str(caught.value)


def test_a_configured_server_that_is_missing_is_an_error_and_no_other_is_taken(tmp_path: Path) -> None:
    with pytest.raises(NoServerBinary, match="cannot be started: No such file or directory"):
        find_server(tmp_path / "nope", dict(os.environ))


def test_a_server_on_the_path_is_taken_where_none_is_installed_beside_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setattr("sysconfig.get_path", {"scripts": str(tmp_path / "scripts")}.__getitem__)
    program(tmp_path / "scripts" / "nats-server", "echo v2.0.0")
    path = program(tmp_path / "path" / "nats-server", "echo v2.99.0")

    assert find_server(None, {"PATH": str(path.parent)}).path == path
    with pytest.raises(NoServerBinary, match=r"scripts/nats-server: version v2\.0\.0, too old"):
        find_server(None, {"PATH": ""})


def test_an_error_says_so_where_there_is_no_server_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setattr("sysconfig.get_path", {"scripts": str(tmp_path)}.__getitem__)

    with pytest.raises(NoServerBinary, match="none beside this Python, none on PATH"):
        find_server(None, {"PATH": ""})
