"""All devices of a host: what is found, with what is declared about it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpukeeper.agents.config import AgentConfig, DeviceConfig
from gpukeeper.agents.devices.inventory import Inventory
from gpukeeper.capacity.device import Device
from gpukeeper.events.errors import ConfigError
from support.amd_tree import AmdTree
from support.moments import Moments
from support.nvml_stub import Gpu, NvmlStub, Slice

pytest_plugins = ["support.nvml_fixture"]

A = "GPU-aaaaaaaa-0000-0000-0000-000000000001"
B = "GPU-bbbbbbbb-0000-0000-0000-000000000002"
AMD = "AMD-8c5c4a2f9d3b1e70"
UNIQUE_ID = "8c5c4a2f9d3b1e70"


class Made:
    """Makes inventories and closes them."""

    def __init__(self, folder: Path) -> None:
        self.meminfo = folder / "meminfo"
        self.meminfo.write_text("MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\n")
        self.proc = folder / "proc"
        self.pci = folder / "pci"
        self.amd = AmdTree(folder)
        self._open: list[Inventory] = []

    def __call__(self, *devices: DeviceConfig, find_devices: bool = True, timeout_s: float = 30.0) -> Inventory:
        config = AgentConfig(host="box", devices=devices, find_devices=find_devices, reading_timeout_s=timeout_s)
        made = Inventory(config, now=Moments(), meminfo=self.meminfo, proc=self.proc, drm=self.amd.drm, pci=self.pci)
        self._open.append(made)
        return made

    async def close(self) -> None:
        for each in self._open:
            await each.close()
            await each.close()


@pytest.fixture
async def make(nvml: NvmlStub, tmp_path: Path) -> AsyncIterator[Made]:
    made = Made(tmp_path)
    yield made
    nvml.release_all()
    await made.close()


async def test_without_a_declaration_the_gpus_are_found_in_the_drivers_order(nvml: NvmlStub, make: Made) -> None:
    nvml.host(Gpu(uuid=B), Gpu(uuid=A))
    inventory = make()

    assert [each.id for each in await inventory.find()] == [B, A]
    assert list(await inventory.read_all()) == [B, A]
    assert inventory.problems() == []


async def test_what_is_declared_about_a_found_gpu_is_added_to_what_was_found(nvml: NvmlStub, make: Made) -> None:
    nvml.host(Gpu(uuid=A), Gpu(uuid=B))
    inventory = make(DeviceConfig(id=B, slots=3, headroom_mb=500, total_mb=20000))

    devices = await inventory.find()

    assert devices == (
        Device(id=B, kind="gpu", name="NVIDIA GeForce RTX 4090", slots=3, headroom_mb=500, limit_mb=20000, index=1),
        Device(id=A, kind="gpu", name="NVIDIA GeForce RTX 4090", index=0),
    )


async def test_with_finding_switched_off_only_declared_devices_are_listed(nvml: NvmlStub, make: Made) -> None:
    nvml.host(Gpu(uuid=A), Gpu(uuid=B))
    inventory = make(DeviceConfig(id=B), find_devices=False)

    assert [each.id for each in await inventory.find()] == [B]


async def test_a_declared_gpu_that_is_absent_is_listed_and_reads_lost(nvml: NvmlStub, make: Made) -> None:
    nvml.host(Gpu(uuid=A))
    inventory = make(DeviceConfig(id=B, slots=2, total_mb=8000))

    devices = await inventory.find()
    readings = await inventory.read_all()

    assert devices[0] == Device(id=B, kind="gpu", name="declared, not found", slots=2, limit_mb=8000)
    assert (readings[B].state, readings[A].state) == ("lost", "healthy")
    assert readings[B].error
    assert inventory.problems() == [f"{B}: declared, not found"]


async def test_a_declared_gpu_without_a_driver_is_listed_and_reads_unknown(nvml: NvmlStub, make: Made) -> None:
    nvml.write("init !9")
    inventory = make(DeviceConfig(id=B))

    reading = (await inventory.read_all())[B]

    assert reading.state == "unknown"
    assert "Driver Not Loaded" in (reading.error or "")
    assert inventory.problems() == ["NVML: nvmlInit: Driver Not Loaded", f"{B}: declared, not found"]


async def test_a_declared_gpu_that_comes_late_is_read_and_looked_up_again(nvml: NvmlStub, make: Made) -> None:
    inventory = make(DeviceConfig(id=A, slots=2))
    await inventory.find()
    nvml.host(Gpu(uuid=A))

    assert (await inventory.read(A)).state == "healthy"
    assert [each.name for each in await inventory.find()] == ["NVIDIA GeForce RTX 4090"]
    assert inventory.problems() == []


async def test_sources_of_every_kind_are_read_together(nvml: NvmlStub, make: Made) -> None:
    nvml.host(Gpu(uuid=A))
    inventory = make(
        DeviceConfig(id="ram", source="cpu", headroom_mb=1024, total_mb=20000),
        DeviceConfig(id="far-gpu", source="static", total_mb=48000),
        DeviceConfig(id="far-cpu", source="static", kind="cpu", total_mb=64000),
    )

    devices = await inventory.find()
    readings = await inventory.read_all()

    assert [(each.id, each.kind) for each in devices] == [
        ("ram", "cpu"),
        ("far-gpu", "gpu"),
        ("far-cpu", "cpu"),
        (A, "gpu"),
    ]
    assert {name: (each.source, each.total_mb, each.free_mb) for name, each in readings.items()} == {
        "ram": ("meminfo", 32768, 16384),
        "far-gpu": ("static", 48000, 48000),
        "far-cpu": ("static", 64000, 64000),
        A: ("nvml", 24564, 23359),
    }


async def test_a_static_device_without_a_capacity_is_unknown_and_a_problem(make: Made) -> None:
    inventory = make(DeviceConfig(id="far", source="static"), find_devices=False)

    reading = await inventory.read("far")

    assert (reading.state, reading.total_mb, reading.free_mb) == ("unknown", None, None)
    assert len(inventory.problems()) == 1
    assert "total_mb" in inventory.problems()[0]


async def test_a_mig_parent_is_told_of_and_its_slices_can_be_declared(nvml: NvmlStub, make: Made) -> None:
    part = "MIG-11111111-aaaa-bbbb-cccc-000000000001"
    nvml.host(Gpu(uuid=A, name="NVIDIA A100", memory="!4", mig={0: Slice(uuid=part)}))
    inventory = make(DeviceConfig(id=part, slots=2))

    devices = await inventory.find()

    assert [(each.id, each.parent, each.slots) for each in devices] == [(part, A, 2), (A, None, 1)]
    assert inventory.problems() == [f"{A} (NVIDIA A100): MIG is on: its slices are devices of their own"]


async def test_amd_cards_are_found_beside_nvidias_and_settings_are_added(nvml: NvmlStub, make: Made) -> None:
    nvml.host(Gpu(uuid=A))
    make.amd.card(0, unique_id=UNIQUE_ID)
    make.amd.card(1)
    inventory = make(DeviceConfig(id=AMD, source="amdgpu", slots=2, headroom_mb=500, total_mb=20000))

    devices = await inventory.find()
    readings = await inventory.read_all()

    assert [(each.id, each.slots, each.headroom_mb, each.limit_mb) for each in devices] == [
        (AMD, 2, 500, 20000),
        (A, 1, 0, None),
        ("AMD-0000-04-00-0", 1, 0, None),
    ]
    assert {(each.source, each.state) for each in readings.values()} == {("amdgpu", "healthy"), ("nvml", "healthy")}
    assert inventory.problems() == []


async def test_a_declared_amd_card_that_is_absent_is_listed_and_reads_lost(make: Made) -> None:
    inventory = make(DeviceConfig(id=AMD, source="amdgpu"), find_devices=False)

    reading = (await inventory.read_all())[AMD]

    assert (reading.state, reading.source) == ("lost", "amdgpu")
    assert inventory.problems() == [f"{AMD}: declared, not found"]


async def test_a_gpu_that_is_declared_with_the_wrong_source_is_not_found_and_not_used_twice(make: Made) -> None:
    make.amd.card(0, unique_id=UNIQUE_ID)
    inventory = make(DeviceConfig(id=AMD))

    assert [each.name for each in await inventory.find()] == ["declared, not found"]


async def test_an_integrated_amd_part_is_used_where_it_is_the_only_gpu(nvml: NvmlStub, make: Made) -> None:
    nvml.write("init !9")
    make.amd.integrated(0, unique_id=UNIQUE_ID)
    inventory = make(DeviceConfig(id="ram", source="cpu"))

    assert [each.id for each in await inventory.find()] == ["ram", AMD]
    assert inventory.problems() == []


async def test_an_integrated_amd_part_beside_another_gpu_is_used_only_where_it_is_declared(
    nvml: NvmlStub, make: Made
) -> None:
    nvml.host(Gpu(uuid=A))
    make.amd.integrated(0, unique_id=UNIQUE_ID)

    assert [each.id for each in await make().find()] == [A]
    assert [each.id for each in await make(DeviceConfig(id=AMD, source="amdgpu")).find()] == [AMD, A]

    nvml.host()
    make.amd.card(1)

    assert [each.id for each in await make().find()] == ["AMD-0000-04-00-0"]


async def test_a_card_of_nvidias_whose_driver_is_not_up_yet_is_another_gpu_and_a_problem(
    nvml: NvmlStub, make: Made
) -> None:
    nvml.write("init !9")
    make.amd.integrated(0, unique_id=UNIQUE_ID)
    (make.pci / "0000:01:00.0").mkdir(parents=True)
    (make.pci / "0000:01:00.0" / "vendor").write_text("0x10de\n")
    (make.pci / "0000:01:00.0" / "class").write_text("0x030000\n")
    inventory = make()

    assert await inventory.find() == ()
    assert inventory.problems() == ["NVML: nvmlInit: Driver Not Loaded"]


async def test_without_any_gpu_it_is_told_that_there_is_no_driver(nvml: NvmlStub, make: Made) -> None:
    nvml.write("init !9")
    inventory = make()

    assert await inventory.find() == ()
    assert inventory.problems() == ["NVML: nvmlInit: Driver Not Loaded"]


async def test_a_device_that_the_host_does_not_have_reads_unknown(make: Made) -> None:
    reading = await make(find_devices=False).read("GPU-elsewhere")

    assert (reading.state, reading.source, reading.device) == ("unknown", "none", "GPU-elsewhere")
    assert reading.error


async def test_one_hung_gpu_leaves_the_other_readings_alone(nvml: NvmlStub, make: Made) -> None:
    nvml.host(Gpu(uuid=A), Gpu(uuid=B))
    inventory = make(DeviceConfig(id="far", source="static", total_mb=1), timeout_s=1.0)
    await inventory.find()
    nvml.host(Gpu(uuid=A, hang=("memory", nvml.gate())), Gpu(uuid=B))

    async with asyncio.timeout(30):
        readings = await inventory.read_all()

    assert {name: each.state for name, each in readings.items()} == {"far": "healthy", A: "unknown", B: "healthy"}


@pytest.mark.parametrize(
    "devices",
    [
        (DeviceConfig(id="x", source="static"), DeviceConfig(id="x", source="cpu")),
        (DeviceConfig(id="x", source="cpu", kind="gpu"),),
        (DeviceConfig(id="x", source="nvml", kind="cpu"),),
        (DeviceConfig(id="x", source="amdgpu", kind="cpu"),),
    ],
    ids=["declared twice", "host memory as a gpu", "a gpu as a cpu", "an amd gpu as a cpu"],
)
def test_a_declaration_that_cannot_be_is_refused_by_name(devices: tuple[DeviceConfig, ...]) -> None:
    with pytest.raises(ConfigError, match="x"):
        Inventory(AgentConfig(host="box", devices=devices), now=Moments())
