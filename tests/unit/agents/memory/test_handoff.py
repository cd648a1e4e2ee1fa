"""Room is made on a device: who is asked, what is believed, and what the log is told. In virtual time."""

from __future__ import annotations

import asyncio

import pytest

from gpukeeper.agents.memory.handoff import Made, Refused
from gpukeeper.agents.runtimes.port import RuntimeFailure
from gpukeeper.events.device import Changed, Reclaimed, ReclaimFailed, ReclaimRefused, ReclaimRequested
from gpukeeper.events.reasons import Reason
from gpukeeper.events.runtime import Pinned
from support.tenants import GRACE_S, Tenants
from support.virtual_time import in_virtual_time


async def tenants(*held_mb: int, rested_s: float = GRACE_S + 1) -> Tenants:
    """A card of 24,000 MB, with runtimes ``r0``, ``r1``, ... that hold so much of it and rested for so long."""
    host = Tenants()
    for number, mb in enumerate(held_mb):
        host.add(f"r{number}", mb)
    await host.follow()
    await host.rest(rested_s)
    return host


@pytest.mark.parametrize(("rested_s", "released"), [(299, False), (301, True)])
@in_virtual_time
async def test_an_owner_is_asked_after_its_grace_and_not_before(rested_s: float, released: bool) -> None:
    host = await tenants(20_000, rested_s=rested_s)
    found = await host.make_room(10_000, job="a", epoch=7)

    assert isinstance(found, Made if released else Refused)
    assert host.asked() == (["r0/r0"] if released else [])
    if not released:
        (refused,) = await host.device_facts(ReclaimRefused)
        assert refused.considered[-1].kept is Reason.IN_GRACE
        assert "idle 299 s of 300 s" in refused.detail


@in_virtual_time
async def test_the_least_that_fits_is_asked_and_what_was_measured_is_told() -> None:
    host = await tenants(9_000, 5_000, 6_000)
    found = await host.make_room(8_000, job="a", epoch=7)

    assert isinstance(found, Made)
    assert found.free_mb == 9_000
    assert host.asked() == ["r1/r1"]
    (requested,) = await host.device_facts(ReclaimRequested)
    (reclaimed,) = await host.device_facts(Reclaimed)
    assert (requested.promised_mb, requested.free_mb, requested.need_mb) == (5_000, 4_000, 8_000)
    assert (reclaimed.measured_mb, reclaimed.free_mb, reclaimed.more) == (5_000, 9_000, False)
    assert found.generations == (reclaimed.generation,)


@in_virtual_time
async def test_c24_what_a_release_lacks_is_asked_of_the_next_owner() -> None:
    """C24: 60 % of what was promised comes back."""
    host = await tenants(9_000, 7_000, 8_000)
    host.owners["r0"].release_share = 0.6
    found = await host.make_room(9_000, job="a", epoch=7)

    assert isinstance(found, Made)
    assert found.free_mb == 5_400 + 7_000
    assert [fact.measured_mb for fact in await host.device_facts(Reclaimed)] == [5_400, 7_000]


@in_virtual_time
async def test_c24_where_nobody_has_the_rest_the_asker_hears_so_and_the_promise_counts_for_nothing() -> None:
    host = await tenants(9_000, 15_000)
    host.owners["r0"].release_share = 0.6
    host.owners["r1"].idle_word = "busy"
    await host.rest(1)
    found = await host.make_room(9_000, job="a", epoch=7)

    assert isinstance(found, Refused)
    assert found.reason is Reason.INSUFFICIENT
    assert "5400 MB usable" in found.detail
    assert "r1/r1 holds 15000 MB and stays: it is busy" in found.detail


@in_virtual_time
async def test_an_owner_that_refuses_is_told_and_the_next_one_is_asked() -> None:
    host = await tenants(9_000, 8_500)
    host.owners["r1"].release_failure = RuntimeFailure(Reason.RELEASE_FAILED, "no")
    found = await host.make_room(14_000, job="a", epoch=7)

    assert isinstance(found, Made)
    assert host.asked() == ["r0/r0", "r1/r1"]
    (failed,) = await host.device_facts(ReclaimFailed)
    assert (failed.runtime, failed.reason) == ("r1", Reason.RELEASE_FAILED)
    assert failed.detail == "r1/r1 did not let go: no"
    assert not host.room.blocked


@in_virtual_time
async def test_two_models_of_one_runtime_that_never_says_what_it_does_go_one_after_the_other() -> None:
    """An Ollama says nothing of its activity: that the first model has gone is no sign of somebody's work."""
    host = Tenants()
    sole = host.add("sole", 9_000, sole_client=True)
    sole.idle_word = "unknown"
    sole.size_mb = 8_000
    sole.holds("second")
    await host.follow()
    await host.rest(GRACE_S + 1)
    found = await host.make_room(20_000, job="a", epoch=7)

    assert isinstance(found, Made)
    assert sole.releases_asked == ["sole", "second"]


@in_virtual_time
async def test_c5_an_owner_that_lists_on_what_it_was_asked_to_let_go_of_blocks_the_device_until_it_shows() -> None:
    host = await tenants(20_000)
    owner = host.owners["r0"]
    owner.release_share = 0.0
    owner.on_release = lambda _model: owner.holds("r0", vram_mb=0)
    began_s = host.now_s
    found = await host.make_room(10_000, job="a", epoch=7)

    assert isinstance(found, Refused)
    assert host.now_s - began_s == pytest.approx(60, abs=1)
    (changed,) = await host.device_facts(Changed)
    assert changed.state == "blocked"
    assert host.room.told_states["g0"] == "blocked"
    again = await host.make_room(10_000, job="b", epoch=8)
    assert isinstance(again, Refused)
    assert again.reason is Reason.DEVICE_BLOCKED
    assert len(await host.device_facts(ReclaimRequested)) == 1
    host.card.used_mb = 0
    assert isinstance(await host.make_room(10_000, job="b", epoch=8), Made)
    assert not host.room.blocked


@in_virtual_time
async def test_c57_an_owner_that_says_it_holds_nothing_while_the_device_shows_it_blocks_the_device() -> None:
    host = await tenants(20_000)
    owner = host.owners["r0"]
    owner.release_share = 0.0
    found = await host.make_room(10_000, job="a", epoch=7)

    assert isinstance(found, Refused)
    assert found.reason is Reason.RELEASE_FAILED
    assert "the owner of the rest is unknown" in found.detail
    assert "g0" in host.room.blocked


@in_virtual_time
async def test_c26_a_device_that_shows_it_late_is_waited_for() -> None:
    """C26: the low value for three seconds, then the high one."""
    host = await tenants(20_000)
    owner = host.owners["r0"]
    owner.shown_after_s = 3.0
    found = await host.make_room(20_000, job="a", epoch=7)

    assert isinstance(found, Made)
    assert found.free_mb == 24_000


@pytest.mark.parametrize("why", ["cancelled", "job", "pin", "loading"])
@in_virtual_time
async def test_c41_a_release_that_is_not_wanted_any_more_when_it_is_stored_is_dropped(why: str) -> None:
    """C41: what changes between the decision and the moment of sending stops it."""
    host = await tenants(20_000)
    wanted = True

    async def happen() -> None:
        nonlocal wanted
        match why:
            case "cancelled":
                wanted = False
            case "job":
                host.room.tenancy.enter("r0", 8)
            case "pin":
                await host.put(Pinned(host="h1", runtime="r0", model="r0", actor="mo"))
                await asyncio.sleep(0)
            case _:
                host.room.tenancy.loading("r0", +1)

    host.log.before[host.log.appends + 1] = happen
    found = await host.make_room(10_000, job="a", epoch=7, wanted=lambda: wanted)

    assert isinstance(found, Refused)
    assert host.asked() == []
    (failed,) = await host.device_facts(ReclaimFailed)
    reasons = {"cancelled": Reason.NOT_NEEDED, "pin": Reason.PINNED}
    assert failed.reason is reasons.get(why, Reason.OWNER_BUSY)
    assert "dropped" in failed.detail
    assert not host.room.blocked


@in_virtual_time
async def test_c41_a_release_that_was_sent_is_awaited_when_its_asker_leaves() -> None:
    host = await tenants(20_000)
    owner = host.owners["r0"]
    owner.release_s = 5.0
    asking = asyncio.create_task(host.make_room(10_000, job="a", epoch=7))
    await asyncio.sleep(1)
    asking.cancel()
    settled = asyncio.create_task(host.room.tenancy.until_settled("r0"))
    began_s = host.now_s
    await settled
    await asyncio.wait({asking})

    assert asking.cancelled()
    assert host.now_s - began_s == pytest.approx(4, abs=1.5)
    (reclaimed,) = await host.device_facts(Reclaimed)
    assert reclaimed.measured_mb == 20_000
    assert not host.room.turns.taken("g0")


@in_virtual_time
async def test_an_owner_on_a_device_where_somebody_loads_now_is_not_asked() -> None:
    """Its release would change what that load is measured by."""
    host = Tenants()
    owner = host.add("wide", 20_000, devices=("g0", "g1"))
    await host.follow()
    await host.rest(GRACE_S + 1)
    other = await host.room.turns.take(("g1",))
    found = await host.make_room(10_000, job="a", epoch=7)

    assert isinstance(found, Refused)
    assert "it is loading" in found.detail or "nobody can tell" in found.detail
    other.leave()
    assert owner.releases_asked == []


# --- wishes


@in_virtual_time
async def test_a_wish_for_all_hears_of_each_release_and_then_that_nothing_more_comes() -> None:
    host = await tenants(9_000, 8_000)
    found = await host.make_room(None, wanted_seq=5)

    assert isinstance(found, Made)
    assert found.answered
    assert [fact.more for fact in await host.device_facts(Reclaimed)] == [True, False]
    assert await host.device_facts(ReclaimRefused) == []


@in_virtual_time
async def test_a_wish_whose_first_owner_refuses_hears_that_another_answer_follows() -> None:
    host = await tenants(9_000, 8_000)
    host.owners["r0"].release_failure = RuntimeFailure(Reason.RELEASE_FAILED, "no")
    found = await host.make_room(None, wanted_seq=5)

    assert isinstance(found, Made)
    (failed,) = await host.device_facts(ReclaimFailed)
    (reclaimed,) = await host.device_facts(Reclaimed)
    assert failed.more
    assert not reclaimed.more
    assert (failed.wanted_seq, reclaimed.wanted_seq) == (5, 5)


@in_virtual_time
async def test_a_wish_that_is_short_after_a_release_hears_the_refusal_as_the_last_word() -> None:
    host = await tenants(9_000)
    for owner in host.owners.values():
        owner.release_share = 0.6
    found = await host.make_room(24_000, wanted_seq=5)

    assert isinstance(found, Refused)
    (reclaimed,) = await host.device_facts(Reclaimed)
    (refused,) = await host.device_facts(ReclaimRefused)
    assert reclaimed.more
    assert refused.wanted_seq == 5


@in_virtual_time
async def test_a_wish_that_is_fulfilled_early_hears_that_nothing_more_is_released() -> None:
    """Two were to go, and the first gave more than it had said."""
    host = await tenants(9_000, 8_000)
    for owner in host.owners.values():
        owner.release_share = 2.0
    host.card.used_mb = 24_000
    await host.rest(1)
    found = await host.make_room(16_000, wanted_seq=5)

    assert isinstance(found, Made)
    assert [fact.more for fact in await host.device_facts(Reclaimed)] == [True]
    (last,) = await host.device_facts(ReclaimRefused)
    assert (last.reason, last.wanted_seq) == (Reason.NOT_NEEDED, 5)
