"""Who listens on a port, from a real socket and from made-up tables."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from gpukeeper.agents.processes import listener_pid

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def line(address: str, state: str, inode: int) -> str:
    queues = "00000000:00000000 00:00000000 00000000"
    return f"   0: {address} 00000000:0000 {state} {queues}  0  0 {inode} 1 0 100 0\n"


def make(proc: Path, tcp: str, owners: dict[int, list[int]], tcp6: str | None = None) -> Path:
    (proc / "net").mkdir(parents=True)
    (proc / "net" / "tcp").write_text(HEAD + tcp)
    if tcp6 is not None:
        (proc / "net" / "tcp6").write_text(HEAD + tcp6)
    for pid, inodes in owners.items():
        folder = proc / str(pid) / "fd"
        folder.mkdir(parents=True)
        (folder / "0").symlink_to("/dev/null")
        for number, inode in enumerate(inodes, 3):
            (folder / str(number)).symlink_to(f"socket:[{inode}]")
    (proc / "self-made").mkdir()
    return proc


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="no /proc on this system")
def test_a_real_listener_is_this_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert listener_pid(server.getsockname()[1]) == os.getpid()


def test_the_listener_is_found_and_not_a_client_of_the_same_port(tmp_path: Path) -> None:
    tcp = line("0100007F:2CAA", "01", 7) + line("0100007F:2CAA", "0A", 8)

    assert listener_pid(11434, proc=make(tmp_path, tcp, {10: [7], 20: [8]})) == 20


def test_one_on_loopback_goes_before_one_on_every_address(tmp_path: Path) -> None:
    tcp = line("00000000:2CAA", "0A", 7) + line("0100007F:2CAA", "0A", 8)

    assert listener_pid(11434, proc=make(tmp_path, tcp, {10: [7], 20: [8]})) == 20


def test_a_listener_on_another_address_is_not_reached_over_loopback(tmp_path: Path) -> None:
    tcp = line("0500A8C0:2CAA", "0A", 7)

    assert listener_pid(11434, proc=make(tmp_path, tcp, {10: [7]})) is None


def test_a_listener_on_every_address_of_ipv6_counts(tmp_path: Path) -> None:
    tcp6 = line("00000000000000000000000000000000:2CAA", "0A", 9)

    assert listener_pid(11434, proc=make(tmp_path, "", {30: [9]}, tcp6)) == 30


def test_the_lowest_pid_of_those_that_share_a_socket_is_taken(tmp_path: Path) -> None:
    tcp = line("0100007F:2CAA", "0A", 8)

    assert listener_pid(11434, proc=make(tmp_path, tcp, {40: [8], 9: [8]})) == 9


def test_a_socket_of_somebody_unseen_is_unknown(tmp_path: Path) -> None:
    tcp = line("0100007F:2CAA", "0A", 8)

    assert listener_pid(11434, proc=make(tmp_path, tcp, {10: [7]})) is None


@pytest.mark.parametrize("tcp", ["", "garbage\n", "a b:zz c 0A e f g h i j\n"])
def test_a_table_without_the_port_is_unknown(tmp_path: Path, tcp: str) -> None:
    assert listener_pid(11434, proc=make(tmp_path, tcp, {10: [7]})) is None


def test_a_system_without_proc_is_unknown(tmp_path: Path) -> None:
    assert listener_pid(11434, proc=tmp_path / "none") is None
