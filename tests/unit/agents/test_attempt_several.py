"""Attempts at jobs that take several GPUs, and what attempts share beside devices."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpukeeper.agents.attempt import Attempt, Stop
from gpukeeper.agents.writer import NotRecorded
from gpukeeper.capacity.admission import HostRoom as HostLeft
from gpukeeper.capacity.device import Device
from gpukeeper.capacity.need import Need
from gpukeeper.events import device as device_facts
from gpukeeper.events import job as facts
from gpukeeper.events import subjects
from gpukeeper.events.reasons import Reason
from support.scripted import Card, Cards, Runtime
from support.tenants import Tenants
from support.virtual_time import in_virtual_time


class TwoCards(Tenants):
    """A second card beside the first."""

    def __init__(self) -> None:
        super().__init__()
        self.second = Card(Device(id="g1", kind="gpu", name="card"))
        self.room.inventory = Cards([self.card, self.second])
        self.room.open_slots([self.second.device])
        self.runtime = self.register(Runtime(self.card, devices=("g0", "g1")))

    async def both(self, **sent: Any) -> Attempt:
        route = msgspec.structs.replace(await self.send(**sent), more_devices=("g1",))
        slot = self.room.take_slot("g1")
        assert slot is not None
        return self.attempt(route, more=(slot,))

    async def told_on(self, device_id: str) -> list[str]:
        return [type(fact).__name__ for fact in await self.facts(subjects.device("h1", device_id))]


@in_virtual_time
async def test_a_denial_is_about_the_device_that_is_too_full() -> None:
    host = TwoCards()
    host.second.used_mb = 23_000
    await (await host.both(need={"vram_mb": 6000})).run()

    denied = await host.one(facts.Denied)
    assert (denied.device, denied.usable_mb) == ("g1", 1000)
    assert denied.reading is not None
    assert denied.reading.device == "g1"


@in_virtual_time
async def test_where_one_claim_of_several_was_ended_the_others_are_given_back() -> None:
    host = TwoCards()
    await host.follow()
    attempt = await host.both()

    async def lapse() -> None:
        fact = device_facts.ClaimLapsed(
            host="h1", device="g0", epoch=attempt.epoch, job="a", reason=Reason.CLAIM_LAPSED, detail="silent"
        )
        await host.put(fact)
        attempt.stop(Stop.FENCED)

    # The third append is that of the admission.
    host.log.before[host.log.appends + 3] = lapse
    await attempt.run()

    assert await host.told_on("g0") == ["Claimed", "ClaimLapsed"]
    assert await host.told_on("g1") == ["Claimed", "Released"]


@in_virtual_time
async def test_a_further_claim_that_the_log_refuses_for_good_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = TwoCards()
    attempt = await host.both()
    (second,) = attempt.slots[1:]

    async def refuse(*_: Any, **__: Any) -> int:
        raise NotRecorded("refused for good")

    monkeypatch.setattr(second.subject, "append_once", refuse)
    with pytest.raises(NotRecorded):
        await attempt.run()

    assert await host.told_on("g0") == ["Claimed", "Released"]
    assert host.room.tenancy.jobs("ollama") == 0


@in_virtual_time
async def test_the_hosts_memory_is_promised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Tenants(slots=2)

    async def left(_: object) -> HostLeft:
        return HostLeft(ram_mb=10_000, disk_mb=10_000)

    monkeypatch.setattr(host.room, "host_left", left)
    host.room.host_needs[99] = Need(vram_mb=1000, ram_mb=6000)
    await host.run(need={"vram_mb": 1000, "ram_mb": 6000})

    denied = await host.one(facts.Denied)
    assert denied.reason == Reason.INSUFFICIENT
    assert "6000 MB of the host's memory; 4000 MB are left" in denied.detail


@in_virtual_time
async def test_what_was_promised_of_the_host_is_free_again_after_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Tenants(slots=2)

    async def left(_: object) -> HostLeft:
        return HostLeft(ram_mb=10_000, disk_mb=10_000)

    monkeypatch.setattr(host.room, "host_left", left)
    promised: list[int | None] = []
    host.log.after[host.log.appends + 5] = lambda: promised.extend(n.ram_mb for n in host.room.host_needs.values())
    await host.run(need={"ram_mb": 6000, "vram_mb": 5000})

    assert promised == [6000]
    assert host.room.host_needs == {}


@in_virtual_time
async def test_a_turn_is_left_where_the_log_refuses_what_is_told_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Tenants()
    attempt = host.attempt(await host.send())
    preparation = attempt._preparation  # pyright: ignore[reportPrivateUsage]

    async def refuse() -> None:
        raise NotRecorded("refused for good")

    monkeypatch.setattr(preparation, "_tell_loaded_for_others", refuse)
    turn = await host.room.turns.take(("g0",))
    monkeypatch.setattr(preparation, "_turn", turn)
    with pytest.raises(NotRecorded):
        await preparation.over(break_off=True)

    assert not host.room.turns.taken("g0")
