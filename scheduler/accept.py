"""From a submission to a job, or to a refusal that names the field. Every submission gets exactly one answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

import msgspec

from gpukeeper.events import subjects
from gpukeeper.events.codec import Event
from gpukeeper.events.fact import Fact
from gpukeeper.events.ids import TOKEN_RULE, job_id_at
from gpukeeper.events.job import Accepted, Clock, ClockName, Clocks, Rejected, Resubmitted
from gpukeeper.events.proposal import Proposal
from gpukeeper.events.reasons import Reason
from gpukeeper.events.spec import JobSpec, Problem, parse_submission
from gpukeeper.projections.site import Site
from gpukeeper.projections.unanswered import Waiting as Unanswered
from gpukeeper.scheduler.config import KindConfig, SchedulerConfig
from gpukeeper.scheduler.feasible import NO_HOST_YET, Infeasible, Option, Want, options
from gpukeeper.scheduler.live import Live
from gpukeeper.scheduler.rank import NO_FREE_SLOT, unavailable

#: How many submissions one look reads, for each that it may answer.
_LOOK_FACTOR = 4


class Known(msgspec.Struct, frozen=True):
    """A job that stands in the log though the folded state has forgotten it."""

    #: Digest of its body; empty where the id belongs to something else than an accepted job.
    digest: str
    #: Last sequence of its subject.
    seq: int


def known_from(history: Sequence[Event], submission_seq: int) -> Known | None:
    """What the history of an id says to the submission that lost its answer's place there.

    None where nothing stands there, and where the submission is answered already, by another scheduler.
    """
    if not history:
        return None
    facts = [event.data for event in history]
    if any(isinstance(f, Accepted | Rejected | Resubmitted) and f.submission_seq == submission_seq for f in facts):
        return None
    return Known(facts[0].digest if isinstance(facts[0], Accepted) else "", history[-1].seq)


def decide_submissions(
    site: Site, live: Live, config: SchedulerConfig, known: Mapping[str, Known], *, limit: int = 64
) -> list[Proposal]:
    """Answer submissions in the order in which they came, one answer for each id in one look."""
    proposals: list[Proposal] = []
    busy: set[str] = set()
    # Repeats of ids that are being answered are stepped over; the bound keeps a flood of them cheap.
    for submission in islice(site.submissions.values(), limit * _LOOK_FACTOR):
        if len(proposals) >= limit:
            break
        proposal = decide_submission(site, live, config, submission, known)
        if proposal.aggregate in busy:
            # An earlier submission of the same id is being answered: its answer decides this one's.
            continue
        busy.add(proposal.aggregate)
        proposals.append(proposal)
    return proposals


def decide_submission(
    site: Site, live: Live, config: SchedulerConfig, waiting: Unanswered, known: Mapping[str, Known]
) -> Proposal:
    """Answer one submission."""
    handle = _handle(site, known, waiting)
    if waiting.misnamed:
        problem = Problem(path="producer", message=f"must be {TOKEN_RULE}", value=waiting.producer)
        return _reject(waiting, handle, Reason.INVALID, (problem,), None)
    parsed = parse_submission(waiting.raw)
    if isinstance(parsed, tuple):
        return _reject(waiting, handle, Reason.INVALID, parsed, None)
    spec = parsed.spec
    job_id = spec.id or handle
    job = site.jobs.get(job_id)
    earlier = known.get(job_id) if job is None else Known(job.digest, job.seq)
    if earlier is not None:
        if earlier.digest == parsed.digest:
            note = Resubmitted(job=job_id, submission_seq=waiting.seq, producer=waiting.producer)
            return _answer(waiting, job_id, note, expected=earlier.seq, causation=parsed.event_id)
        problem = Problem(path="id", message="this id belongs to a job with another body; choose another", value=job_id)
        return _reject(waiting, handle, Reason.DUPLICATE_ID, (problem,), job_id)
    if spec.kind not in msgspec.structs.asdict(config.kinds):
        kinds = ", ".join(msgspec.structs.asdict(config.kinds))
        problem = Problem(path="kind", message=f"no such kind; known: {kinds}", value=spec.kind)
        return _reject(waiting, handle, Reason.UNKNOWN_KIND, (problem,), spec.id)
    want = Want(spec.model, spec.runtime, spec.host, spec.device, spec.place, spec.need.vram_mb, spec.need.gpus or 1)
    found = options(site, want)
    if isinstance(found, Infeasible):
        problem = Problem(path=found.path, message=found.detail, value=found.value)
        return _reject(waiting, handle, found.reason, (problem,), spec.id)
    kind: KindConfig = getattr(config.kinds, spec.kind)
    why_not = [_unavailable(option, live, site) for option in found]
    reason: Reason | None = None
    detail = ""
    if not found:
        reason, detail = Reason.NO_ROUTE, NO_HOST_YET
    elif all(why is not None for why in why_not):
        reason = Reason.CAPACITY if NO_FREE_SLOT in why_not else Reason.NO_ROUTE
        detail = "; ".join(sorted({why for why in why_not if why}))[:500]
    fact = Accepted(
        job=job_id,
        submission_seq=waiting.seq,
        producer=waiting.producer,
        digest=parsed.digest,
        kind=spec.kind,
        task=parsed.task,
        model=spec.model,
        runtime=spec.runtime,
        host=spec.host,
        device=spec.device,
        origin=spec.origin,
        place=spec.place,
        priority=kind.priority if spec.priority is None else spec.priority,
        vram_mb=spec.need.vram_mb,
        gpus=spec.need.gpus or 1,
        clocks=clocks(spec, config),
        on_capacity=spec.on_capacity or kind.on_capacity,
        waiting=reason,
        detail=detail,
    )
    return _answer(waiting, job_id, fact, expected=0, causation=parsed.event_id)


def _unavailable(option: Option, live: Live, site: Site) -> str | None:
    """Why this place cannot begin now, or None; of several devices, what holds up the last one that it takes."""
    found = [
        unavailable(msgspec.structs.replace(option, device=each), live, site.free_slots(each)) for each in option.pool
    ]
    missing = [why for why in found if why is not None]
    return None if len(found) - len(missing) >= option.gpus else missing[-1]


def clocks(spec: JobSpec, config: SchedulerConfig) -> Clocks:
    """Each clock's limit, and where it comes from: the job itself, else the site's policy."""

    def clock(name: ClockName) -> Clock:
        field = f"{name}_s"
        own: float | None = getattr(spec.deadlines, field)
        if own is not None:
            return Clock(limit_s=own, source=f"job deadlines.{field}")
        return Clock(limit_s=getattr(config.deadlines, field), source=config.deadline_source(field))

    return Clocks(
        queue=clock("queue"), load=clock("load"), first_byte=clock("first_byte"), idle=clock("idle"), run=clock("run")
    )


def _handle(site: Site, known: Mapping[str, Known], waiting: Unanswered) -> str:
    """The handle derived from the place in the log, or the first beside it where somebody chose just that for an id."""
    derived = handle = job_id_at(waiting.seq, waiting.stored_ns)
    number = 1
    while handle in site.jobs or handle in known:
        number += 1
        handle = f"{derived}-{number}"
    return handle


def _reject(
    waiting: Unanswered, handle: str, reason: Reason, problems: tuple[Problem, ...], requested: str | None
) -> Proposal:
    fact = Rejected(
        job=handle,
        submission_seq=waiting.seq,
        producer=waiting.producer,
        reason=reason,
        problems=problems,
        requested_id=requested,
    )
    return _answer(waiting, handle, fact, expected=0, causation=None)


def _answer(waiting: Unanswered, job_id: str, fact: Fact, *, expected: int, causation: str | None) -> Proposal:
    return Proposal(
        subject=subjects.job(job_id),
        fact=fact,
        expected=expected,
        aggregate=job_id,
        correlationid=job_id,
        causationid=causation,
        actor=waiting.producer,
    )
