"""What the folded state does not keep of a job, read from the log."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gpukeeper.events import subjects
from gpukeeper.events.codec import Event, decode
from gpukeeper.events.fact import Fact
from gpukeeper.events.ids import job_id_at
from gpukeeper.events.job import ENDS, Accepted, Rejected, Resubmitted
from gpukeeper.events.log import Log, Stored
from gpukeeper.events.objects import Objects, get_body
from gpukeeper.events.spec import Submission, parse_submission
from gpukeeper.events.work import JobResult, ObjectRef
from gpukeeper.projections.job import Job

#: Handles that are tried for a submission without an id of its own; more than one only where somebody chose the first.
_HANDLES_MAX = 8
_decode_result = msgspec.json.Decoder(JobResult).decode


async def history_of(log: Log, job_id: str) -> list[Event]:
    """Every event on the job's subject.

    Raises:
        LogUnavailable: the log did not answer.
    """
    return [decode(stored) for stored in await log.read(subjects.job(job_id))]


async def end_of(log: Log, job: Job) -> Fact | None:
    """The fact that ended ``job``, or None where it has aged out.

    Raises:
        LogUnavailable: the log did not answer.
    """
    newest = await log.get(job.seq)
    if newest is not None and isinstance(fact := decode(newest).data, ENDS):
        return fact
    # Notes stand above it.
    for stored in await log.read(subjects.job(job.id), after=job.accepted_seq - 1):
        if isinstance(fact := decode(stored).data, ENDS):
            return fact
    return None


async def stored_result(objects: Objects, ref: ObjectRef) -> JobResult | None:
    """The result in the object store, or None where it is gone or is none.

    Raises:
        LogUnavailable: the object store did not answer.
    """
    body = await get_body(objects, ref)
    try:
        return None if body is None else _decode_result(body)
    except (msgspec.MsgspecError, RecursionError):
        return None


async def submission_at(log: Log, seq: int) -> Stored | None:
    """The submission at ``seq``, or None where something else or nothing stands there.

    Raises:
        LogUnavailable: the log did not answer.
    """
    stored = await log.get(seq)
    return stored if stored is not None and stored.subject.startswith(subjects.SUBMIT_PREFIX) else None


async def answered_as(log: Log, submission: Stored) -> str | None:
    """The handle of the job that the answer to ``submission`` names, or None where none is found.

    Raises:
        LogUnavailable: the log did not answer.
    """
    parsed = parse_submission(submission.body)
    chosen = parsed.spec.id if isinstance(parsed, Submission) else None
    if chosen is not None and _answers(await history_of(log, chosen), submission.seq):
        return chosen
    derived = handle = job_id_at(submission.seq, submission.stored_ns)
    for number in range(2, _HANDLES_MAX + 2):
        history = await history_of(log, handle)
        if _answers(history, submission.seq):
            return handle
        if not history:
            return None
        handle = f"{derived}-{number}"
    return None


def _answers(history: Sequence[Event], submission_seq: int) -> bool:
    answers = (event.data for event in history if isinstance(event.data, Accepted | Rejected | Resubmitted))
    return any(answer.submission_seq == submission_seq for answer in answers)
