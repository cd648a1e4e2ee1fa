from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gpukeeper.agents.writer import CancelWanted, HeldJob, NotRecorded, OwnSubject, Superseded
from gpukeeper.events import device, job, subjects
from gpukeeper.events.log import Outcome, Record
from gpukeeper.events.reasons import Reason
from support.bench import Bench, WatchedLog
from support.history import CLOCKS
from support.virtual_time import in_virtual_time

DEVICE = subjects.device("h1", "g0")
RELEASED = device.Released(host="h1", device="g0", epoch=3, job="a")
STARTED = job.Started(job="a", epoch=3, attempt=1)


def changed(state: Any = "healthy") -> device.Changed:
    return device.Changed(host="h1", device="g0", state=state)


def own(bench: Bench, seq: int = 0) -> OwnSubject:
    return OwnSubject(bench.recorder, DEVICE, "h1/g0", seq)


async def held(bench: Bench) -> HeldJob:
    """A job that is accepted and known."""
    accepted = job.Accepted(
        job="a",
        submission_seq=1,
        producer="cli",
        digest="d",
        kind="inference",
        task="generate",
        model="m",
        clocks=CLOCKS,
    )
    return HeldJob(bench.recorder, "a", await bench.put(accepted))


# --- subjects of its own


@in_virtual_time
async def test_appends_to_an_own_subject_rest_on_one_another() -> None:
    bench = Bench()
    subject = own(bench)

    seqs = [await subject.append(changed()) for _ in range(3)]

    assert seqs == [1, 2, 3]
    assert subject.seq == 3


@in_virtual_time
async def test_appends_at_once_are_stored_one_after_the_other() -> None:
    bench = Bench()
    subject = own(bench)

    seqs = await asyncio.gather(*(subject.append_once(changed()) for _ in range(8)))

    assert sorted(seq or 0 for seq in seqs) == list(range(1, 9))


@in_virtual_time
async def test_what_stays_true_is_appended_whatever_came_between() -> None:
    bench = Bench()
    await bench.put(changed("lost"))
    subject = own(bench)

    assert await subject.append(RELEASED) == 2


@in_virtual_time
async def test_what_rests_on_what_is_known_is_not_appended_after_something_else() -> None:
    bench = Bench()
    await bench.put(changed("lost"))
    subject = own(bench)

    assert await subject.append_once(changed()) is None
    assert subject.seq == 1
    assert await subject.append_once(changed()) == 2


@in_virtual_time
async def test_a_subject_whose_events_have_aged_out_begins_anew() -> None:
    bench = Bench()
    await bench.put(changed("lost"))
    bench.log.age_out(1)
    subject = own(bench, seq=1)

    assert await subject.append(RELEASED) == 2


@in_virtual_time
async def test_a_subject_that_never_stands_still_is_given_up() -> None:
    class Restless(WatchedLog):
        async def append(self, record: Record) -> Outcome:
            await bench.put(changed())
            return await super().append(record)

    bench = Bench(log=Restless())

    with pytest.raises(NotRecorded, match="16 times in a row"):
        await own(bench).append(RELEASED)


@pytest.mark.parametrize("number", [1, 2, 3])
@in_virtual_time
async def test_a_log_that_is_away_is_waited_for(number: int) -> None:
    bench = Bench()
    subject = own(bench)
    bench.log.before[number] = lambda: bench.log.go_away(100, first="stored_unanswered")
    for _ in range(3):
        await subject.append(changed())

    assert await bench.device_told() == ["Changed"] * 3


@in_virtual_time
async def test_a_message_that_is_too_large_is_not_recorded() -> None:
    bench = Bench(log=WatchedLog(message_bytes_max=100))

    with pytest.raises(NotRecorded) as caught:
        await own(bench).append(changed())
    assert caught.value.fields["outcome"] == "too_large"


@in_virtual_time
async def test_an_append_goes_on_when_its_waiter_is_cancelled_and_the_next_one_knows() -> None:
    bench = Bench()
    subject = own(bench)
    task = asyncio.create_task(subject.append(changed("lost")))
    bench.log.after[1] = task.cancel
    with pytest.raises(asyncio.CancelledError):
        await task

    assert await subject.append_once(changed()) == 2


# --- jobs that it holds


@in_virtual_time
async def test_appends_to_a_held_job_rest_on_one_another() -> None:
    bench = Bench()
    held_job = await held(bench)

    assert [await held_job.append(STARTED, epoch=3) for _ in range(2)] == [2, 3]
    assert held_job.seq == 3


@in_virtual_time
async def test_notes_that_came_between_are_stepped_over() -> None:
    bench = Bench()
    held_job = await held(bench)
    await bench.put(job.Waiting(job="a", reason=Reason.CAPACITY))
    await bench.put(job.Resubmitted(job="a", submission_seq=9, producer="cli"))
    await bench.put(job.LateResult(job="a", epoch=1, outcome="failed"))

    assert await held_job.append(STARTED, epoch=3) == 5


@pytest.mark.parametrize(
    "fact",
    [
        job.Cancelled(job="a", actor="mo"),
        job.Waiting(job="a", reason=Reason.CLAIM_LAPSED, epoch=3),
        job.Preempted(job="a", epoch=3, reason=Reason.AGENT_STOPPING),
    ],
    ids=lambda fact: type(fact).__name__,
)
@in_virtual_time
async def test_anything_but_a_note_takes_the_job_away(fact: Any) -> None:
    bench = Bench()
    held_job = await held(bench)
    await bench.put(job.Resubmitted(job="a", submission_seq=9, producer="cli"))
    await bench.put(fact)

    with pytest.raises(Superseded, match=f"{type(fact).__name__} came at sequence 3"):
        await held_job.append(STARTED, epoch=3)
    assert await bench.told() == ["Resubmitted", type(fact).__name__]


@in_virtual_time
async def test_what_nobody_here_can_read_takes_the_job_away() -> None:
    """It may be the end, in the words of a newer version."""
    bench = Bench()
    held_job = await held(bench)
    await bench.log.put(msg("gpuq.ev.job.a", b"garbage"))

    with pytest.raises(Superseded):
        await held_job.append(STARTED, epoch=3)


def msg(subject: str, body: bytes) -> Record:
    return Record(subject=subject, body=body, event_id="g")


@in_virtual_time
async def test_a_wish_for_the_end_that_came_between_is_met() -> None:
    bench = Bench()
    held_job = await held(bench)
    wish = job.CancelRequested(job="a", command_seq=7, actor="mo", reason="enough")
    await bench.put(wish)

    with pytest.raises(CancelWanted) as caught:
        await held_job.append(STARTED, epoch=3)
    assert caught.value.wish == held_job.cancel == wish
    assert await bench.told() == ["CancelRequested"]
    assert await held_job.append(job.Cancelled(job="a", actor="mo"), epoch=3, heed_cancel=False) == 3


@in_virtual_time
async def test_a_job_that_is_overtaken_again_and_again_is_given_up() -> None:
    class Restless(WatchedLog):
        async def append(self, record: Record) -> Outcome:
            await bench.put(job.Resubmitted(job="a", submission_seq=9, producer="cli"))
            return await super().append(record)

    bench = Bench(log=Restless())
    held_job = await held(bench)

    with pytest.raises(NotRecorded, match="16 times in a row"):
        await held_job.append(STARTED, epoch=3)


@in_virtual_time
async def test_a_log_that_is_away_for_long_is_not_taken_for_somebody_else() -> None:
    """What the first try stored is found by its id when the log is back."""
    bench = Bench()
    held_job = await held(bench)
    bench.log.before[1] = lambda: bench.log.go_away(500, first="stored_unanswered")

    assert await held_job.append(STARTED, epoch=3) == 2
    assert await bench.told() == ["Started"]


# --- notes that come late


@in_virtual_time
async def test_a_late_note_is_appended_to_a_job_that_has_moved_on() -> None:
    bench = Bench()
    held_job = await held(bench)
    await bench.put(job.Cancelled(job="a", actor="mo"))
    await held_job.append_late(job.LateResult(job="a", epoch=3, outcome="failed"), epoch=3)

    assert await bench.told() == ["Cancelled", "LateResult"]


@in_virtual_time
async def test_a_late_note_keeps_up_with_a_job_that_moves_on_meanwhile() -> None:
    bench = Bench()
    held_job = await held(bench)
    number = iter(range(5))

    async def move_on() -> None:
        await bench.put(job.Waiting(job="a", reason=Reason.HANDED_BACK, epoch=next(number)))

    for tried in (1, 2, 3):
        bench.log.before[tried] = move_on
    await held_job.append_late(job.LateResult(job="a", epoch=3, outcome="failed"), epoch=3)

    assert await bench.told() == ["Waiting", "Waiting", "Waiting", "LateResult"]


@in_virtual_time
async def test_a_late_note_waits_for_a_log_that_is_away() -> None:
    bench = Bench()
    held_job = await held(bench)
    bench.log.go_away(100)
    await held_job.append_late(job.LateResult(job="a", epoch=3, outcome="failed"), epoch=3)

    assert await bench.told() == ["LateResult"]


@in_virtual_time
async def test_a_late_note_that_finds_no_place_is_no_error() -> None:
    class Restless(WatchedLog):
        async def append(self, record: Record) -> Outcome:
            await bench.put(job.Waiting(job="a", reason=Reason.HANDED_BACK, epoch=1))
            return await super().append(record)

    bench = Bench(log=Restless())
    held_job = await held(bench)
    late = job.LateResult(job="a", epoch=3, outcome="failed")
    await held_job.append_late(late, epoch=3)
    assert set(await bench.told()) == {"Waiting"}

    small = Bench(log=WatchedLog(message_bytes_max=100))
    await small.log.put(msg("gpuq.ev.job.a", b"{}"))
    await HeldJob(small.recorder, "a", 0).append_late(late, epoch=3)
    assert await small.log.last_seq() == 1


@in_virtual_time
async def test_a_late_note_is_not_the_first_word_about_a_job() -> None:
    """Everything about the job has aged out."""
    bench = Bench()
    held_job = await held(bench)
    bench.log.age_out(1)
    await held_job.append_late(job.LateResult(job="a", epoch=3, outcome="failed"), epoch=3)

    assert await bench.log.last_seq() == 1
