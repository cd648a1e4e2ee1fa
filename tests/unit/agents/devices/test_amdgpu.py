"""AMD GPUs in a made-up sysfs."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpukeeper.agents.devices.amdgpu import AmdSource
from gpukeeper.capacity.device import Device
from gpukeeper.events.readings import DeviceReading
from support.amd_tree import MB, AmdTree
from support.moments import Moments

A, B = "AMD-8c5c4a2f9d3b1e70", "AMD-0000000000000abc"
LIMIT_S = 30.0
HANG_LIMIT_S = 0.5


@pytest.fixture
def tree(tmp_path: Path) -> AmdTree:
    return AmdTree(tmp_path)


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal: 33554432 kB\nMemAvailable: 8388608 kB\n")
    return path


@pytest.fixture
async def source(tree: AmdTree, meminfo: Path) -> AsyncIterator[AmdSource]:
    made = AmdSource(now=Moments(), limit_s=LIMIT_S, drm=tree.drm, meminfo=meminfo)
    yield made
    await made.close()


async def read(source: AmdSource, device_id: str = A) -> DeviceReading:
    found = {device.id: device for device in await source.find()}
    return await source.read(found[device_id])


async def test_a_card_is_listed_by_its_unique_id_and_measured_in_mb(tree: AmdTree, source: AmdSource) -> None:
    tree.card(0, unique_id="8C5C4A2F9D3B1E70", product_name="Radeon PRO W7900")

    (device,) = await source.find()

    assert device == Device(id=A, kind="gpu", name="Radeon PRO W7900", index=0)
    assert await source.read(device) == DeviceReading(
        device=A,
        source="amdgpu",
        read_at="2025-06-01T12:00:00.000000Z",
        total_mb=24560,
        used_mb=1000,
        free_mb=23560,
        utilization_percent=37,
    )
    assert source.problem() is None


@pytest.mark.parametrize("unique_id", [None, "", "0", "0000000000000000", "not hex", "f" * 33])
async def test_a_card_without_a_unique_id_goes_by_its_pci_address(
    tree: AmdTree, source: AmdSource, unique_id: str | None
) -> None:
    tree.card(0, unique_id=unique_id)

    (device,) = await source.find()

    assert (device.id, device.name) == ("AMD-0000-03-00-0", "AMD GPU 0x744c")
    assert (await source.read(device)).state == "healthy"


async def test_two_parts_of_one_unique_id_go_by_their_pci_addresses(tree: AmdTree, source: AmdSource) -> None:
    tree.card(0, unique_id="abc")
    tree.card(1, unique_id="abc", mem_info_vram_used=0)

    found = await source.find()

    assert [each.id for each in found] == ["AMD-0000-03-00-0", "AMD-0000-04-00-0"]
    assert [(await source.read(each)).used_mb for each in found] == [1000, 0]


async def test_a_part_that_has_no_identity_of_its_own_is_a_problem_and_hides_no_other(
    tree: AmdTree, source: AmdSource
) -> None:
    tree.card(0, uevent=None)
    tree.card(1, unique_id="8c5c4a2f9d3b1e70")
    tree.card(2, unique_id="abc", uevent=None)
    tree.card(3, unique_id="abc")

    assert [each.id for each in await source.find()] == [A, "AMD-0000-06-00-0"]
    assert source.problem() == (
        "card0: an AMD GPU without a unique_id or a PCI address has no identity; card2: another GPU goes by AMD-abc too"
    )


async def test_other_vendors_displays_and_connectors_are_left_alone(tree: AmdTree, source: AmdSource) -> None:
    tree.card(0, vendor="0x10de")
    tree.card(1, vendor=None)
    tree.card(10, unique_id="8c5c4a2f9d3b1e70")
    tree.card(2, unique_id="0000000000000abc")

    assert [each.id for each in await source.find()] == [B, A]
    assert source.problem() is None


async def test_a_host_without_gpus_has_no_devices_and_no_problem(tmp_path: Path) -> None:
    source = AmdSource(now=Moments(), limit_s=LIMIT_S, drm=tmp_path / "missing")

    assert await source.find() == ()
    assert source.problem() is None
    absent = await source.read(Device(id=A, kind="gpu", name="declared"))
    assert (absent.state, absent.free_mb) == ("lost", None)
    await source.close()


async def test_a_list_that_cannot_be_read_is_a_problem_and_what_it_hides_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "drm").write_text("no folder")
    source = AmdSource(now=Moments(), limit_s=LIMIT_S, drm=tmp_path / "drm")

    assert await source.find() == ()
    assert "Not a directory" in (source.problem() or "")
    absent = await source.read(Device(id=A, kind="gpu", name="declared"))
    assert absent.state == "unknown"
    assert "Not a directory" in (absent.error or "")
    await source.close()


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"mem_info_vram_used": None}, "mem_info_vram_used: No such file"),
        ({"mem_info_vram_used": ""}, "'' is not a number"),
        ({"mem_info_vram_used": "-1"}, "'-1' is not a number"),
        ({"mem_info_vram_used": "N/A"}, "'N/A' is not a number"),
        ({"mem_info_vram_used": "\u0663"}, "is not a number"),
        ({"mem_info_vram_used": 24561 * MB}, f"{24561 * MB} bytes of VRAM used of {24560 * MB} cannot be"),
        ({"mem_info_vram_total": 0, "mem_info_vram_used": 0}, "0 bytes of VRAM cannot be"),
        ({"mem_info_vram_total": 2**64 - 1}, "cannot be"),
        ({"mem_info_vram_total": "9" * 4200}, "is not a number"),
    ],
)
async def test_figures_that_are_missing_or_cannot_be_are_unknown_and_never_free(
    tree: AmdTree, source: AmdSource, files: dict[str, object], words: str
) -> None:
    tree.card(0, unique_id="8c5c4a2f9d3b1e70", **files)

    reading = await read(source)

    assert (reading.state, reading.total_mb, reading.used_mb, reading.free_mb) == ("unknown", None, None, None)
    assert words in (reading.error or "")


async def test_a_card_without_any_memory_figures_has_unknown_capacity_and_is_not_scheduled(
    tree: AmdTree, source: AmdSource
) -> None:
    tree.card(0, unique_id="8c5c4a2f9d3b1e70", mem_info_vram_total=None, mem_info_vram_used=None)

    (device,) = await source.find()

    assert "capacity is unknown" in (device.unschedulable or "")
    assert (await source.read(device)).state == "unknown"


@pytest.mark.parametrize("percent", [None, "", "many", "101", "-1"])
async def test_a_share_of_use_that_is_not_told_is_none_and_not_zero(
    tree: AmdTree, source: AmdSource, percent: str | None
) -> None:
    tree.card(0, unique_id="8c5c4a2f9d3b1e70", gpu_busy_percent=percent)

    reading = await read(source)

    assert (reading.state, reading.utilization_percent) == ("healthy", None)


async def test_figures_are_rounded_so_that_no_byte_is_promised_twice(tree: AmdTree, source: AmdSource) -> None:
    tree.card(0, unique_id="8c5c4a2f9d3b1e70", mem_info_vram_total=100 * MB + 5, mem_info_vram_used=1)

    reading = await read(source)

    assert (reading.total_mb, reading.used_mb, reading.free_mb) == (100, 1, 99)


async def test_an_integrated_part_lends_the_hosts_memory_as_far_as_it_is_available(
    tree: AmdTree, source: AmdSource, meminfo: Path
) -> None:
    tree.integrated(0, unique_id="8c5c4a2f9d3b1e70")

    scarce = await read(source)
    meminfo.write_text("MemTotal: 33554432 kB\nMemAvailable: 31457280 kB\n")
    plenty = await read(source)

    assert source.is_integrated(A)
    assert (scarce.unified, scarce.total_mb, scarce.used_mb, scarce.free_mb) == (True, 16000, 7808, 8192)
    assert (plenty.unified, plenty.total_mb, plenty.used_mb, plenty.free_mb) == (True, 16000, 1000, 15000)


async def test_an_integrated_part_whose_own_memory_is_larger_than_what_it_may_borrow_uses_its_own(
    tree: AmdTree, source: AmdSource
) -> None:
    tree.integrated(0, unique_id="8c5c4a2f9d3b1e70", mem_info_vram_total=96000 * MB)

    reading = await read(source)

    assert (reading.unified, reading.total_mb, reading.free_mb) == (False, 96000, 95800)


@pytest.mark.parametrize("sign", [{"mem_busy_percent": 1}, {"pcie_bw": "0 0 256"}, {"gpu_busy_percent": None}])
async def test_a_small_card_is_not_taken_for_an_integrated_part(
    tree: AmdTree, source: AmdSource, sign: dict[str, object]
) -> None:
    tree.integrated(0, unique_id="8c5c4a2f9d3b1e70", **sign)

    reading = await read(source)

    assert not source.is_integrated(A)
    assert (reading.unified, reading.total_mb) == (False, 512)


@pytest.mark.parametrize("broken", ["meminfo", "mem_info_gtt_total"])
async def test_an_integrated_part_of_which_not_all_is_known_is_unknown(
    tree: AmdTree, source: AmdSource, meminfo: Path, broken: str
) -> None:
    tree.integrated(0, unique_id="8c5c4a2f9d3b1e70")
    if broken == "meminfo":
        meminfo.unlink()
    else:
        tree.set(0, broken, None)

    reading = await read(source)

    assert (reading.state, reading.free_mb) == ("unknown", None)
    assert broken in (reading.error or "")


async def test_a_card_that_vanishes_is_lost_and_stays_listed_and_reads_again_under_another_number(
    tree: AmdTree, source: AmdSource
) -> None:
    tree.card(0, unique_id="8c5c4a2f9d3b1e70")
    tree.card(1, unique_id="0000000000000abc")
    first, second = await source.find()
    tree.unplug(0)

    gone, other = await source.read(first), await source.read(second)
    found = await source.find()
    tree.card(5, unique_id="8c5c4a2f9d3b1e70", mem_info_vram_used=0)
    back = await source.read(first)

    assert (gone.state, gone.free_mb, other.state) == ("lost", None, "healthy")
    assert gone.error
    assert found == (first, second)
    assert (back.state, back.used_mb) == ("healthy", 0)


@pytest.mark.parametrize(("unique_id", "state"), [("0000000000000abc", "lost"), (None, "unknown")])
async def test_figures_are_never_taken_from_another_card_that_has_got_the_number(
    tree: AmdTree, source: AmdSource, unique_id: str | None, state: str
) -> None:
    tree.card(0, unique_id="8c5c4a2f9d3b1e70")
    (device,) = await source.find()
    tree.unplug(0)
    tree.card(0, unique_id=unique_id, mem_info_vram_total=9999 * MB)

    reading = await source.read(device)

    assert (reading.state, reading.total_mb) == (state, None)


async def test_a_card_by_its_place_is_lost_when_another_place_has_got_its_number(
    tree: AmdTree, source: AmdSource
) -> None:
    tree.card(0)
    (device,) = await source.find()
    tree.set(0, "uevent", "PCI_SLOT_NAME=0000:99:00.0")

    assert (await source.read(device)).state == "lost"


async def test_a_card_whose_files_are_there_and_whose_device_is_not_is_lost(
    tree: AmdTree, source: AmdSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tree.card(0, unique_id="8c5c4a2f9d3b1e70")
    (device,) = await source.find()
    tree.set(0, "mem_info_vram_used", None)
    monkeypatch.chdir(folder)  # a socket's name may not be long
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("mem_info_vram_used")  # opening it answers ENXIO, as an unplugged device does

        reading = await source.read(device)

    assert (reading.state, reading.free_mb) == ("lost", None)
    assert "No such device" in (reading.error or "")


async def test_a_card_that_hangs_is_unknown_and_the_others_are_read(tree: AmdTree, meminfo: Path) -> None:
    folder = tree.card(0, unique_id="8c5c4a2f9d3b1e70")
    tree.card(1, unique_id="0000000000000abc")
    source = AmdSource(now=Moments(), limit_s=HANG_LIMIT_S, drm=tree.drm, meminfo=meminfo)
    first, second = await source.find()
    gate = folder / "mem_info_vram_used"
    gate.unlink()
    os.mkfifo(gate)

    hung, other = await asyncio.gather(source.read(first), source.read(second))
    again = await source.read(first)
    found = await source.find()
    both_ends = os.open(gate, os.O_RDWR | os.O_NONBLOCK)  # lets the reader go
    tree.set(0, "mem_info_vram_used", 0)
    os.close(both_ends)
    async with asyncio.timeout(LIMIT_S):
        while (back := await source.read(first)).state != "healthy":
            await asyncio.sleep(0)
    await source.close()

    assert (hung.state, hung.free_mb, other.state) == ("unknown", None, "healthy")
    assert "no answer within 0.5 s" in (hung.error or "")
    assert "still not returned" in (again.error or "")
    assert found == (first, second)
    assert back.used_mb == 0


async def test_more_cards_than_are_looked_at_are_a_problem_in_words(tree: AmdTree, source: AmdSource) -> None:
    for number in range(65):
        tree.card(number)

    assert len(await source.find()) == 64
    assert source.problem() == "the kernel lists 65 GPUs, 64 are used"
