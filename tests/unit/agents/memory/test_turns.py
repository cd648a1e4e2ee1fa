"""One load or release at a time on each device."""

from __future__ import annotations

import asyncio

import pytest

from gpukeeper.agents.memory.turns import Turn, Turns
from support.virtual_time import in_virtual_time


async def is_waiting(task: asyncio.Task[Turn]) -> bool:
    await asyncio.sleep(0.01)
    return not task.done()


@in_virtual_time
async def test_turns_on_several_devices_are_given_at_once_in_the_order_of_coming() -> None:
    turns = Turns()
    order: list[str] = []
    now_s = asyncio.get_running_loop().time

    async def work(name: str, *devices: str) -> None:
        turn = await turns.take(devices)
        order.append(f"{name} at {now_s():g}")
        await asyncio.sleep(1)
        turn.leave()

    await asyncio.gather(work("a", "x"), work("b", "x", "y"), work("c", "y"), work("d", "x"))

    assert order == ["a at 0", "b at 1", "c at 2", "d at 2"]
    assert not turns.taken("x")
    assert not turns.taken("y")


@in_virtual_time
async def test_who_names_the_devices_in_another_order_waits_in_no_circle() -> None:
    turns = Turns()
    done: list[str] = []

    async def work(*devices: str) -> None:
        for _ in range(20):
            turn = await turns.take(devices)
            await asyncio.sleep(0.01)
            turn.leave()
        done.append(devices[0])

    async with asyncio.timeout(60):
        await asyncio.gather(work("x", "y", "z"), work("z", "y", "x"), work("y", "x"))

    assert sorted(done) == ["x", "y", "z"]


@in_virtual_time
async def test_a_turn_is_waited_for_until_it_is_left_and_leaving_twice_changes_nothing() -> None:
    turns = Turns()
    first = await turns.take(["g0"])
    second = asyncio.create_task(turns.take(["g0"]))
    assert await is_waiting(second)

    first.leave()
    await second
    first.leave()

    assert turns.taken("g0"), "it is the second's now"


@in_virtual_time
async def test_who_waits_for_several_devices_holds_none_and_is_not_passed_by() -> None:
    turns = Turns()
    first = await turns.take(["g0"])
    both = asyncio.create_task(turns.take(["g0", "g1"]))
    assert await is_waiting(both)
    assert not turns.taken("g1")
    later = asyncio.create_task(turns.take(["g1"]))
    assert await is_waiting(later)

    first.leave()
    (await both).leave()
    (await later).leave()

    assert not turns.taken("g0")
    assert not turns.taken("g1")


@in_virtual_time
async def test_who_gives_up_waiting_holds_nothing_and_lets_the_next_go_ahead() -> None:
    turns = Turns()
    first = await turns.take(["g0"])
    gone = asyncio.create_task(turns.take(["g0", "g1"]))
    assert await is_waiting(gone)
    next_one = asyncio.create_task(turns.take(["g1"]))
    assert await is_waiting(next_one)

    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone

    (await next_one).leave()
    first.leave()
    assert not turns.taken("g1")


@in_virtual_time
async def test_who_is_cancelled_just_when_its_turn_comes_leaves_it() -> None:
    turns = Turns()
    first = await turns.take(["g0"])
    second = asyncio.create_task(turns.take(["g0"]))
    assert await is_waiting(second)

    first.leave()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second

    assert not turns.taken("g0")


@in_virtual_time
async def test_a_turn_at_once_is_given_past_those_who_wait_and_never_where_one_is_held() -> None:
    turns = Turns()
    await turns.take(["g0"])
    both = asyncio.create_task(turns.take(["g0", "g1"]))
    assert await is_waiting(both)

    assert turns.take_at_once(["g0"]) is None
    beside = turns.take_at_once(["g1"])

    assert beside is not None
    assert turns.take_at_once(["g1"]) is None
