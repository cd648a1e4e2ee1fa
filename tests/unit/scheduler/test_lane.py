from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest

from gpukeeper.events import subjects
from gpukeeper.events.errors import LogUnavailable
from gpukeeper.events.job import CancelRequested
from gpukeeper.events.proposal import Proposal
from gpukeeper.scheduler.lane import PAUSE_S_MAX, run_lane
from support.virtual_time import in_virtual_time

PROPOSAL = Proposal(
    subject=subjects.job("a"), fact=CancelRequested(job="a", actor="mo", command_seq=1), expected=1, aggregate="a"
)


class Work:
    """What a lane is given: proposals until ``wanted`` of them were taken, and a log that takes them or not."""

    def __init__(self) -> None:
        self.wake = asyncio.Event()
        self.leading = asyncio.Event()
        self.leading.set()
        self.wanted = 1
        self.takes = False
        self.away = False
        #: When each round was committed, in seconds of the loop.
        self.rounds: list[float] = []

    def decide(self) -> Sequence[Proposal]:
        return (PROPOSAL,) if self.wanted else ()

    async def commit(self, proposals: Sequence[Proposal]) -> bool:
        assert proposals == (PROPOSAL,)
        self.rounds.append(asyncio.get_running_loop().time())
        if self.away:
            raise LogUnavailable
        if self.takes:
            self.wanted -= 1
        return self.takes


@asynccontextmanager
async def lane_of(work: Work) -> AsyncGenerator[None]:
    lane = asyncio.create_task(
        run_lane("tests", wake=work.wake, leading=work.leading, decide=work.decide, commit=work.commit)
    )
    yield
    assert not lane.done()
    lane.cancel()
    await asyncio.gather(lane, return_exceptions=True)


@in_virtual_time
async def test_a_lane_whose_appends_are_all_lost_looks_again_ever_more_rarely_up_to_once_a_second() -> None:
    work = Work()
    work.wake.set()
    async with lane_of(work):
        await asyncio.sleep(20)

    pauses = [later - earlier for earlier, later in pairwise(work.rounds)]
    assert pauses == pytest.approx(sorted(pauses))
    assert pauses[-1] == pytest.approx(PAUSE_S_MAX)
    assert len(work.rounds) < 30


@in_virtual_time
async def test_what_is_stored_meanwhile_ends_the_pause() -> None:
    work = Work()
    work.wake.set()
    async with lane_of(work):
        await asyncio.sleep(20)
        rounds = len(work.rounds)
        work.takes = True
        work.wake.set()
        await asyncio.sleep(0.001)

    assert len(work.rounds) == rounds + 1
    assert not work.wanted


@in_virtual_time
async def test_one_event_while_nothing_is_taken_is_one_more_look_and_not_many() -> None:
    work = Work()
    work.wake.set()
    async with lane_of(work):
        await asyncio.sleep(20)
        rounds = len(work.rounds)
        work.wake.set()
        await asyncio.sleep(PAUSE_S_MAX / 2)
        assert len(work.rounds) == rounds + 1


@in_virtual_time
async def test_a_lane_that_appends_goes_on_without_a_pause_until_nothing_is_left_to_decide() -> None:
    work = Work()
    work.takes = True
    work.wanted = 50
    work.wake.set()
    async with lane_of(work):
        await asyncio.sleep(0.01)

    assert len(work.rounds) == 50
    assert len(set(work.rounds)) == 1


@in_virtual_time
async def test_a_lane_decides_nothing_while_another_scheduler_leads() -> None:
    work = Work()
    work.leading.clear()
    work.wake.set()
    async with lane_of(work):
        await asyncio.sleep(10)
        assert not work.rounds
        work.leading.set()
        await asyncio.sleep(0.001)
        assert len(work.rounds) == 1


@in_virtual_time
async def test_a_log_that_is_away_is_asked_once_a_second() -> None:
    work = Work()
    work.away = True
    work.wake.set()
    async with lane_of(work):
        await asyncio.sleep(10)

    assert 9 <= len(work.rounds) <= 11
