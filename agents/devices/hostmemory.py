"""The host's own memory: the `cpu` device, and what an integrated GPU shares with the host."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from gpukeeper.agents.devices.lane import Lane, LaneClosed, LaneStuck
from gpukeeper.capacity.device import Device
from gpukeeper.events.errors import GpukeeperError
from gpukeeper.events.instants import utc_text
from gpukeeper.events.readings import DeviceReading

PROC_MEMINFO = Path("/proc/meminfo")
_KB_PER_MB = 1024


class MeminfoUnreadable(GpukeeperError):
    """The host does not say how much memory it has available."""

    code = "meminfo_unreadable"


class HostMemory(NamedTuple):
    """MB of 2^20 bytes. ``available`` is what programs can get without swapping: the host's own use is subtracted."""

    total_mb: int
    available_mb: int


def parse_meminfo(text: str) -> HostMemory:
    """Read ``MemTotal`` and ``MemAvailable`` out of the text of ``/proc/meminfo``.

    Raises:
        MeminfoUnreadable: one of them is missing, is not a number of kB, or they contradict each other.
    """
    fields: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if name in ("MemTotal", "MemAvailable") and len(words) == 2 and words[0].isdigit() and words[1] == "kB":
            fields[name] = int(words[0]) // _KB_PER_MB
    try:
        found = HostMemory(fields["MemTotal"], fields["MemAvailable"])
    except KeyError as error:
        raise MeminfoUnreadable(f"no usable {error.args[0]} line") from error
    if not 0 <= found.available_mb <= found.total_mb or found.total_mb == 0:
        raise MeminfoUnreadable(f"{found.available_mb} MB available of {found.total_mb} MB cannot be")
    return found


def read_meminfo(path: Path) -> HostMemory:
    """Read the file now. Blocks as long as the file does: for a lane.

    Raises:
        MeminfoUnreadable: it cannot be read, or does not say.
    """
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise MeminfoUnreadable(f"{path}: {error.strerror or error}") from error
    try:
        return parse_meminfo(text)
    except MeminfoUnreadable as error:
        raise MeminfoUnreadable(f"{path}: {error.message}") from error


def available_mb(path: Path = PROC_MEMINFO) -> int | None:
    """What programs can get now without swapping; None where the host does not say. Blocks: for a thread."""
    try:
        return read_meminfo(path).available_mb
    except MeminfoUnreadable:
        return None


def installed_mb() -> int | None:
    """How much memory is installed, where the system says so without ``/proc`` (macOS), else None."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // (1 << 20)
    except (ValueError, OSError, AttributeError):
        return None


class HostMemorySource:
    """The `cpu` devices that the configuration declares.

    A limit that a container's cgroup sets is not seen: the runtime may live in another one. Declare ``total_mb`` then.
    """

    def __init__(
        self,
        declared: tuple[Device, ...],
        *,
        now: Callable[[], datetime],
        limit_s: float,
        meminfo: Path = PROC_MEMINFO,
    ) -> None:
        self._declared = declared
        self._now = now
        self._limit_s = limit_s
        self._meminfo = meminfo
        self._lane = Lane("host memory")
        self._problem: str | None = None

    async def find(self) -> tuple[Device, ...]:
        """The declared devices; the host's memory is always there."""
        return self._declared

    async def read(self, device: Device) -> DeviceReading:
        """``MemTotal`` and ``MemAvailable`` now. Processes are not listed: everything on the host uses its memory."""
        read_at = utc_text(self._now())
        try:
            found = await self._lane.call(lambda: read_meminfo(self._meminfo), limit_s=self._limit_s)
        except (MeminfoUnreadable, LaneStuck, LaneClosed) as error:
            self._problem = f"host memory: {error.message}"
            return DeviceReading(
                device=device.id,
                source="meminfo",
                read_at=read_at,
                state="unknown",
                total_mb=installed_mb(),
                error=error.message,
            )
        self._problem = None
        return DeviceReading(
            device=device.id,
            source="meminfo",
            read_at=read_at,
            total_mb=found.total_mb,
            used_mb=found.total_mb - found.available_mb,
            free_mb=found.available_mb,
        )

    def problem(self) -> str | None:
        """Why the last reading failed, or None."""
        return self._problem

    async def close(self) -> None:
        """End the thread."""
        await self._lane.close(limit_s=self._limit_s)
