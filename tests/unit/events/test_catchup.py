from __future__ import annotations

import asyncio

import pytest

from gpukeeper.events.catchup import catch_up, unless_set
from gpukeeper.events.errors import LogUnavailable
from gpukeeper.events.log import Stored
from gpukeeper.events.memory import MemoryLog
from support.records import record
from support.virtual_time import in_virtual_time, now_ns

JOB = "gpuq.ev.job.a"


def ignore(_: Stored) -> None:
    pass


async def append(log: MemoryLog, *, every_s: float, count: int) -> None:
    for number in range(count):
        await asyncio.sleep(every_s)
        await log.append(record(JOB, f"e{number}"))


@in_virtual_time
async def test_a_reader_that_gets_on_is_waited_for_as_long_as_it_takes() -> None:
    log = MemoryLog(now_ns=now_ns)
    follower = await log.follow(ignore, after=0)
    appending = asyncio.create_task(append(log, every_s=40, count=30))

    await catch_up(follower, 30, silent_s=60)

    assert follower.seen == 30
    await appending
    await follower.stop()


@in_virtual_time
async def test_a_reader_that_is_handed_nothing_is_given_up_on_after_a_while() -> None:
    log = MemoryLog(now_ns=now_ns)
    follower = await log.follow(ignore, after=0)
    appending = asyncio.create_task(append(log, every_s=40, count=3))
    began_s = asyncio.get_running_loop().time()

    with pytest.raises(LogUnavailable) as raised:
        await catch_up(follower, 4, silent_s=60)

    assert raised.value.fields == {"seq": 4, "seen": 3}
    assert 180 <= asyncio.get_running_loop().time() - began_s <= 200
    await appending
    await follower.stop()


@in_virtual_time
async def test_what_breaks_the_reader_is_raised_at_once() -> None:
    def cannot_fold(_: Stored) -> None:
        raise ArithmeticError("no such sum")

    log = MemoryLog(now_ns=now_ns)
    follower = await log.follow(cannot_fold, after=0)
    appending = asyncio.create_task(append(log, every_s=1, count=1))
    began_s = asyncio.get_running_loop().time()

    with pytest.raises(ArithmeticError):
        await catch_up(follower, 1)

    assert asyncio.get_running_loop().time() - began_s == pytest.approx(1)
    await appending


@in_virtual_time
async def test_what_was_seen_already_is_not_waited_for() -> None:
    log = MemoryLog(now_ns=now_ns)
    await log.append(record(JOB, "e1"))
    follower = await log.follow(ignore, after=0)

    await catch_up(follower, 1, silent_s=0)
    await catch_up(follower, 0, silent_s=0)

    await follower.stop()


@in_virtual_time
async def test_work_that_ends_in_time_gives_what_it_returns_or_raises() -> None:
    async def fail() -> None:
        await asyncio.sleep(1)
        raise LogUnavailable("away")

    stop = asyncio.Event()

    assert await unless_set(stop, asyncio.sleep(1, "done")) == "done"
    with pytest.raises(LogUnavailable):
        await unless_set(stop, fail())


@in_virtual_time
async def test_work_is_ended_in_order_when_it_is_to_stop() -> None:
    stop = asyncio.Event()
    ended: list[str] = []

    async def work() -> str:
        try:
            await asyncio.sleep(1_000)
        finally:
            await asyncio.sleep(1)
            ended.append("in order")
        return "done"

    asyncio.get_running_loop().call_later(5, stop.set)

    assert await unless_set(stop, work()) is None
    assert ended == ["in order"]
