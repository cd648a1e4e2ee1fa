"""Answers questions about jobs: at once, or when what they wait for has happened.

A question that waits costs a record and a timer, no task. Questions that are due are grouped by what they are about:
one look into the state and the log answers all of a group, and a few workers take the groups one after another, so that
thousands of questions take turns with the lanes and do not push them aside.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import structlog

from gpukeeper.events.ask import Answer, Question, Refusal, encode_answer, encode_refusal, parse_question
from gpukeeper.events.codec import Event, Submitted
from gpukeeper.events.errors import LogUnavailable
from gpukeeper.events.fact import Fact
from gpukeeper.events.job import ENDS, Accepted, Rejected, Resubmitted, Succeeded
from gpukeeper.events.log import Log
from gpukeeper.events.objects import Objects
from gpukeeper.events.services import Reply
from gpukeeper.events.work import JobResult
from gpukeeper.projections.alone import fold_alone
from gpukeeper.projections.home import is_at_home
from gpukeeper.projections.job import Job
from gpukeeper.projections.runner import SiteProjection
from gpukeeper.scheduler.answers import TOLD_BY_THE_END, Found, Missing, Unanswered, answer, holds, unknown
from gpukeeper.scheduler.live import Live
from gpukeeper.scheduler.lookup import answered_as, end_of, history_of, stored_result, submission_at

_log = structlog.get_logger("gpukeeper.ask")

#: What a question is about: the handle of a job, or the sequence of a submission.
_Key = int | str

_BUSY = Refusal(code="busy", message="too many questions wait: ask again")
_STOPPING = Refusal(code="stopping", message="this scheduler stops: ask again")
_INTERNAL = Refusal(code="internal", message="a fault in gpukeeper: the scheduler's log has the traceback")


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How much may wait, and how much of the past is known without a look into the log."""

    #: Questions that wait or are about to be answered; one more is refused as ``busy``.
    questions: int = 10_000
    #: Answered submissions whose job is known.
    answered: int = 100_000
    #: Looks into the log at the same time.
    workers: int = 4


class _Pending:
    """A question that has no answer yet."""

    __slots__ = ("expired", "parked", "question", "reply", "timer")

    def __init__(self, question: Question, reply: Reply) -> None:
        self.question = question
        self.reply = reply
        #: Whether its wait is over.
        self.expired = question.wait_s == 0
        #: Under which key it waits for an event, where it does.
        self.parked: _Key | None = None
        self.timer: asyncio.TimerHandle | None = None


class AskService:
    """The questions of one process.

    Args:
        projection: the folded state; :meth:`heard` must be called after each event.
        live: heartbeats, for the tokens of a job that runs.
        log: where ends, results and forgotten jobs are read.
        payloads: where large results are.
    """

    def __init__(
        self, projection: SiteProjection, live: Live, log: Log, payloads: Objects, limits: Limits | None = None
    ) -> None:
        self._projection = projection
        self._live = live
        self._log = log
        self._payloads = payloads
        self._limits = limits or Limits()
        #: Submission -> job, the oldest answers first.
        self._answered: dict[int, str] = {}
        #: Every question without an answer, and those among them that wait for an event, by what they wait for.
        self._pending: dict[_Pending, None] = {}
        self._parked: dict[_Key, dict[_Pending, None]] = {}
        #: Questions to look at, by what they are about.
        self._due: dict[_Key, list[_Pending]] = {}
        self._wake = asyncio.Event()
        #: What an answer may take in one message; set with :meth:`start`.
        self._answer_bytes_max = 0

    @property
    def waiting(self) -> int:
        """Questions without an answer so far."""
        return len(self._pending)

    def start(self, *, answer_bytes_max: int) -> None:
        """Begin with what the projection has folded by now."""
        self._answer_bytes_max = answer_bytes_max
        known = {job.submission_seq: job.id for job in self._projection.site.jobs.values()}
        self._answered = {**known, **self._answered}
        self._bound_answered()

    # --- what is heard

    def heard(self, event: Event) -> None:
        """An event was folded: questions that it may answer are due."""
        fact = event.data
        if isinstance(fact, Accepted | Rejected | Resubmitted):
            if is_at_home(event):
                self._answered.setdefault(fact.submission_seq, fact.job)
                self._bound_answered()
                self._call(fact.submission_seq)
                self._call(fact.job)
        elif isinstance(fact, ENDS):
            self._call(fact.job)
        elif isinstance(fact, Submitted):
            self._call(event.seq)

    def _bound_answered(self) -> None:
        while len(self._answered) > self._limits.answered:
            del self._answered[next(iter(self._answered))]

    async def ask(self, raw: bytes, reply: Reply) -> None:
        """Take a question. Returns at once; the answer goes to ``reply``."""
        question = parse_question(raw)
        if isinstance(question, Refusal):
            await reply(encode_refusal(question))
            return
        if len(self._pending) >= self._limits.questions:
            await reply(encode_refusal(_BUSY))
            return
        pending = _Pending(question, reply)
        self._pending[pending] = None
        if not pending.expired:
            pending.timer = asyncio.get_running_loop().call_later(question.wait_s, self._expire, pending)
        self._make_due(question.key, [pending])

    # --- waiting

    def _call(self, key: _Key) -> None:
        """Look at everything that waits for ``key``."""
        called = self._parked.pop(key, None)
        if called:
            for pending in called:
                pending.parked = None
            self._make_due(key, list(called))

    def _expire(self, pending: _Pending) -> None:
        pending.expired = True
        key = pending.parked
        if key is not None:
            self._unpark(pending, key)
            self._make_due(key, [pending])

    def _park(self, pending: _Pending, key: _Key) -> None:
        pending.parked = key
        self._parked.setdefault(key, {})[pending] = None

    def _unpark(self, pending: _Pending, key: _Key) -> None:
        pending.parked = None
        beside = self._parked[key]
        del beside[pending]
        if not beside:
            del self._parked[key]

    def _make_due(self, key: _Key, questions: list[_Pending]) -> None:
        self._due.setdefault(key, []).extend(questions)
        self._wake.set()

    # --- answering

    async def run(self) -> None:
        """Answer until cancelled."""
        async with asyncio.TaskGroup() as workers:
            for _ in range(self._limits.workers):
                workers.create_task(self._work())

    async def _work(self) -> None:
        while True:
            await self._wake.wait()
            if not self._due:
                self._wake.clear()
                continue
            key = next(iter(self._due))
            group = self._due.pop(key)
            # The lanes take their turn between two groups, also where a look needs no await.
            await asyncio.sleep(0)
            try:
                await self._serve(key, group)
            except LogUnavailable as error:
                await self._refuse(group, Refusal(code="log_unavailable", message=error.message))
            except Exception:  # noqa: BLE001
                # A question must not end the scheduler: others would send it again to the next one.
                _log.exception("question_failed", about=key)
                await self._refuse(group, _INTERNAL)

    async def _serve(self, key: _Key, group: Sequence[_Pending]) -> None:
        """One look for all of ``group``.

        1. What waits on goes back to waiting, in the same turn of the loop as the look: no event is missed between.
        2. What is known, or known not to be, is answered.
        """
        found = await self._find(key)
        under = found.id if isinstance(found, Job) else key
        now: list[_Pending] = []
        for pending in group:
            if pending not in self._pending:
                continue
            if pending.expired or holds(found, pending.question.until):
                now.append(pending)
            else:
                self._park(pending, under)
        if not now:
            return
        if isinstance(found, Missing):
            await self._refuse(now, unknown(key))
            return
        known = await self._answer(found)
        texts: dict[bool, bytes] = {}
        for pending in now:
            timed_out = not holds(found, pending.question.until)
            if timed_out not in texts:
                told = msgspec.structs.replace(known, timed_out=timed_out)
                texts[timed_out] = encode_answer(told, self._answer_bytes_max)
            await self._send(pending, texts[timed_out])

    async def _find(self, key: _Key) -> Found:
        """The newest state that is known. It is not older than the last event folded when this returns."""
        if isinstance(key, str):
            return await self._find_job(key)
        site = self._projection.site
        job_id = self._answered.get(key)
        unfolded = False
        if job_id is None and key not in site.submissions:
            submission = await submission_at(self._log, key)
            stored = None if submission is None else await answered_as(self._log, submission)
            # What was folded meanwhile is newer.
            job_id = self._answered.get(key, stored)
            unfolded = submission is not None and key > site.seq
        if job_id is not None:
            return await self._find_job(job_id)
        return Unanswered(key) if unfolded or key in site.submissions else Missing()

    async def _find_job(self, job_id: str) -> Job | Missing:
        site = self._projection.site
        known = site.jobs.get(job_id)
        if known is not None:
            return known
        # Forgotten, or never there.
        history = await history_of(self._log, job_id)
        return site.jobs.get(job_id) or fold_alone(history, job_id) or Missing()

    async def _answer(self, found: Job | Unanswered) -> Answer:
        end: Fact | None = None
        result: JobResult | None = None
        if isinstance(found, Job) and found.phase in TOLD_BY_THE_END:
            end = await end_of(self._log, found)
            ref = end.result_ref if isinstance(end, Succeeded) else None
            # A larger one could not be sent on.
            if ref is not None and ref.size <= self._answer_bytes_max:
                result = await stored_result(self._payloads, ref)
        return answer(found, self._projection.site, self._live, end=end, stored_result=result)

    async def _refuse(self, group: Sequence[_Pending], refusal: Refusal) -> None:
        text = encode_refusal(refusal)
        for pending in group:
            # Of a group that could not be served, some may have been answered or wait on.
            if pending.parked is None:
                await self._send(pending, text)

    async def _send(self, pending: _Pending, text: bytes) -> None:
        if pending not in self._pending:
            return
        if pending.timer is not None:
            pending.timer.cancel()
        del self._pending[pending]
        await pending.reply(text)
        # The lanes and other groups take their turn between two answers.
        await asyncio.sleep(0)

    async def stop(self) -> None:
        """Refuse what is still without an answer, so that whoever asked asks another scheduler. May be called twice."""
        self._due.clear()
        self._parked.clear()
        left, self._pending = self._pending, {}
        text = encode_refusal(_STOPPING)
        for pending in left:
            if pending.timer is not None:
                pending.timer.cancel()
            await pending.reply(text)
