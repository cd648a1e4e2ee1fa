"""A site that answers every submission at once: accepted jobs succeed with their own prompt as the text."""

from __future__ import annotations

import asyncio

from gpukeeper.events import subjects
from gpukeeper.events.fact import Fact
from gpukeeper.events.ids import job_id_at
from gpukeeper.events.job import Accepted, Clock, Clocks, Rejected, Resubmitted, Succeeded
from gpukeeper.events.log import Appended, Log, Stored
from gpukeeper.events.proposal import Proposal
from gpukeeper.events.reasons import Reason
from gpukeeper.events.recorder import Recorder
from gpukeeper.events.spec import parse_submission
from gpukeeper.events.work import JobResult

_CLOCK = Clock(limit_s=1, source="tests")
CLOCKS = Clocks(queue=_CLOCK, load=_CLOCK, first_byte=_CLOCK, idle=_CLOCK, run=_CLOCK)


class AnsweringSite:
    """Answers what stands under ``gpuq.submit.*``."""

    def __init__(self, log: Log, recorder: Recorder) -> None:
        self._log = log
        self._recorder = recorder
        self._queue: asyncio.Queue[Stored] = asyncio.Queue()

    async def run(self) -> None:
        """Answer until cancelled."""
        follower = await self._log.follow(self._queue.put_nowait, after=0, subjects=("gpuq.submit.*",))
        try:
            while True:
                await self._answer(await self._queue.get())
        finally:
            await follower.stop()

    async def _answer(self, stored: Stored) -> None:
        producer = stored.subject.removeprefix(subjects.SUBMIT_PREFIX)
        handle = job_id_at(stored.seq, stored.stored_ns)
        found = parse_submission(stored.body)
        if isinstance(found, tuple):
            await self._record(
                Rejected(
                    job=handle, submission_seq=stored.seq, producer=producer, reason=Reason.INVALID, problems=found
                ),
                handle,
                0,
            )
            return
        spec = found.spec
        job = spec.id or handle
        last = await self._log.last(subjects.job(job))
        if last is not None:
            await self._record(Resubmitted(job=job, submission_seq=stored.seq, producer=producer), job, last.seq)
            return
        accepted = Accepted(
            job=job,
            submission_seq=stored.seq,
            producer=producer,
            digest=found.digest,
            kind=spec.kind,
            task=found.task,
            model=spec.model,
            clocks=CLOCKS,
        )
        seq = await self._record(accepted, job, 0)
        await self._record(Succeeded(job=job, epoch=1, attempt=1, result=JobResult(text=spec.prompt)), job, seq)

    async def _record(self, fact: Fact, job: str, expected: int) -> int:
        proposal = Proposal(subject=subjects.job(job), fact=fact, expected=expected, aggregate=job)
        outcome = await self._recorder.record(proposal)
        assert isinstance(outcome, Appended), outcome
        return outcome.seq
