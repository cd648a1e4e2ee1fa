"""The data folder is private, and one process holds it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpukeeper.cli.datafolder import (
    LOCK_NAME,
    FolderHeld,
    FolderUnusable,
    data_folder,
    hold,
    make_private,
    write_private,
)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_second_holder_is_refused_with_the_name_of_the_first(tmp_path: Path) -> None:
    with hold(tmp_path, command="gpuq up"), pytest.raises(FolderHeld) as caught, hold(tmp_path, command="other"):
        pass

    holder = caught.value.fields["holder"]
    assert (holder.pid, holder.command) == (os.getpid(), "gpuq up")
    assert f"held by process {os.getpid()} on " in str(caught.value)


def test_a_refused_holder_does_not_take_the_folder_from_the_first(tmp_path: Path) -> None:
    with hold(tmp_path, command="gpuq up"):
        for _ in range(2):
            with pytest.raises(FolderHeld, match="gpuq up"), hold(tmp_path, command="other"):
                pass


def test_a_folder_that_was_let_go_can_be_held_again(tmp_path: Path) -> None:
    with hold(tmp_path, command="first"):
        pass
    with hold(tmp_path, command="second"):
        assert b"second" in (tmp_path / LOCK_NAME).read_bytes()


def test_a_holder_that_has_not_said_who_it_is_still_holds(tmp_path: Path) -> None:
    with hold(tmp_path, command="first"):
        (tmp_path / LOCK_NAME).write_bytes(b'{"pid":')
        with pytest.raises(FolderHeld, match="held by another process"), hold(tmp_path, command="second"):
            pass


def test_what_a_crashed_holder_left_in_the_file_does_not_hold(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).write_bytes(b'{"pid":1,"host":"h","started_at":"t","command":"c"}' * 9)

    with hold(tmp_path, command="me"):
        assert (tmp_path / LOCK_NAME).read_bytes().count(b"pid") == 1


def test_a_folder_that_others_could_read_is_made_private(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    folder.chmod(0o755)

    make_private(folder)

    assert mode(folder) == 0o700


def test_a_file_in_the_place_of_the_folder_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "data").touch()

    with pytest.raises(FolderUnusable, match="data: File exists"):
        make_private(tmp_path / "data")


def test_what_cannot_be_written_in_the_folder_is_told_in_words(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).mkdir()

    with (
        pytest.raises(FolderUnusable, match=f"{LOCK_NAME} cannot be written: Is a directory"),
        hold(tmp_path, command="x"),
    ):
        pass
    with pytest.raises(FolderUnusable, match="secret cannot be written: No such file or directory"):
        write_private(tmp_path / "missing" / "secret", b"")


def test_a_private_file_is_private_whatever_was_there_and_whatever_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    for leftover in (path, tmp_path / "secret.new"):
        leftover.touch()
        leftover.chmod(0o644)
    before = os.umask(0)
    try:
        write_private(path, b"x")
    finally:
        os.umask(before)

    assert (path.read_bytes(), mode(path), list(tmp_path.iterdir())) == (b"x", 0o600, [path])


def test_the_folder_is_the_given_one_else_that_of_the_environment_else_the_users(tmp_path: Path) -> None:
    environ = {"GPUQ_DATA": "/from/environment"}

    assert data_folder(tmp_path, environ) == tmp_path
    assert data_folder(None, environ) == Path("/from/environment")
    assert data_folder(None, {}).name == "gpukeeper"
