"""One load or release at a time on each device."""

from __future__ import annotations

import asyncio

from gpukeeper.agents.memory.turns import Turn, Turns
from support.virtual_time import in_virtual_time


async def _take(turns: Turns, *devices: str) -> Turn:
    return await asyncio.wait_for(turns.take(devices), 1)


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
async def test_who_is_cancelled_while_it_waits_for_several_holds_none_and_holds_up_nobody() -> None:
    turns = Turns()
    first = await _take(turns, "y")
    waiting = asyncio.create_task(turns.take(("x", "y")))
    await asyncio.sleep(0)
    assert not turns.taken("x")
    behind = asyncio.create_task(turns.take(("x",)))
    await asyncio.sleep(0)
    assert not behind.done()
    waiting.cancel()
    await asyncio.wait({waiting})

    (await asyncio.wait_for(behind, 1)).leave()
    assert not turns.taken("x")
    first.leave()
    assert not turns.taken("y")


@in_virtual_time
async def test_a_turn_that_comes_in_the_moment_of_a_cancel_is_passed_on() -> None:
    turns = Turns()
    first = await _take(turns, "x")
    gone = asyncio.create_task(turns.take(("x",)))
    next_one = asyncio.create_task(turns.take(("x",)))
    await asyncio.sleep(0)
    first.leave()
    gone.cancel()
    turn = await asyncio.wait_for(next_one, 1)

    assert turns.taken("x")
    turn.leave()
    assert not turns.taken("x")


@in_virtual_time
async def test_a_turn_at_once_is_all_or_nothing_and_never_waits() -> None:
    turns = Turns()
    first = await _take(turns, "x")

    assert turns.take_at_once(("x", "y")) is None
    assert not turns.taken("y")
    second = turns.take_at_once(("y", "z"))
    assert second is not None
    first.leave()
    second.leave()
    assert not any(turns.taken(each) for each in "xyz")


@in_virtual_time
async def test_leaving_twice_takes_the_turn_from_nobody() -> None:
    turns = Turns()
    first = await _take(turns, "x")
    first.leave()
    second = await _take(turns, "x")
    first.leave()

    assert turns.taken("x")
    second.leave()
