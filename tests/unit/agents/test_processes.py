"""Who listens on a port, from a real socket and from made-up tables."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gpukeeper.agents.processes import family, listener_pid

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


# --- who was started by whom


def made(proc: Path, stats: dict[int, str]) -> Path:
    proc.mkdir()
    (proc / "self").mkdir()
    for pid, stat in stats.items():
        (proc / str(pid)).mkdir()
        (proc / str(pid) / "stat").write_text(stat)
    return proc


def test_workers_and_their_workers_belong_to_a_process_and_others_do_not(tmp_path: Path) -> None:
    proc = made(
        tmp_path / "proc",
        {
            10: "10 (llama-server) S 1 10 10 0",
            11: "11 (a (b) c) S 10 10 10 0",
            12: "12 (x) R 11 10 10 0",
            20: "20 (other) S 1 20 20 0",
            21: "21 (other) S 20 20 20 0",
        },
    )

    assert family(10, proc=proc) == {10, 11, 12}
    assert family(21, proc=proc) == {21}


@pytest.mark.parametrize("stat", ["", "11 (x)", "11 (x) S", "11 (x) S one", "no process"])
def test_what_is_no_process_belongs_to_nobody(tmp_path: Path, stat: str) -> None:
    proc = made(tmp_path / "proc", {10: "10 (x) S 1 10 10 0", 11: stat})
    (proc / "12").mkdir()

    assert family(10, proc=proc) == {10}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc on this system")
def test_a_real_child_belongs_to_this_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert {os.getpid(), child.pid} <= family(os.getpid())
        assert family(child.pid) == {child.pid}
        child.communicate(b"\n")
