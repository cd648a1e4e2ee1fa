"""What is answered to a question about a job. Pure: the waiting is in :mod:`.ask`, the reading in :mod:`.lookup`."""

from __future__ import annotations

import msgspec

from gpukeeper.events.ask import SUBMITTED_PHASE, Answer, Refusal, Until
from gpukeeper.events.fact import Fact
from gpukeeper.events.job import Rejected, Succeeded
from gpukeeper.events.work import JobResult
from gpukeeper.projections.job import Job, Phase
from gpukeeper.projections.site import Site
from gpukeeper.scheduler.live import Live


class Unanswered(msgspec.Struct, frozen=True):
    """A submission that stands in the log and has no answer yet."""

    seq: int


class Missing(msgspec.Struct, frozen=True):
    """Nothing of that name or sequence is known (yet)."""


Found = Job | Unanswered | Missing

#: Phases whose end says more than the state keeps of it.
TOLD_BY_THE_END = frozenset({Phase.REJECTED, Phase.SUCCEEDED})


def holds(found: Found, until: Until) -> bool:
    """Whether what is waited for is so."""
    if isinstance(found, Missing):
        return False
    if isinstance(found, Unanswered):
        return until == "known"
    return until != "ended" or found.ended


def answer(
    found: Job | Unanswered, site: Site, live: Live, *, end: Fact | None = None, stored_result: JobResult | None = None
) -> Answer:
    """What is known of ``found``.

    Args:
        found: a job, or a submission that is none yet.
        site: for its place in the queue.
        live: for the tokens of a job that runs.
        end: the fact that ended it, for the phases in :data:`TOLD_BY_THE_END`.
        stored_result: what ``end`` refers to in the object store, where it could be had.
    """
    if isinstance(found, Unanswered):
        return Answer(
            job=None,
            submission_seq=found.seq,
            phase=SUBMITTED_PHASE,
            ended=False,
            timed_out=False,
            reason="",
            detail="",
            attempt=0,
            host=None,
            device=None,
            queue_place=None,
            tokens=0,
            seq=found.seq,
        )
    ahead = site.queue.place(found) if found.phase is Phase.WAITING else None
    plain = Answer(
        job=found.id,
        submission_seq=found.submission_seq,
        phase=found.phase,
        ended=found.ended,
        timed_out=False,
        reason=found.reason,
        detail=found.detail,
        attempt=found.attempt,
        host=None if found.route is None else found.route.host,
        device=None if found.route is None else found.route.device,
        queue_place=None if ahead is None else ahead + 1,
        tokens=_tokens(found, live),
        seq=found.seq,
    )
    if found.phase in TOLD_BY_THE_END:
        return _with_end(plain, found, end, stored_result)
    return plain


def _with_end(plain: Answer, job: Job, end: Fact | None, stored_result: JobResult | None) -> Answer:
    if job.phase is Phase.REJECTED:
        if isinstance(end, Rejected):
            return msgspec.structs.replace(plain, problems=end.problems)
        return msgspec.structs.replace(plain, omitted=("problems",))
    if not isinstance(end, Succeeded):
        return msgspec.structs.replace(plain, omitted=("result",))
    result = end.result if end.result_ref is None else stored_result
    ref = msgspec.UNSET if end.result_ref is None else end.result_ref
    if result is None:
        return msgspec.structs.replace(plain, result_ref=ref, omitted=("result",))
    tokens = max(plain.tokens, result.completion_tokens or 0)
    return msgspec.structs.replace(plain, result=result, result_ref=ref, tokens=tokens)


def _tokens(job: Job, live: Live) -> int:
    """Tokens so far: by the last heartbeat of its host, or by its last progress, whichever is more."""
    claim = None if job.route is None or job.ended else live.host(job.route.host).claim(job.epoch)
    return max(job.tokens, 0 if claim is None else claim.tokens)


def unknown(key: int | str) -> Refusal:
    """The refusal for what is not known when the wait is over."""
    if isinstance(key, str):
        return Refusal(code="unknown_job", message=f"there is no job {key}")
    message = f"no submission stands at sequence {key} of the log, or what became of it has aged out"
    return Refusal(code="unknown_submission", message=message)
