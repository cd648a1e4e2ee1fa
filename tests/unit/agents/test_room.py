from __future__ import annotations

import msgspec

from gpukeeper.agents.config import DeviceConfig
from support.rig import rig


async def test_announcing_a_host_again_offers_no_slot_that_is_out_and_those_of_new_devices() -> None:
    known = DeviceConfig(id="gpu0", source="static", kind="gpu", total_mb=1000, slots=2)
    new = DeviceConfig(id="gpu1", source="static", kind="gpu", total_mb=1000)
    async with rig(known, new) as host:
        out = host.room.take_slot("gpu0")
        host.room.open_slots(msgspec.structs.replace(device, name="found") for device in await host.inventory.find())

        assert out is not None
        left = host.room.take_slot("gpu0")
        assert left is not None
        assert left.index != out.index
        assert left.device.name == "found"
        assert host.room.take_slot("gpu0") is None
        host.room.give_slot(out)
        back = host.room.take_slot("gpu0")
        assert back is not None
        assert (back.index, back.device.name) == (out.index, "found")
        assert host.room.take_slot("gpu1") is not None


async def test_a_block_is_lifted_by_no_reading_from_before_it_and_by_one_that_shows_the_memory_since() -> None:
    async with rig() as r:
        before = await r.inventory.read("gpu0")
        r.room.block("gpu0", "it did not let go", free_mb=20_000)

        assert r.room.still_blocked(before) is not None
        assert r.room.still_blocked(await r.inventory.read("gpu0")) is None
        assert r.room.still_blocked(before) is None
