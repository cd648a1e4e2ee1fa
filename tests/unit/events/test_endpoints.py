"""Spellings of one server are alike, and this machine is no other machine's."""

from __future__ import annotations

import pytest

from gpukeeper.events.endpoints import THIS_MACHINE, Endpoint, endpoint_of


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:11434",
        "http://localhost:11434/",
        "http://LOCALHOST:11434/v1",
        "http://localhost.:11434",
        "https://[::1]:11434",
        "http://0.0.0.0:11434",
        "http://127.1.2.3:11434",
    ],
)
def test_all_names_of_this_machine_are_one(url: str) -> None:
    assert endpoint_of(url) == Endpoint(THIS_MACHINE, 11_434)


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("http://gpu-server", "gpu-server", 80),
        ("https://gpu-server/ollama", "gpu-server", 443),
        ("http://GPU-Server:8000", "gpu-server", 8000),
        ("http://10.0.0.7:8000", "10.0.0.7", 8000),
    ],
)
def test_another_machine_is_told_by_its_name_and_port(url: str, host: str, port: int) -> None:
    found = endpoint_of(url)

    assert found == Endpoint(host, port)
    assert found is not None
    assert not found.is_local


@pytest.mark.parametrize("url", ["", "nowhere", "http://", "http://a:99999", "http://[::1", "ftp://a"])
def test_what_leads_nowhere_names_no_server(url: str) -> None:
    assert endpoint_of(url) is None
