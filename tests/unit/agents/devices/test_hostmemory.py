"""The host's own memory as a device."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from gpukeeper.agents.devices.hostmemory import (
    HostMemory,
    HostMemorySource,
    MeminfoUnreadable,
    parse_meminfo,
)
from gpukeeper.capacity.device import Device
from support.moments import Moments

CPU = Device(id="cpu", kind="cpu", name="host memory")
LIMIT_S = 30.0


def test_available_memory_is_what_counts_and_not_free_memory() -> None:
    text = "MemTotal:       127600748 kB\nMemFree:         1000000 kB\nMemAvailable:   118566368 kB\nBuffers: 1 kB\n"

    assert parse_meminfo(text) == HostMemory(total_mb=124610, available_mb=115787)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "MemTotal: 1000000 kB\n",
        "MemAvailable: 1000000 kB\n",
        "MemTotal: 1000000 kB\nMemAvailable: many kB\n",
        "MemTotal: 1000000 kB\nMemAvailable: 1000000\n",
        "MemTotal: 1000000 kB\nMemAvailable: 1000000 MB\n",
        "MemTotal: 1000000 kB\nMemAvailable: -5 kB\n",
        "MemTotal: 1000000 kB\nMemAvailable: 9000000 kB\n",
        "MemTotal: 0 kB\nMemAvailable: 0 kB\n",
    ],
)
def test_text_that_does_not_say_or_contradicts_itself_is_refused(text: str) -> None:
    with pytest.raises(MeminfoUnreadable):
        parse_meminfo(text)


async def test_a_missing_file_is_unknown_with_its_name_and_reads_again_once_it_is_there(tmp_path: Path) -> None:
    path = tmp_path / "meminfo"
    source = HostMemorySource((CPU,), now=Moments(), limit_s=LIMIT_S, meminfo=path)

    missing = await source.read(CPU)
    problem = source.problem()
    path.write_text("MemTotal: 2097152 kB\nMemAvailable: 1048576 kB\n")
    present = await source.read(CPU)
    await source.close()

    assert (missing.state, missing.free_mb) == ("unknown", None)
    assert str(path) in (missing.error or "")
    assert str(path) in (problem or "")
    assert (present.state, present.total_mb, present.used_mb, present.free_mb) == ("healthy", 2048, 1024, 1024)
    assert source.problem() is None


async def test_a_file_that_blocks_is_unknown_within_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "meminfo"
    os.mkfifo(path)
    source = HostMemorySource((CPU,), now=Moments(), limit_s=0.05, meminfo=path)

    reading = await source.read(CPU)
    again = await source.read(CPU)
    both_ends = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # lets the reader go
    path.unlink()
    os.close(both_ends)
    await source.close()

    assert (reading.state, reading.free_mb) == ("unknown", None)
    assert "no answer within" in (reading.error or "")
    assert again.state == "unknown"


async def test_the_real_host_reads_healthy_where_it_has_proc() -> None:
    if not Path("/proc/meminfo").exists():
        pytest.skip("no /proc/meminfo on this system")
    source = HostMemorySource((CPU,), now=Moments(), limit_s=LIMIT_S)

    async with asyncio.timeout(LIMIT_S):
        reading = await source.read(CPU)
    await source.close()

    assert reading.state == "healthy"
    assert 0 < (reading.free_mb or 0) < (reading.total_mb or 0)
