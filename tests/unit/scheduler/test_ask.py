"""Questions over a log in memory, in virtual time: nobody waits for real."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from gpukeeper.events import subjects
from gpukeeper.events.fact import Fact
from gpukeeper.events.job import Accepted, Failed, LateResult, Rejected, Resubmitted, Succeeded
from gpukeeper.events.log import Appended, Record, Stored
from gpukeeper.events.memory import MemoryLog
from gpukeeper.events.objects import MemoryObjects, put_body
from gpukeeper.events.proposal import Proposal
from gpukeeper.events.reasons import Reason
from gpukeeper.events.recorder import Recorder, Stamp
from gpukeeper.events.spec import Problem
from gpukeeper.events.tasks import end_all
from gpukeeper.events.work import JobResult, ObjectRef
from gpukeeper.projections.runner import SiteProjection
from gpukeeper.projections.site import Retention
from gpukeeper.scheduler.ask import AskService, Limits
from gpukeeper.scheduler.live import Live
from support.history import CLOCKS
from support.virtual_time import in_virtual_time, now_ns

MESSAGE_BYTES_MAX = 100_000


class SlowLog(MemoryLog):
    """Counts the looks that go to the log, and holds their answers back while ``hold`` is set."""

    looks = 0
    hold: asyncio.Event | None = None

    async def get(self, seq: int) -> Stored | None:
        self.looks += 1
        found = await super().get(seq)
        if self.hold is not None:
            await self.hold.wait()
        return found

    async def read(self, subject: str, *, after: int = 0) -> Sequence[Stored]:
        self.looks += 1
        found = await super().read(subject, after=after)
        if self.hold is not None:
            await self.hold.wait()
        return found


class Desk:
    """A scheduler's questions, and a log that a test writes to."""

    def __init__(self, log: SlowLog, limits: Limits, retention: Retention) -> None:
        self.log = log
        self.objects = MemoryObjects()
        self._ids = iter(range(1_000_000))
        stamp = Stamp(source="/tests", new_id=self.new_id, now=lambda: "2025-10-19T14:00:00Z")
        self._recorder = Recorder(log, stamp)
        self.projection = SiteProjection(log, retention=retention, on_event=lambda event: self.service.heard(event))
        self.service = AskService(self.projection, Live(), log, self.objects, limits)

    def new_id(self) -> str:
        # Of another desk on the same log, too, the ids are its own.
        return f"{id(self)}-{next(self._ids)}"

    async def submit(self, **fields: object) -> int:
        body = json.dumps({"model": "m", "prompt": "p"} | fields).encode()
        outcome = await self.log.append(Record(subject="gpuq.submit.me", body=body, event_id=self.new_id()))
        assert isinstance(outcome, Appended)
        return outcome.seq

    async def write(self, fact: Fact, job: str) -> int:
        last = await self.log.last(subjects.job(job))
        proposal = Proposal(
            subject=subjects.job(job), fact=fact, expected=0 if last is None else last.seq, aggregate=job
        )
        outcome = await self._recorder.record(proposal)
        assert isinstance(outcome, Appended)
        return outcome.seq

    async def accept(self, job: str, submission_seq: int) -> int:
        fact = Accepted(
            job=job,
            submission_seq=submission_seq,
            producer="me",
            digest="d",
            kind="inference",
            task="generate",
            model="m",
            clocks=CLOCKS,
        )
        return await self.write(fact, job)

    async def succeed(self, job: str, text: str = "hi", *, ref: ObjectRef | None = None) -> int:
        result = JobResult(text=text) if ref is None else None
        return await self.write(Succeeded(job=job, epoch=1, attempt=1, result=result, result_ref=ref), job)

    def ask(self, raw: bytes | None = None, **question: object) -> asyncio.Task[dict[str, Any]]:
        """Ask; the task ends with the reply."""

        async def asked() -> dict[str, Any]:
            answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

            async def reply(text: bytes) -> None:
                answered.set_result(text)

            await self.service.ask(json.dumps(question).encode() if raw is None else raw, reply)
            return json.loads(await answered)

        return asyncio.create_task(asked())


@asynccontextmanager
async def desk(
    log: SlowLog | None = None, *, limits: Limits | None = None, retention: Retention | None = None
) -> AsyncGenerator[Desk]:
    """A scheduler over ``log``, or over an empty one."""
    opened = Desk(log or SlowLog(now_ns=now_ns), limits or Limits(), retention or Retention())
    await opened.projection.start()
    opened.service.start(answer_bytes_max=MESSAGE_BYTES_MAX)
    working = asyncio.create_task(opened.service.run())
    try:
        yield opened
    finally:
        await end_all([working])
        await opened.service.stop()
        await opened.projection.stop()


async def settled(task: asyncio.Task[dict[str, Any]]) -> None:
    """Let everything happen that needs no time to pass; the question must still wait."""
    await asyncio.sleep(0.001)
    assert not task.done()


def elapsed_s(since: float) -> float:
    return asyncio.get_running_loop().time() - since


@in_virtual_time
async def test_a_submission_is_answered_while_somebody_waits_for_it() -> None:
    async with desk() as d:
        seq = await d.submit()
        asked = d.ask(submission_seq=seq)
        await settled(asked)
        await d.accept("a", seq)

        told = await asked
        assert (told["job"], told["phase"], told["timed_out"]) == ("a", "waiting", False)
        assert d.service.waiting == 0


@in_virtual_time
async def test_a_question_may_come_before_the_submission_is_heard_of() -> None:
    async with desk() as d:
        known = d.ask(submission_seq=1, until="known")
        answered = d.ask(submission_seq=1, until="answered")
        await settled(known)
        assert await d.submit() == 1

        assert (await known)["phase"] == "submitted"
        await settled(answered)
        await d.accept("a", 1)
        assert (await answered)["job"] == "a"


@in_virtual_time
async def test_a_job_ends_while_somebody_waits_for_it_by_id_or_by_submission() -> None:
    async with desk() as d:
        seq = await d.submit()
        by_seq = d.ask(submission_seq=seq, until="ended", wait_s=60)
        by_id = d.ask(job="a", until="ended", wait_s=60)
        await settled(by_seq)
        await d.accept("a", seq)
        await settled(by_seq)
        await settled(by_id)
        end = await d.succeed("a", "because")

        for told in (await by_seq, await by_id):
            assert (told["ended"], told["timed_out"], told["seq"]) == (True, False, end)
            assert told["result"] == {"text": "because"}


@in_virtual_time
@pytest.mark.parametrize("question", [{"submission_seq": 1}, {"job": "a"}], ids=str)
async def test_what_happens_during_a_look_into_the_log_is_not_missed(question: dict[str, object]) -> None:
    async with desk() as d:
        begin = asyncio.get_running_loop().time()
        d.log.hold = asyncio.Event()
        waits = [d.ask(None, **question, until=until, wait_s=60) for until in ("known", "answered", "ended")]
        await settled(waits[-1])
        await d.accept("a", await d.submit(id="a"))
        await settled(waits[-1])
        d.log.hold.set()

        assert [(await told)["phase"] for told in waits[:2]] == ["waiting", "waiting"]
        await d.succeed("a")
        assert (await waits[2])["ended"] is True
        assert elapsed_s(begin) < 1


@in_virtual_time
async def test_a_rejection_ends_every_wait_and_comes_with_its_problems() -> None:
    async with desk() as d:
        seq = await d.submit()
        asked = [d.ask(submission_seq=seq, until=until) for until in ("answered", "ended")]
        await settled(asked[0])
        problems = (Problem(path="model", message="no such model"),)
        await d.write(
            Rejected(job="r", submission_seq=seq, producer="me", reason=Reason.UNKNOWN_MODEL, problems=problems), "r"
        )

        for told in (await asked[0], await asked[1]):
            assert (told["job"], told["phase"], told["reason"]) == ("r", "rejected", "unknown_model")
            assert told["problems"] == [{"path": "model", "message": "no such model"}]


@in_virtual_time
async def test_a_wait_that_is_over_is_answered_with_what_is_known_by_then() -> None:
    async with desk() as d:
        begin = asyncio.get_running_loop().time()
        seq = await d.submit()
        told = await d.ask(submission_seq=seq, wait_s=3)
        assert (told["phase"], told["timed_out"]) == ("submitted", True)
        assert elapsed_s(begin) == pytest.approx(3)

        await d.accept("a", seq)
        told = await d.ask(submission_seq=seq, until="ended", wait_s=4)
        assert (told["job"], told["phase"], told["ended"], told["timed_out"]) == ("a", "waiting", False, True)
        assert elapsed_s(begin) == pytest.approx(7)
        # Nothing to wait for, and nothing is waited for.
        assert (await d.ask(submission_seq=seq, until="ended", wait_s=0))["timed_out"] is True
        assert (await d.ask(submission_seq=seq, until="known"))["timed_out"] is False
        assert elapsed_s(begin) == pytest.approx(7)


@in_virtual_time
async def test_what_is_not_known_by_the_end_of_the_wait_is_an_error() -> None:
    async with desk() as d:
        begin = asyncio.get_running_loop().time()
        seq = await d.accept("a", await d.submit())

        assert (await d.ask(job="b"))["error"]["code"] == "unknown_job"
        assert elapsed_s(begin) == pytest.approx(10)
        # No submission stands there, now or later.
        assert (await d.ask(submission_seq=seq, wait_s=1))["error"]["code"] == "unknown_submission"
        assert (await d.ask(submission_seq=999, wait_s=0))["error"]["code"] == "unknown_submission"


@in_virtual_time
async def test_a_question_that_is_none_is_refused_at_once() -> None:
    async with desk() as d:
        begin = asyncio.get_running_loop().time()
        for raw in (b"{", b"{}", b'{"job":"a","whose":"mine"}', b'{"job":"a.b"}'):
            assert (await d.ask(raw))["error"]["code"] == "invalid"
        assert elapsed_s(begin) == 0
        assert d.service.waiting == 0


@in_virtual_time
async def test_a_repeated_submission_is_answered_as_the_job_that_the_first_one_made() -> None:
    async with desk() as d:
        first = await d.submit(id="a")
        await d.accept("a", first)
        await d.succeed("a")
        second = await d.submit(id="a")
        asked = d.ask(submission_seq=second)
        await settled(asked)
        note = await d.write(Resubmitted(job="a", submission_seq=second, producer="me"), "a")

        told = await asked
        assert (told["job"], told["submission_seq"], told["phase"], told["seq"]) == ("a", first, "succeeded", note)
        # The end stands below a note.
        assert told["result"] == {"text": "hi"}


@in_virtual_time
async def test_forgotten_jobs_are_read_from_the_log() -> None:
    async with desk(retention=Retention(above=1), limits=Limits(answered=1)) as d:
        one = await d.submit(id="a")
        await d.accept("a", one)
        await d.succeed("a", "one")
        await d.write(LateResult(job="a", epoch=1, outcome="failed"), "a")
        again = await d.submit(id="a")
        await d.write(Resubmitted(job="a", submission_seq=again, producer="me"), "a")
        nameless = await d.submit()
        stored = await d.log.get(nameless)
        assert stored is not None
        derived = f"{stored.stored_ns // 1_000_000_000}-{nameless:08x}"
        # Somebody chose just that handle as the id of a job.
        taken = await d.submit(id=derived)
        await d.accept(derived, taken)
        await d.succeed(derived, "taken")
        await d.accept(f"{derived}-2", nameless)
        await d.write(Failed(job=f"{derived}-2", reason=Reason.RUNTIME_ERROR, detail="it broke"), f"{derived}-2")
        await d.accept("last", await d.submit())
        await d.succeed("last")
        assert set(d.projection.site.jobs) == {"last"}

        by_id = d.ask(job="a", until="ended", wait_s=0)
        by_seq = [d.ask(submission_seq=seq, until="ended", wait_s=0) for seq in (one, again)]
        for told in await asyncio.gather(by_id, *by_seq):
            assert (told["job"], told["phase"], told["submission_seq"]) == ("a", "succeeded", one)
            assert told["result"] == {"text": "one"}
        told = await d.ask(submission_seq=nameless, until="ended", wait_s=0)
        assert (told["job"], told["phase"], told["detail"]) == (f"{derived}-2", "failed", "it broke")


@in_virtual_time
async def test_a_job_whose_events_have_aged_out_is_unknown() -> None:
    async with desk(retention=Retention(above=1), limits=Limits(answered=1)) as d:
        for job in ("a", "b"):
            await d.accept(job, await d.submit(id=job))
            await d.succeed(job)
        d.log.age_out(3)

        assert (await d.ask(job="a", wait_s=0))["error"]["code"] == "unknown_job"
        assert (await d.ask(submission_seq=1, wait_s=0))["error"]["code"] == "unknown_submission"


@in_virtual_time
async def test_a_scheduler_that_starts_answers_what_was_asked_before() -> None:
    log = SlowLog(now_ns=now_ns)
    async with desk(log) as d:
        ended, unanswered = await d.submit(), await d.submit()
        await d.accept("a", ended)
        await d.succeed("a")
        left = d.ask(submission_seq=unanswered, wait_s=60)
        await settled(left)
    # Whoever waits is sent to another scheduler, or to this one when it is back.
    error = (await left)["error"]
    assert (error["code"], error["retryable"]) == ("stopping", True)

    async with desk(log) as d:
        assert (await d.ask(submission_seq=ended, until="ended", wait_s=0))["result"] == {"text": "hi"}
        again = d.ask(submission_seq=unanswered, wait_s=60)
        await settled(again)
        await d.accept("b", unanswered)
        assert (await again)["job"] == "b"


@in_virtual_time
async def test_a_result_in_the_object_store_is_told_where_it_fits_and_named_where_it_does_not() -> None:
    async with desk() as d:
        for job, chars in (("fits", 70_000), ("large", MESSAGE_BYTES_MAX)):
            ref = await put_body(d.objects, msgspec.json.encode(JobResult(text="x" * chars)))
            await d.accept(job, await d.submit(id=job))
            await d.succeed(job, ref=ref)

        fits, large = await d.ask(job="fits"), await d.ask(job="large")
        assert fits["result"] == {"text": "x" * 70_000}
        assert fits["result_ref"]["size"] > 70_000
        assert "omitted" not in fits
        assert (large["omitted"], large["result_ref"]["size"]) == (["result"], MESSAGE_BYTES_MAX + 11)

        await d.objects.delete(fits["result_ref"]["object"])
        assert (await d.ask(job="fits"))["omitted"] == ["result"]


@in_virtual_time
async def test_more_questions_than_the_limit_are_refused_and_room_comes_back() -> None:
    async with desk(limits=Limits(questions=2)) as d:
        waits = [d.ask(job="a", wait_s=5), d.ask(job="b", wait_s=5)]
        await settled(waits[1])
        error = (await d.ask(job="c"))["error"]
        assert (error["code"], error["retryable"]) == ("busy", True)

        await asyncio.gather(*waits)
        assert (await d.ask(job="c", wait_s=0))["error"]["code"] == "unknown_job"


@in_virtual_time
async def test_a_thousand_questions_about_one_job_cost_a_handful_of_looks() -> None:
    async with desk() as d:
        seq = await d.submit()
        waits = [d.ask(submission_seq=seq, until="ended", wait_s=60) for _ in range(1000)]
        await settled(waits[-1])
        await d.accept("a", seq)
        await settled(waits[-1])
        d.log.looks = 0
        await d.succeed("a")

        assert {told["result"]["text"] for told in await asyncio.gather(*waits)} == {"hi"}
        told = await asyncio.gather(*(d.ask(job="a", until="ended") for _ in range(1000)))
        assert len(told) == 1000
        assert d.log.looks <= 10


@in_virtual_time
async def test_others_take_their_turn_while_many_are_answered() -> None:
    async with desk() as d:
        await d.accept("a", await d.submit())
        turns = 0

        async def lane() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(lane())
        await asyncio.gather(*(d.ask(job="a") for _ in range(500)))
        await end_all([other])
        assert turns >= 500


@in_virtual_time
async def test_a_log_that_does_not_answer_is_said_and_the_next_question_is_answered() -> None:
    async with desk() as d:
        await d.accept("a", await d.submit())
        await d.succeed("a")
        d.log.unreadable = True
        error = (await d.ask(job="a"))["error"]
        assert (error["code"], error["retryable"]) == ("log_unavailable", True)

        d.log.unreadable = False
        assert (await d.ask(job="a"))["phase"] == "succeeded"


@in_virtual_time
async def test_a_fault_while_answering_ends_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async with desk(limits=Limits(workers=1)) as d:
        await d.accept("a", await d.submit())
        with monkeypatch.context() as broken:
            broken.setattr("gpukeeper.scheduler.ask.answer", None)
            assert (await d.ask(job="a"))["error"]["code"] == "internal"

        assert (await d.ask(job="a"))["phase"] == "waiting"
        assert d.service.waiting == 0
