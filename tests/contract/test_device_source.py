"""What every source of device readings must do, whatever it reads from."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from gpukeeper.agents.devices.amdgpu import AmdSource
from gpukeeper.agents.devices.hostmemory import HostMemorySource
from gpukeeper.agents.devices.nvml import NvmlSource
from gpukeeper.agents.devices.port import DeviceSource
from gpukeeper.agents.devices.static import StaticSource
from gpukeeper.capacity.device import Device
from gpukeeper.events.ids import is_token
from gpukeeper.events.instants import parse_utc
from gpukeeper.events.readings import DeviceReading
from support.amd_tree import AmdTree
from support.moments import Moments
from support.nvml_stub import Gpu, NvmlStub, Slice

pytest_plugins = ["support.nvml_fixture"]

LIMIT_S = 30.0
MEMINFO = "MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\n"


class Case(msgspec.Struct):
    """A source with something to read, and how to break it."""

    source: DeviceSource
    clock: Moments
    break_it: Callable[[], None]


def broken_nvml(nvml: NvmlStub, tmp_path: Path, clock: Moments) -> Case:
    nvml.host(
        Gpu(uuid="GPU-1"),
        Gpu(uuid="GPU-2", name="NVIDIA GB10", memory=None, bar1=None, addressing=2),
        Gpu(uuid="GPU-3", mig={0: Slice(uuid="MIG-GPU-3/1/0")}),
        Gpu(uuid="GPU-4", memory=None),
    )
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(MEMINFO)
    source = NvmlSource(now=clock, limit_s=LIMIT_S, meminfo=meminfo, proc=tmp_path)
    return Case(source=source, clock=clock, break_it=lambda: nvml.write("init !9", "count !1"))


def broken_amdgpu(nvml: NvmlStub, tmp_path: Path, clock: Moments) -> Case:
    tree = AmdTree(tmp_path)
    tree.card(0, unique_id="8c5c4a2f9d3b1e70")
    tree.card(1)
    tree.integrated(2, unique_id="abc")
    tree.card(3, mem_info_vram_total=None)
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(MEMINFO)
    source = AmdSource(now=clock, limit_s=LIMIT_S, drm=tree.drm, meminfo=meminfo)
    return Case(source=source, clock=clock, break_it=lambda: shutil.rmtree(tree.drm))


def broken_cpu(nvml: NvmlStub, tmp_path: Path, clock: Moments) -> Case:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(MEMINFO)
    declared = (Device(id="cpu", kind="cpu", name="host memory", slots=2, headroom_mb=100),)
    source = HostMemorySource(declared, now=clock, limit_s=LIMIT_S, meminfo=meminfo)
    return Case(source=source, clock=clock, break_it=lambda: meminfo.unlink())


def broken_static(nvml: NvmlStub, tmp_path: Path, clock: Moments) -> Case:
    declared = (
        Device(id="known", kind="gpu", name="declared", limit_mb=8000),
        Device(id="bare", kind="cpu", name="declared"),
    )
    return Case(source=StaticSource(declared, now=clock), clock=clock, break_it=lambda: None)


@pytest.fixture(params=[broken_nvml, broken_amdgpu, broken_cpu, broken_static], ids=["nvml", "amdgpu", "cpu", "static"])
async def case(request: pytest.FixtureRequest, nvml: NvmlStub, tmp_path: Path) -> AsyncIterator[Case]:
    made: Case = request.param(nvml, tmp_path, Moments())
    yield made
    await made.source.close()


def check(reading: DeviceReading) -> None:
    """What holds of any reading."""
    figures = (reading.total_mb, reading.used_mb, reading.free_mb)
    if reading.state == "healthy":
        assert all(each is not None for each in figures)
        assert (reading.used_mb or 0) + (reading.free_mb or 0) == reading.total_mb
        assert min(reading.used_mb or 0, reading.free_mb or 0) >= 0
    else:
        assert reading.error
        assert reading.free_mb is None


async def test_every_device_has_a_valid_and_unique_id_and_a_name(case: Case) -> None:
    found = await case.source.find()

    assert found
    assert all(is_token(each.id) and each.name and each.slots >= 1 for each in found)
    assert len({each.id for each in found}) == len(found)


async def test_looking_again_finds_the_same_devices(case: Case) -> None:
    assert await case.source.find() == await case.source.find()


async def test_a_reading_names_its_device_and_adds_up_or_says_why_not(case: Case) -> None:
    found = await case.source.find()

    readings = [await case.source.read(each) for each in found]

    assert [each.device for each in readings] == [each.id for each in found]
    assert any(each.state == "healthy" for each in readings)
    for reading in readings:
        check(reading)


async def test_a_device_that_may_be_scheduled_and_has_a_declared_or_measured_capacity_reads_healthy(
    case: Case,
) -> None:
    found = [each for each in await case.source.find() if each.unschedulable is None and each.id != "bare"]

    assert {(await case.source.read(each)).state for each in found} == {"healthy"}


async def test_the_time_of_a_reading_is_when_it_was_begun_in_utc_and_moves_with_the_clock(case: Case) -> None:
    device = (await case.source.find())[0]

    first = await case.source.read(device)
    later = case.clock.pass_s(1.5)
    second = await case.source.read(device)

    assert first.read_at.endswith("Z")
    assert parse_utc(second.read_at) == later
    assert first.read_at < second.read_at


async def test_devices_can_be_read_at_the_same_time(case: Case) -> None:
    found = await case.source.find()

    readings = await asyncio.gather(*(case.source.read(each) for each in found * 5))

    assert [each.device for each in readings] == [each.id for each in found] * 5


async def test_a_reading_survives_the_way_through_json(case: Case) -> None:
    for device in await case.source.find():
        reading = await case.source.read(device)

        assert msgspec.json.decode(msgspec.json.encode(reading), type=DeviceReading) == reading


async def test_a_source_that_breaks_answers_with_readings_that_say_so_and_never_raises(case: Case) -> None:
    found = await case.source.find()
    case.break_it()

    readings = [await case.source.read(each) for each in found]

    assert {each.id for each in await case.source.find()} >= {each.id for each in found}
    for reading in readings:
        check(reading)


async def test_a_closed_source_may_be_closed_again_and_reading_it_does_not_raise(case: Case) -> None:
    found = await case.source.find()
    await case.source.close()
    await case.source.close()

    for device in found:
        check(await case.source.read(device))
