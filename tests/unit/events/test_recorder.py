from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from gpukeeper.events import job, subjects
from gpukeeper.events.codec import event_id_of
from gpukeeper.events.log import Appended, Outcome, Record, Refused, Unanswered
from gpukeeper.events.memory import Fault, MemoryLog
from gpukeeper.events.proposal import Proposal
from gpukeeper.events.recorder import Recorder, Stamp
from support.records import record

JOB = "gpuq.ev.job.a"
SUBMIT = "gpuq.submit.tests"


def memory_log(**options: object) -> MemoryLog:
    now_ns = iter(range(1_000_000))
    return MemoryLog(now_ns=lambda: next(now_ns), **options)  # type: ignore[arg-type]


def recorder_of(log: MemoryLog, *, settle_s: float = 30.0) -> Recorder:
    ids = iter(range(1_000_000))
    stamp = Stamp(source="/site/s/agent/h", new_id=lambda: f"id-{next(ids)}", now=lambda: "2025-10-19T14:00:00Z")
    return Recorder(log, stamp, settle_s=settle_s, retry_s=0)


@pytest.fixture(params=["sequence_first", "duplicates_first"])
def log(request: pytest.FixtureRequest) -> MemoryLog:
    return memory_log(check_order=request.param)


class Interrupted(MemoryLog):
    """A log where something happens between an append and the look that settles it."""

    def __init__(self, meanwhile: Callable[[MemoryLog], Outcome | None]) -> None:
        super().__init__(now_ns=lambda: 0)
        self._meanwhile = meanwhile
        self.appends = 0

    async def append(self, record: Record) -> Outcome:
        outcome = await super().append(record)
        self.appends += 1
        return self._meanwhile(self) or outcome


@pytest.mark.parametrize("expected", [0, None])
@pytest.mark.parametrize(
    "faults",
    [
        [],
        ["stored_unanswered"],
        ["lost_unanswered"],
        ["unavailable"],
        ["lost_unanswered", "unavailable", "stored_unanswered"],
        ["stored_unanswered", "unavailable", "lost_unanswered"],
        ["unavailable", "lost_unanswered", "unavailable", "lost_unanswered"],
    ],
)
async def test_an_append_is_settled_as_stored_once_whatever_became_of_its_attempts(
    log: MemoryLog, faults: list[Fault], expected: int | None
) -> None:
    log.faults.extend(faults)

    outcome = await recorder_of(log).settle(record(JOB, "e1", expected=expected))

    assert outcome == Appended(1)
    assert await log.last_seq() == 1


@pytest.mark.parametrize("fault", ["stored_unanswered", "lost_unanswered"])
async def test_an_unconditional_append_is_found_though_others_followed_on_its_subject(
    log: MemoryLog, fault: Fault
) -> None:
    """The newest message of the subject is another one: the server's memory of ids tells where ours is."""
    log.faults.extend([fault])
    first = await log.append(record(SUBMIT, "e1"))
    assert isinstance(first, Unanswered)
    await log.append(record(SUBMIT, "other"))
    log.faults.append("unavailable")

    outcome = await recorder_of(log).settle(record(SUBMIT, "e1"))

    stored = [event_id_of(message.body) for message in await log.read(SUBMIT)]
    assert sorted(id_ or "" for id_ in stored) == ["e1", "other"]
    assert outcome == Appended(stored.index("e1") + 1)


async def test_a_conditional_append_is_found_though_others_followed_on_its_subject(log: MemoryLog) -> None:
    log.faults.append("stored_unanswered")
    await log.append(record(JOB, "e1", expected=0))
    await log.append(record(JOB, "e2", expected=1))

    assert await recorder_of(log).settle(record(JOB, "e1", expected=0)) == Appended(1)


async def test_a_lost_append_whose_subject_moved_on_is_stale(log: MemoryLog) -> None:
    await log.append(record(JOB, "winner", expected=0))
    log.faults.append("lost_unanswered")

    outcome = await recorder_of(log).settle(record(JOB, "e1", expected=0))

    assert isinstance(outcome, Refused)
    assert outcome.code == "stale"
    assert await log.last_seq() == 1


async def test_a_stale_append_is_refused_after_one_look(log: MemoryLog) -> None:
    await log.append(record(JOB, "winner", expected=0))
    log.faults.extend([None, "unavailable"])

    outcome = await recorder_of(log).settle(record(JOB, "e1", expected=0))

    assert isinstance(outcome, Refused)
    assert outcome.code == "stale"
    assert list(log.faults) == ["unavailable"]


async def test_a_refusal_because_the_subject_is_not_there_yet_is_given_back_at_once(log: MemoryLog) -> None:
    """Expected more than there is: reading finds nothing new, and the refusal stands."""
    outcome = await recorder_of(log).settle(record(JOB, "e1", expected=7))

    assert isinstance(outcome, Refused)
    assert outcome.code == "stale"


async def test_a_message_too_large_is_not_tried_again() -> None:
    log = memory_log(message_bytes_max=10)
    log.faults.extend([None, "stored_unanswered"])

    outcome = await recorder_of(log).settle(record(JOB, "e1"))

    assert isinstance(outcome, Refused)
    assert outcome.code == "too_large"
    assert len(log.faults) == 1


async def test_an_append_is_settled_when_the_log_is_readable_again(log: MemoryLog) -> None:
    log.faults.append("stored_unanswered")
    log.unreadable = True
    log.faults.append("unavailable")
    settling = asyncio.ensure_future(recorder_of(log).settle(record(JOB, "e1", expected=0)))
    while log.faults:
        await asyncio.sleep(0)

    log.unreadable = False

    assert await settling == Appended(1)
    assert await log.last_seq() == 1


async def test_an_append_nobody_took_is_unavailable_when_the_time_is_up(log: MemoryLog) -> None:
    log.faults.extend(["unavailable", "unavailable", "unavailable"])

    outcome = await recorder_of(log, settle_s=0).settle(record(JOB, "e1", expected=0))

    assert isinstance(outcome, Refused)
    assert outcome.code == "unavailable"
    assert await log.last_seq() == 0


@pytest.mark.parametrize("then", [Refused("unavailable"), Refused("in_flight"), Refused("full"), Refused("denied")])
async def test_a_refusal_after_an_unanswered_attempt_does_not_say_that_it_was_refused(then: Refused) -> None:
    """The first attempt may be in the log, where nobody can read just now."""

    def meanwhile(log: MemoryLog) -> Outcome | None:
        log.unreadable = True
        assert isinstance(log, Interrupted)
        return Unanswered() if log.appends == 1 else then

    log = Interrupted(meanwhile)

    outcome = await recorder_of(log, settle_s=0.02).settle(record(JOB, "e1", expected=0))

    assert isinstance(outcome, Unanswered)
    assert log.appends > 1


async def test_no_more_appends_are_under_way_than_allowed() -> None:
    under_way: list[int] = []
    going = 0

    class Slow(MemoryLog):
        async def append(self, record: Record) -> Outcome:
            nonlocal going
            going += 1
            under_way.append(going)
            await asyncio.sleep(0)
            going -= 1
            return await super().append(record)

    stamp = Stamp(source="/t", new_id=lambda: "x", now=lambda: "t")
    recorder = Recorder(Slow(now_ns=lambda: 0), stamp, in_flight_max=3)
    await asyncio.gather(*(recorder.settle(record(SUBMIT, f"e{n}")) for n in range(12)))

    assert max(under_way) == 3


async def test_a_proposal_is_stamped_with_id_source_and_time_and_keeps_what_it_names(log: MemoryLog) -> None:
    recorder = recorder_of(log)
    proposal = Proposal(
        subject=subjects.job("j1"),
        fact=job.Started(job="j1", epoch=7, attempt=1),
        expected=0,
        aggregate="j1",
        correlationid="j1",
        causationid="c1",
        actor="mo",
        epoch=7,
    )

    first, second = recorder.stamped(proposal), recorder.stamped(proposal)
    outcome = await recorder.record(proposal)

    assert (first.event_id, second.event_id) == ("id-0", "id-1")
    assert (first.subject, first.expected) == ("gpuq.ev.job.j1", 0)
    assert msgspec.json.decode(first.body) == {
        "specversion": "1.0",
        "id": "id-0",
        "source": "/site/s/agent/h",
        "type": "gpuq.job.started.v1",
        "subject": "j1",
        "time": "2025-10-19T14:00:00Z",
        "data": {"job": "j1", "epoch": 7, "attempt": 1},
        "correlationid": "j1",
        "causationid": "c1",
        "actor": "mo",
        "epoch": 7,
    }
    assert outcome == Appended(1)
