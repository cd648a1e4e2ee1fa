"""Loads belong to the agent: one for each model at a time, and no release meanwhile. In virtual time."""

from __future__ import annotations

import asyncio

import pytest

from gpukeeper.agents.memory.handoff import Refused
from gpukeeper.agents.runtimes.port import RuntimeFailure
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import Work
from support.tenants import GRACE_S, Tenants
from support.virtual_time import in_virtual_time


@in_virtual_time
async def test_c10_two_jobs_that_want_one_model_wait_for_one_load_and_who_leaves_does_not_break_it_off() -> None:
    host = Tenants()
    loads = host.room.loads
    first = loads.begin(host.runtime, "m", Work(), on_cpu=False)
    second = loads.begin(host.runtime, "m:latest", Work(), on_cpu=False)
    leaving = asyncio.create_task(first.wait())
    staying = asyncio.create_task(second.wait())
    await asyncio.sleep(1)
    leaving.cancel()
    await asyncio.wait({leaving, staying})

    assert leaving.cancelled()
    assert not staying.cancelled()
    assert host.runtime.loads == ["m"]
    assert host.runtime.cuts == []
    assert host.room.tenancy.working("ollama") == 0


@in_virtual_time
async def test_a_load_that_fails_fails_for_all_and_the_next_one_is_a_new_one() -> None:
    host = Tenants()
    host.runtime.load_failure = RuntimeFailure(Reason.LOAD_FAILED, "no")
    load = host.room.loads.begin(host.runtime, "m", Work(), on_cpu=False)
    found = await asyncio.gather(load.wait(), load.wait(), return_exceptions=True)
    host.runtime.load_failure = None
    await host.room.loads.begin(host.runtime, "m", Work(), on_cpu=False).wait()

    assert all(isinstance(each, RuntimeFailure) for each in found)
    assert host.runtime.loads == ["m", "m"]


@in_virtual_time
async def test_a_load_that_takes_too_long_for_who_goes_is_broken_off_once() -> None:
    host = Tenants()
    host.runtime.load_s = 100.0
    load = host.room.loads.begin(host.runtime, "m", Work(), on_cpu=False)
    await asyncio.gather(load.over(10), load.over(10))

    assert host.now_s == pytest.approx(10)
    assert len(host.runtime.cuts) == 1
    assert not load.going


@in_virtual_time
async def test_nothing_is_released_from_a_runtime_that_loads_nor_between_its_load_and_the_request() -> None:
    host = Tenants()
    host.runtime.size_mb = 5_000
    host.runtime.holds("old")
    await host.follow()
    await host.rest(GRACE_S + 1)
    host.runtime.load_s = 30.0
    host.room.tenancy.enter("ollama", 7)
    host.room.tenancy.use("ollama", 7)
    load = host.room.loads.begin(host.runtime, "m", Work(), on_cpu=False)
    during = await host.make_room(22_000, job="b", epoch=8)
    await load.wait()
    await host.rest(GRACE_S + 1)
    after = await host.make_room(22_000, job="b", epoch=8)
    host.room.tenancy.leave("ollama", 7)
    # A look in the same moment proves nothing yet.
    await host.rest(2)
    ended = await host.make_room(22_000, job="b", epoch=8)

    assert isinstance(during, Refused)
    assert isinstance(after, Refused)
    assert "1 job(s) load or run there" in after.detail
    assert isinstance(ended, Refused)
    assert "idle 1 s of 300 s" in ended.detail
    assert host.asked() == []


@in_virtual_time
async def test_one_load_or_release_at_a_time_whoever_begins_them() -> None:
    """Many askers on one device, each releasing what the one before brought in."""
    host = Tenants()
    host.runtime.size_mb = 15_000
    going = most = 0

    def begins(_model: str | None) -> None:
        nonlocal going, most
        going += 1
        most = max(most, going)

    host.runtime.on_release = begins
    host.runtime.release_s = 2.0
    host.runtime.holds("m0")
    await host.follow()
    looking = asyncio.create_task(host.rest(8 * (GRACE_S + 20)))

    async def job(number: int) -> None:
        nonlocal going, most
        turn = await host.room.turns.take(("g0",))
        await asyncio.sleep(GRACE_S + 1)
        asker = {"job": f"j{number}", "epoch": 100 + number}
        made = await host.make_room_in_turn(16_000, **asker)
        going -= 1
        assert not isinstance(made, Refused), made
        begins(None)
        await host.room.loads.begin(host.runtime, f"m{number}", Work(), on_cpu=False).wait()
        going -= 1
        turn.leave()

    await asyncio.gather(*(job(number) for number in range(1, 5)))
    looking.cancel()
    await asyncio.wait({looking})

    assert most == 1
    assert host.runtime.going_max <= 1
    assert host.asked() == [f"ollama/m{number}" for number in range(4)]
