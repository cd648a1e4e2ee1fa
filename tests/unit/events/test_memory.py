from __future__ import annotations

import pytest

from gpukeeper.events.errors import LogUnavailable
from gpukeeper.events.log import Appended, Refused, Unanswered
from gpukeeper.events.memory import MemoryLog
from support.records import record

JOB = "gpuq.ev.job.a"


def log_at(moments_ns: list[int], *, duplicate_window_ns: int = 120_000_000_000) -> MemoryLog:
    clock = iter(moments_ns)
    return MemoryLog(now_ns=lambda: next(clock), duplicate_window_ns=duplicate_window_ns)


async def test_an_event_id_is_forgotten_after_the_duplicate_window() -> None:
    log = log_at([0, 100, 101], duplicate_window_ns=100)
    await log.append(record(JOB, "e1"))

    assert await log.append(record(JOB, "e1")) == Appended(1)
    assert await log.append(record(JOB, "e1")) == Appended(2)


async def test_each_fault_happens_to_one_append_in_turn() -> None:
    log = log_at([1, 2])
    log.faults.extend(["unavailable", None, "lost_unanswered", "stored_unanswered"])

    outcomes = [await log.append(record(JOB, f"e{n}")) for n in range(4)]

    assert [type(outcome) for outcome in outcomes] == [Refused, Appended, Unanswered, Unanswered]
    assert [stored.stored_ns for stored in await log.read(JOB)] == [1, 2]


async def test_an_unreadable_log_answers_no_read_and_takes_no_follower() -> None:
    log = log_at([1])
    await log.append(record(JOB, "e1"))
    log.unreadable = True

    for ask in (log.last(JOB), log.get(1), log.read(JOB), log.last_seq(), log.follow(lambda _: None, after=0)):
        with pytest.raises(LogUnavailable):
            await ask
