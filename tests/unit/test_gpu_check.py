"""The judgement of `make gpu-check`, which itself needs a real GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from gpu_check import judge
from msgspec.structs import replace

from gpukeeper.capacity.device import Device
from gpukeeper.events.readings import DeviceReading, ProcessUse

CHECK = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"
DEVICE = Device(id="GPU-1", kind="gpu", name="card")
PID = 4242


def reading(used_mb: int, *processes: ProcessUse) -> DeviceReading:
    return DeviceReading(
        device="GPU-1",
        source="nvml",
        read_at="2026-11-29T12:00:00Z",
        total_mb=24_564,
        used_mb=used_mb,
        free_mb=24_564 - used_mb,
        processes=processes,
    )


BEFORE = reading(300)
DURING = reading(300 + 4_096 + 400, ProcessUse(pid=PID, used_mb=4_496))


def wrong(before: DeviceReading, during: DeviceReading, after: DeviceReading) -> list[str]:
    return [words for words, holds in judge(DEVICE, before, during, after, PID) if not holds]


def test_a_driver_that_shows_what_is_held_passes() -> None:
    assert wrong(BEFORE, DURING, BEFORE) == []


@pytest.mark.parametrize(
    ("during", "words"),
    [
        (reading(300, ProcessUse(pid=PID, used_mb=4_496)), "use rose by 0 MB"),
        (reading(4_796), f"process {PID} is listed with None MB"),
        (replace(DURING, processes=None), f"process {PID} is listed with None MB"),
    ],
    ids=["no rise", "not listed", "no list"],
)
def test_what_the_driver_does_not_show_is_named(during: DeviceReading, words: str) -> None:
    assert any(each.startswith(words) for each in wrong(BEFORE, during, BEFORE))


def test_memory_that_does_not_come_back_is_named_and_so_is_the_denial_that_follows() -> None:
    assert [words.split(" ")[0] for words in wrong(BEFORE, DURING, DURING)] == ["use", "and"]


def test_without_a_gpu_it_says_that_nothing_was_checked(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-P", str(CHECK)], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=60
    )

    assert ran.returncode in (0, 2), ran.stderr
    assert ran.returncode == 0 or "nothing was checked" in ran.stdout
