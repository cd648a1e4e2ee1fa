"""A lane: one thread, one call at a time, never waited for longer than its limit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from gpukeeper.agents.devices.lane import Lane, LaneClosed, LaneStuck

LIMIT_S = 30.0
SHORT_S = 0.01


class Gate:
    """A call that lasts until it is told to end."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()
        self.left = threading.Event()
        self.runs = 0

    def __call__(self) -> str:
        self.runs += 1
        self.entered.set()
        assert self.opened.wait(LIMIT_S)
        self.left.set()
        return "late"


@pytest.fixture
async def lane() -> AsyncIterator[Lane]:
    made = Lane("test")
    yield made
    await made.close(limit_s=LIMIT_S)


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    made = Gate()
    yield made
    made.opened.set()


async def stick(lane: Lane, gate: Gate) -> None:
    """Leave ``gate`` stuck in the lane: begun for certain, and no longer waited for."""
    call = asyncio.ensure_future(lane.call(gate, limit_s=LIMIT_S))
    await asyncio.to_thread(gate.entered.wait, LIMIT_S)
    with pytest.raises(LaneStuck, match="no answer within"):
        await lane.call(lambda: "behind it", limit_s=SHORT_S)
    call.cancel()
    await asyncio.wait({call})


async def test_a_call_runs_in_a_daemon_thread_of_the_lane(lane: Lane) -> None:
    first = await lane.call(threading.current_thread, limit_s=LIMIT_S)
    second = await lane.call(threading.current_thread, limit_s=LIMIT_S)

    assert first is second
    assert first is not threading.main_thread()
    assert first.daemon


async def test_what_a_call_raises_is_raised_to_its_caller_and_the_lane_goes_on(lane: Lane) -> None:
    def fails() -> None:
        raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match="of its own"):
        await lane.call(fails, limit_s=LIMIT_S)

    assert await lane.call(lambda: 1, limit_s=LIMIT_S) == 1


async def test_while_a_call_is_stuck_others_are_refused_at_once_and_never_run(lane: Lane, gate: Gate) -> None:
    await stick(lane, gate)
    ran: list[str] = []

    with pytest.raises(LaneStuck, match="earlier call"):
        await lane.call(lambda: ran.append("second"), limit_s=LIMIT_S)

    assert lane.stuck
    assert ran == []
    assert gate.runs == 1


async def test_when_the_stuck_call_returns_the_lane_serves_again_and_drops_the_late_answer(
    lane: Lane, gate: Gate
) -> None:
    await stick(lane, gate)
    gate.opened.set()
    await asyncio.to_thread(gate.left.wait, LIMIT_S)

    async with asyncio.timeout(LIMIT_S):
        while lane.stuck:
            await asyncio.sleep(0)

    assert await lane.call(lambda: "fresh", limit_s=LIMIT_S) == "fresh"


async def test_a_call_that_waited_in_vain_behind_another_is_never_begun(lane: Lane, gate: Gate) -> None:
    ran: list[str] = []
    first = asyncio.ensure_future(lane.call(gate, limit_s=LIMIT_S))
    await asyncio.to_thread(gate.entered.wait, LIMIT_S)
    with pytest.raises(LaneStuck):
        await lane.call(lambda: ran.append("abandoned"), limit_s=SHORT_S)

    gate.opened.set()

    assert await first == "late"
    assert await lane.call(lambda: "fresh", limit_s=LIMIT_S) == "fresh"
    assert ran == []


async def test_one_stuck_lane_does_not_hold_up_another(lane: Lane, gate: Gate) -> None:
    await stick(lane, gate)
    other = Lane("other")

    assert await other.call(lambda: "served", limit_s=LIMIT_S) == "served"
    assert await other.close(limit_s=LIMIT_S)


async def test_closing_ends_the_thread_and_may_be_repeated() -> None:
    lane = Lane("test")
    thread = await lane.call(threading.current_thread, limit_s=LIMIT_S)

    assert await lane.close(limit_s=LIMIT_S)
    assert await lane.close(limit_s=LIMIT_S)
    assert not thread.is_alive()
    with pytest.raises(LaneClosed):
        await lane.call(lambda: 1, limit_s=LIMIT_S)


async def test_closing_does_not_wait_for_a_stuck_call_and_says_that_it_is_left_behind(lane: Lane, gate: Gate) -> None:
    await stick(lane, gate)

    assert not await lane.close(limit_s=LIMIT_S)


async def test_a_lane_that_was_never_used_starts_no_thread() -> None:
    before = threading.active_count()
    lane = Lane("test")

    assert await lane.close(limit_s=LIMIT_S)
    assert threading.active_count() == before
