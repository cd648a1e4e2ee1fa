"""Which process listens on a port of this host, and which it started, read from ``/proc``.

A container's ``/proc`` shows only its own processes, and another user's open files cannot be read without
rights: then the answer is None, which means unknown, not that nobody listens.
"""

from __future__ import annotations

from pathlib import Path

PROC = Path("/proc")

_LISTENS = "0A"
#: Where a listener takes connections to loopback: loopback itself, any address, and the same in IPv6.
_ANY = {"00000000", "00000000000000000000000000000000"}
_LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def listener_pid(port: int, *, proc: Path = PROC) -> int | None:
    """The process that accepts connections to ``port`` on loopback; None where that is unknown.

    A listener on loopback itself goes before one on every address. Where several processes share the socket
    (workers of one server), it is the lowest pid, the oldest of them as a rule.
    """
    inodes = _listening(port, proc)
    if not inodes:
        return None
    for inode in inodes:
        owners = _owners(inode, proc)
        if owners:
            return min(owners)
    return None


def family(pid: int, *, proc: Path = PROC) -> frozenset[int]:
    """The process and all that it started, and they in turn, as far as they can be seen: workers hold the memory."""
    parents: dict[int, int] = {}
    for folder in proc.iterdir():
        if folder.name.isdecimal() and (parent := _parent(folder)) is not None:
            parents[int(folder.name)] = parent
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return frozenset(found)


def _parent(folder: Path) -> int | None:
    try:
        # The name stands in parentheses, and may hold some itself; behind it come the state and the parent.
        fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(fields[1])
    except (OSError, IndexError, ValueError):
        return None  # it ended just now, or is none


def _listening(port: int, proc: Path) -> list[str]:
    """Inodes of the sockets that listen on ``port``, those on loopback first."""
    exact: list[str] = []
    wide: list[str] = []
    for table in ("tcp", "tcp6"):
        try:
            rows = (proc / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue  # no IPv6, or no /proc at all: unknown
        for row in rows:
            fields = row.split()
            if len(fields) < 10 or fields[3] != _LISTENS:
                continue
            address, _, hex_port = fields[1].rpartition(":")
            if _port(hex_port) != port:
                continue
            if address in _LOOPBACK:
                exact.append(fields[9])
            elif address in _ANY:
                wide.append(fields[9])
    return exact + wide


def _port(digits: str) -> int | None:
    try:
        return int(digits, 16)
    except ValueError:
        return None


def _owners(inode: str, proc: Path) -> list[int]:
    """The processes that have the socket open, as far as this one may see."""
    target = f"socket:[{inode}]"
    owners: list[int] = []
    for folder in proc.iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            if any(_leads_to(entry, target) for entry in (folder / "fd").iterdir()):
                owners.append(int(folder.name))
        except OSError:
            continue  # it ended just now, or belongs to somebody else
    return owners


def _leads_to(entry: Path, target: str) -> bool:
    try:
        return str(entry.readlink()) == target
    except OSError:
        return False  # closed between listing and reading
