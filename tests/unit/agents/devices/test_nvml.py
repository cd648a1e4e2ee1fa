"""NVML through the real binding and a real shared library that answers from a script."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpukeeper.agents.devices.nvml import NvmlSource
from gpukeeper.agents.devices.nvml_probe import device_token
from gpukeeper.capacity.device import Device
from gpukeeper.events.ids import is_token
from gpukeeper.events.readings import DeviceReading, ProcessUse
from support.moments import Moments
from support.nvml_stub import MB, SCRIPT_VARIABLE, Gpu, NvmlStub, Slice, compile_stub

pytest_plugins = ["support.nvml_fixture"]

A = "GPU-aaaaaaaa-0000-0000-0000-000000000001"
B = "GPU-bbbbbbbb-0000-0000-0000-000000000002"
C = "GPU-cccccccc-0000-0000-0000-000000000003"
D = "GPU-dddddddd-0000-0000-0000-000000000004"
LIMIT_S = 30.0
#: Long enough for a healthy device on a busy machine; tests of hangs wait it out once.
HANG_LIMIT_S = 1.0

GB10_MEMINFO = "MemTotal:       127600748 kB\nMemFree:  1000 kB\nMemAvailable:   118566368 kB\n"


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text(GB10_MEMINFO)
    return path


@pytest.fixture
async def source(nvml: NvmlStub, meminfo: Path) -> AsyncIterator[NvmlSource]:
    made = NvmlSource(now=Moments(), limit_s=LIMIT_S, meminfo=meminfo, proc=meminfo.parent / "proc")
    yield made
    await ended(nvml, made)


@pytest.fixture
async def hasty(nvml: NvmlStub, meminfo: Path) -> AsyncIterator[NvmlSource]:
    made = NvmlSource(now=Moments(), limit_s=HANG_LIMIT_S, meminfo=meminfo, proc=meminfo.parent / "proc")
    yield made
    await ended(nvml, made)


async def ended(nvml: NvmlStub, source: NvmlSource) -> None:
    """Close, and wait for threads that were stuck: the next test counts threads."""
    nvml.release_all()
    await source.close()
    async with asyncio.timeout(LIMIT_S):
        while gpu_threads():
            await asyncio.sleep(0)


def gpu_threads() -> list[str]:
    return sorted(each.name for each in threading.enumerate() if each.name.startswith("gpuq GPU"))


async def by_id(source: NvmlSource) -> dict[str, DeviceReading]:
    devices = await source.find()
    readings = await asyncio.gather(*(source.read(device) for device in devices))
    return {reading.device: reading for reading in readings}


async def read_until_healthy(source: NvmlSource, device: Device) -> DeviceReading:
    async with asyncio.timeout(LIMIT_S):
        while (reading := await source.read(device)).state != "healthy":
            await asyncio.sleep(0)  # gives the loop a turn; the thread comes back when the gate is open
    return reading


async def test_a_card_is_listed_by_uuid_and_measured_in_mb(nvml: NvmlStub, source: NvmlSource) -> None:
    nvml.host(Gpu(uuid=A, memory=(24564, 23359), compute=f"4242:{1000 * MB}:none", graphics=f"79:{205 * MB}:none"))

    (device,) = await source.find()
    reading = await source.read(device)

    assert Device(id=A, kind="gpu", name="NVIDIA GeForce RTX 4090", index=0) == device
    assert reading == DeviceReading(
        device=A,
        source="nvml",
        read_at="2025-06-01T12:00:00.000000Z",
        total_mb=24564,
        used_mb=1205,
        free_mb=23359,
        processes=(ProcessUse(pid=79, used_mb=205), ProcessUse(pid=4242, used_mb=1000)),
    )
    assert source.problem() is None


async def test_a_process_with_compute_and_graphics_contexts_counts_once(nvml: NvmlStub, source: NvmlSource) -> None:
    nvml.host(Gpu(uuid=A, compute=f"7:{500 * MB}:none", graphics=f"7:{500 * MB}:none", mps=f"8:{5 * MB}:none"))

    reading = (await by_id(source))[A]

    assert reading.processes == (ProcessUse(pid=7, used_mb=500), ProcessUse(pid=8, used_mb=5))


async def test_a_process_without_a_figure_as_under_wsl_has_none_and_not_zero(
    nvml: NvmlStub, source: NvmlSource
) -> None:
    nvml.host(Gpu(uuid=A, compute="79:none:none"))

    reading = (await by_id(source))[A]

    assert reading.state == "healthy"
    assert reading.processes == (ProcessUse(pid=79, used_mb=None),)


async def test_processes_that_may_not_be_read_are_none_and_not_nobody(nvml: NvmlStub, source: NvmlSource) -> None:
    nvml.host(Gpu(uuid=A, compute="!4"), Gpu(uuid=B))

    readings = await by_id(source)

    assert readings[A].processes is None
    assert readings[A].free_mb == 23359
    assert "Insufficient Permissions" in (readings[A].error or "")
    assert readings[B].processes == ()


async def test_a_process_in_a_container_is_told_with_its_container(
    nvml: NvmlStub, source: NvmlSource, tmp_path: Path
) -> None:
    container = "3f4e1d2c" * 8
    (tmp_path / "proc" / "self" / "ns").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "ns" / "pid").symlink_to("pid:[4026531836]")
    (tmp_path / "proc" / "7").mkdir()
    (tmp_path / "proc" / "7" / "cgroup").write_text(f"0::/system.slice/docker-{container}.scope\n")
    nvml.host(Gpu(uuid=A, compute=f"7:{500 * MB}:none 8:{5 * MB}:none"))

    reading = (await by_id(source))[A]

    assert reading.processes == (
        ProcessUse(pid=7, used_mb=500, container=container),
        ProcessUse(pid=8, used_mb=5),
    )


async def test_the_share_of_time_in_use_is_told_where_the_driver_tells_it(nvml: NvmlStub, source: NvmlSource) -> None:
    part = Slice(uuid="MIG-11111111-aaaa-bbbb-cccc-000000000001")
    nvml.host(
        Gpu(uuid=A, utilization=37),
        Gpu(uuid=B),
        Gpu(uuid=C, utilization=50, mig={0: part}),
        Gpu(uuid=D, utilization=101),
    )

    readings = await by_id(source)

    assert {each: reading.utilization_percent for each, reading in readings.items()} == {
        A: 37,
        B: None,
        C: None,
        part.uuid: None,
        D: None,
    }
    assert {reading.error for reading in readings.values()} == {None}


async def test_c15_the_share_of_time_in_use_is_told_of_unified_parts_too(nvml: NvmlStub, source: NvmlSource) -> None:
    nvml.host(Gpu(uuid=A, name="NVIDIA GB10", memory=None, utilization=12))

    reading = (await by_id(source))[A]

    assert (reading.unified, reading.utilization_percent) == (True, 12)


async def test_a_share_that_fails_otherwise_leaves_the_memory_figures_and_says_why(
    nvml: NvmlStub, source: NvmlSource
) -> None:
    nvml.host(Gpu(uuid=A, utilization="!999"))

    reading = (await by_id(source))[A]

    assert (reading.state, reading.free_mb, reading.utilization_percent) == ("healthy", 23359, None)
    assert "Unknown Error" in (reading.error or "")


async def test_a_driver_that_goes_away_at_the_last_question_makes_the_reading_unknown(
    nvml: NvmlStub, source: NvmlSource
) -> None:
    nvml.host(Gpu(uuid=A))
    (device,) = await source.find()
    nvml.host(Gpu(uuid=A, utilization="!1"))

    assert (await source.read(device)).state == "unknown"


async def test_c15_unified_memory_is_the_hosts_with_its_use_subtracted(nvml: NvmlStub, source: NvmlSource) -> None:
    nvml.host(Gpu(uuid=A, name="NVIDIA GB10", memory=None, bar1=None, addressing=2, compute=f"5:{63931 * MB}:none"))

    (device,) = await source.find()
    reading = await source.read(device)

    assert device.unschedulable is None
    assert (reading.source, reading.unified, reading.state) == ("meminfo", True, "healthy")
    assert reading.total_mb == 124610
    assert reading.free_mb == 115787
    assert reading.used_mb == 124610 - 115787
    assert reading.processes == (ProcessUse(pid=5, used_mb=63931),)


async def test_c15_an_integrated_part_of_an_unknown_name_shows_by_page_tables_and_no_bar1(
    nvml: NvmlStub, source: NvmlSource
) -> None:
    nvml.host(Gpu(uuid=A, name="NVIDIA N99", memory=None, bar1=None, addressing=2))

    assert (await by_id(source))[A].unified


async def test_c15_a_driver_that_reports_host_memory_as_the_gpus_own_is_seen_through(
    nvml: NvmlStub, source: NvmlSource
) -> None:
    nvml.host(Gpu(uuid=A, name="NVIDIA GB10", memory=(124610, 124000), bar1=None, addressing=2))

    reading = (await by_id(source))[A]

    assert reading.unified
    assert reading.free_mb == 115787


async def test_c15_a_coherent_part_with_memory_of_its_own_keeps_its_own_figures(
    nvml: NvmlStub, source: NvmlSource
) -> None:
    nvml.host(Gpu(uuid=A, name="NVIDIA GH200 480GB", memory=(97871, 97000), bar1=None, addressing=2))

    reading = (await by_id(source))[A]

    assert (reading.source, reading.unified, reading.free_mb) == ("nvml", False, 97000)


@pytest.mark.parametrize(("bar1", "addressing"), [(256 * MB, 2), (None, 1), (256 * MB, None), (None, None)], ids=str)
async def test_c15_a_discrete_card_without_figures_has_unknown_capacity_and_is_not_scheduled(
    nvml: NvmlStub, source: NvmlSource, bar1: int | None, addressing: int | None
) -> None:
    nvml.host(Gpu(uuid=A, name="NVIDIA RTX A6000", memory=None, bar1=bar1, addressing=addressing))

    (device,) = await source.find()
    reading = await source.read(device)

    assert "capacity is unknown" in (device.unschedulable or "")
    assert (reading.state, reading.total_mb, reading.free_mb) == ("unknown", None, None)
    assert "Not Supported" in (reading.error or "")


async def test_c15_unified_memory_without_meminfo_is_unknown(nvml: NvmlStub, source: NvmlSource, meminfo: Path) -> None:
    nvml.host(Gpu(uuid=A, name="NVIDIA GB10", memory=None))
    meminfo.unlink()

    reading = (await by_id(source))[A]

    assert (reading.state, reading.free_mb) == ("unknown", None)
    assert str(meminfo) in (reading.error or "")


async def test_c17_a_mig_parent_is_not_scheduled_and_its_slices_are_devices(nvml: NvmlStub, source: NvmlSource) -> None:
    first = Slice(uuid="MIG-11111111-aaaa-bbbb-cccc-000000000001", memory=(4864, 4860), instance=1)
    second = Slice(uuid="MIG-22222222-aaaa-bbbb-cccc-000000000002", memory=(19968, 5602), instance=5)
    both = f"900:{4 * MB}:1 901:{14366 * MB}:5"
    first.compute = second.compute = both
    nvml.host(Gpu(uuid=A, name="NVIDIA A100-SXM4-80GB", memory="!4", compute="!4", mig={0: first, 3: second}))

    devices = await source.find()
    readings = await by_id(source)

    assert [each.id for each in devices] == [A, first.uuid, second.uuid]
    assert [each.parent for each in devices] == [None, A, A]
    assert "slices" in (devices[0].unschedulable or "")
    assert [each.unschedulable for each in devices[1:]] == [None, None]
    assert (readings[A].state, readings[A].total_mb) == ("unknown", None)
    assert (readings[first.uuid].total_mb, readings[first.uuid].free_mb) == (4864, 4860)
    assert (readings[second.uuid].total_mb, readings[second.uuid].free_mb) == (19968, 5602)
    assert readings[first.uuid].processes == (ProcessUse(pid=900, used_mb=4),)
    assert readings[second.uuid].processes == (ProcessUse(pid=901, used_mb=14366),)


async def test_c17_a_slice_that_is_configured_away_is_dropped_and_its_parent_stays(
    nvml: NvmlStub, source: NvmlSource
) -> None:
    part = Slice(uuid="MIG-11111111-aaaa-bbbb-cccc-000000000001")
    nvml.host(Gpu(uuid=A, mig={0: part}), Gpu(uuid=B))
    await source.find()
    nvml.host(Gpu(uuid=A, mig={}), Gpu(uuid=B))

    assert [each.id for each in await source.find()] == [A, B]


async def test_a_mig_name_of_an_old_driver_becomes_a_valid_id(nvml: NvmlStub, source: NvmlSource) -> None:
    part = Slice(uuid=f"MIG-{A}/7/0")
    nvml.host(Gpu(uuid=A, mig={2: part}))

    readings = await by_id(source)

    assert readings[f"MIG-{A}_7_0"].free_mb == 4860


def test_every_uuid_becomes_a_valid_id_and_different_ones_stay_different() -> None:
    odd = ["", "GPU 1", "x" * 65, "x" * 66, "GPU-ü", "a/" * 50, "a/" * 51]

    made = [device_token(each) for each in odd]

    assert all(is_token(each) for each in made)
    assert len(set(made)) == len(odd)
    assert device_token(A) == A


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (Gpu(uuid=B, handle="!15"), "GPU is lost"),
        (Gpu(uuid=B, handle="!999"), "Unknown Error"),
        (Gpu(uuid=B, memory="!15"), "GPU is lost"),
        (Gpu(uuid=B, compute="!15"), "GPU is lost"),
        (Gpu(uuid=B, utilization="!15"), "GPU is lost"),
    ],
    ids=["handle lost", "handle unknown error", "memory lost", "processes lost", "share of use lost"],
)
async def test_c19_a_lost_gpu_is_lost_with_the_text_and_the_others_keep_reading(
    nvml: NvmlStub, source: NvmlSource, broken: Gpu, text: str
) -> None:
    nvml.host(Gpu(uuid=A), Gpu(uuid=B), Gpu(uuid=C), Gpu(uuid=D))
    await source.find()
    nvml.host(Gpu(uuid=A), broken, Gpu(uuid=C), Gpu(uuid=D))

    readings = await by_id(source)

    assert {name: each.state for name, each in readings.items()} == {
        A: "healthy",
        B: "lost",
        C: "healthy",
        D: "healthy",
    }
    assert text in (readings[B].error or "")
    assert (readings[B].total_mb, readings[B].free_mb) == (None, None)


async def test_c19_a_gpu_that_was_lost_before_it_told_its_uuid_is_a_problem_and_hides_no_other(
    nvml: NvmlStub, source: NvmlSource
) -> None:
    nvml.host(Gpu(uuid=A), Gpu(uuid=B, handle="!999"), Gpu(uuid=C))

    readings = await by_id(source)

    assert list(readings) == [A, C]
    assert source.problem() == "GPU 1: nvmlDeviceGetHandleByIndex: Unknown Error"

    nvml.host(Gpu(uuid=A), Gpu(uuid=B), Gpu(uuid=C))

    assert {device.id for device in await source.find()} == {A, B, C}
    assert source.problem() is None


async def test_a_name_that_is_no_text_is_a_problem_and_hides_no_other_gpu(nvml: NvmlStub, source: NvmlSource) -> None:
    nvml.host(Gpu(uuid=A), Gpu(uuid=B))
    nvml.script.write_bytes(nvml.script.read_bytes().replace(b"0.name NVIDIA", b"0.name \xff"))

    assert [each.id for each in await source.find()] == [B]
    assert "not UTF-8" in (source.problem() or "")


async def test_c19_a_lost_gpu_that_returns_reads_again(nvml: NvmlStub, source: NvmlSource) -> None:
    nvml.host(Gpu(uuid=A))
    (device,) = await source.find()
    nvml.host(Gpu(uuid=A, handle="!15"))
    assert (await source.read(device)).state == "lost"
    nvml.host(Gpu(uuid=A))

    assert (await source.read(device)).state == "healthy"


async def test_a_gpu_that_is_no_longer_counted_is_lost_and_stays_listed(nvml: NvmlStub, source: NvmlSource) -> None:
    nvml.host(Gpu(uuid=A), Gpu(uuid=B))
    await source.find()
    nvml.host(Gpu(uuid=A))

    readings = await by_id(source)

    assert (readings[A].state, readings[B].state) == ("healthy", "lost")


async def test_figures_are_never_taken_from_another_gpu_that_has_got_the_index(
    nvml: NvmlStub, source: NvmlSource
) -> None:
    nvml.host(Gpu(uuid=A, memory=(1000, 900)), Gpu(uuid=B, memory=(2000, 1900)))
    first, _ = await source.find()
    nvml.host(Gpu(uuid=B, memory=(2000, 1900)))

    reading = await source.read(first)

    assert (reading.state, reading.free_mb) == ("lost", None)
    assert {each: reading.free_mb for each, reading in (await by_id(source)).items()} == {A: None, B: 1900}


@pytest.mark.parametrize(
    "memory", [(0, 0), (100, 101), (1 << 43, 1 << 43)], ids=["no total", "more free than total", "beyond all cards"]
)
async def test_figures_that_cannot_be_are_unknown(nvml: NvmlStub, source: NvmlSource, memory: tuple[int, int]) -> None:
    nvml.host(Gpu(uuid=A, memory=memory))

    assert (await by_id(source))[A].state == "unknown"


async def test_a_driver_that_is_not_loaded_means_no_devices_and_says_so_until_it_is(
    nvml: NvmlStub, source: NvmlSource
) -> None:
    nvml.write("init !9")
    assert await source.find() == ()
    assert source.problem() == "NVML: nvmlInit: Driver Not Loaded"
    absent = await source.read(Device(id=A, kind="gpu", name="declared"))
    assert (absent.state, absent.source) == ("unknown", "none")
    assert "Driver Not Loaded" in (absent.error or "")
    nvml.host(Gpu(uuid=A))

    assert (await source.read(Device(id=A, kind="gpu", name="declared"))).state == "healthy"
    assert source.problem() is None


async def test_a_driver_that_goes_away_makes_readings_unknown_and_is_started_again(
    nvml: NvmlStub, source: NvmlSource
) -> None:
    nvml.host(Gpu(uuid=A))
    (device,) = await source.find()
    nvml.host(Gpu(uuid=A, handle="!1"))
    gone = await source.read(device)
    nvml.write("init !9")
    not_back = await source.read(device)
    nvml.host(Gpu(uuid=A))
    back = await source.read(device)

    assert (gone.state, gone.error) == ("unknown", "nvmlDeviceGetHandleByIndex: Uninitialized")
    assert (not_back.state, not_back.error) == ("unknown", "NVML: nvmlInit: Driver Not Loaded")
    assert back.state == "healthy"


async def test_a_device_that_the_driver_does_not_list_is_lost(nvml: NvmlStub, source: NvmlSource) -> None:
    nvml.host(Gpu(uuid=A))

    reading = await source.read(Device(id=B, kind="gpu", name="declared"))

    assert (reading.state, reading.source) == ("lost", "none")


async def test_a_hung_gpu_is_unknown_while_the_others_are_read(nvml: NvmlStub, hasty: NvmlSource) -> None:
    nvml.host(Gpu(uuid=A), Gpu(uuid=B))
    first, second = await hasty.find()
    gate = nvml.gate()
    nvml.host(Gpu(uuid=A, hang=("memory", gate)), Gpu(uuid=B))

    hung, other = await asyncio.gather(hasty.read(first), hasty.read(second))

    assert (hung.state, hung.free_mb) == ("unknown", None)
    assert "no answer within 1 s" in (hung.error or "")
    assert other.state == "healthy"


async def test_a_stuck_call_adds_no_threads_and_the_gpu_is_read_again_when_it_returns(
    nvml: NvmlStub, hasty: NvmlSource
) -> None:
    nvml.host(Gpu(uuid=A), Gpu(uuid=B))
    first, second = await hasty.find()
    threads = gpu_threads()
    gate = nvml.gate()
    nvml.host(Gpu(uuid=A, hang=("memory", gate)), Gpu(uuid=B))
    await hasty.read(first)

    again = [await hasty.read(first) for _ in range(50)]
    found = await hasty.find()

    assert {each.state for each in again} == {"unknown"}
    assert "an earlier call has still not returned" in (again[0].error or "")
    assert found == (first, second)
    assert (await hasty.read(second)).state == "healthy"
    assert gpu_threads() == threads == ["gpuq GPU 0", "gpuq GPU 1"]

    nvml.host(Gpu(uuid=A, memory=(24564, 20000)), Gpu(uuid=B))
    await nvml.open_gate(gate)

    assert (await read_until_healthy(hasty, first)).free_mb == 20000
    assert gpu_threads() == threads


async def test_a_gpu_that_hangs_before_it_is_identified_does_not_hide_the_others(
    nvml: NvmlStub, hasty: NvmlSource
) -> None:
    gate = nvml.gate()
    nvml.host(Gpu(uuid=A, hang=("handle", gate)), Gpu(uuid=B))

    found = await hasty.find()
    absent = await hasty.read(Device(id=A, kind="gpu", name="declared"))

    assert [each.id for each in found] == [B]
    assert (hasty.problem() or "").startswith("GPU 0: ")
    assert absent.state == "unknown"


async def test_an_initialisation_that_hangs_is_a_problem_in_words(nvml: NvmlStub, hasty: NvmlSource) -> None:
    gate = nvml.gate()
    nvml.write(f"init.hang {gate}")

    assert await hasty.find() == ()
    assert hasty.problem() == "NVML: no answer within 1 s"


async def test_more_gpus_than_are_looked_at_are_a_problem_in_words(nvml: NvmlStub, source: NvmlSource) -> None:
    nvml.host(*(Gpu(uuid=f"GPU-{number}") for number in range(65)))

    assert len(await source.find()) == 64
    assert source.problem() == "NVML lists 65 GPUs, 64 are used"


async def test_closing_ends_the_threads_and_may_be_repeated(nvml: NvmlStub, meminfo: Path) -> None:
    nvml.host(Gpu(uuid=A))
    source = NvmlSource(now=Moments(), limit_s=LIMIT_S, meminfo=meminfo)
    (device,) = await source.find()
    await source.close()
    await source.close()

    assert gpu_threads() == []
    assert (await source.read(device)).state == "unknown"


READ_ONCE = """
import asyncio, sys
from datetime import UTC, datetime
from pathlib import Path
from gpukeeper.agents.devices.nvml import NvmlSource

async def main():
    assert "pynvml" not in sys.modules
    source = NvmlSource(now=lambda: datetime.now(UTC), limit_s=30, meminfo=Path("/none"), proc=Path("/none"))
    for device in await source.find():
        print(device.id, await source.read(device))
    print(source.problem())
    await source.close()

asyncio.run(main())
"""


def read_in_a_fresh_process(folder: Path, script: Path | None) -> str:
    environment = {"PYTHONPATH": ":".join(sys.path), "LD_LIBRARY_PATH": str(folder)}
    if script is not None:
        environment[SCRIPT_VARIABLE] = str(script)
    done = subprocess.run(
        [sys.executable, "-c", READ_ONCE], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_host_without_the_library_has_no_devices_and_a_problem_in_words(tmp_path: Path) -> None:
    # A file that is no library ends the loader's search, also on a host that has a driver.
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"")

    assert read_in_a_fresh_process(tmp_path, None) == "NVML: nvmlInit: NVML Shared Library Not Found\n"


def test_a_driver_too_old_for_the_newest_process_lists_is_asked_for_the_older_ones(tmp_path: Path) -> None:
    compile_stub(tmp_path, "-DOLD_DRIVER")
    stub = NvmlStub(tmp_path)
    stub.host(Gpu(uuid=A, compute=f"4242:{1000 * MB}:none"))

    shown = read_in_a_fresh_process(tmp_path, stub.script)

    assert "processes=(ProcessUse(pid=4242, used_mb=1000, container=None),)" in shown
