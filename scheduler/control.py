"""Commands of operators, and jobs that wait and whose end is due."""

from __future__ import annotations

from gpukeeper.events import subjects
from gpukeeper.events.fact import Fact
from gpukeeper.events.job import Cancelled, CancelRequested, Expired
from gpukeeper.events.proposal import Proposal
from gpukeeper.events.reasons import Reason
from gpukeeper.projections.job import CancelWish, Job, Phase
from gpukeeper.projections.site import Site
from gpukeeper.projections.unanswered import Command
from gpukeeper.scheduler.refusals import NAME_CHARS_MAX, REASON_CHARS_MAX, cause, refuse, shorten
from gpukeeper.scheduler.steer import steer


def decide_commands(site: Site, *, limit: int = 64) -> list[Proposal]:
    """Answer commands in the order in which they came, one for each job in one look."""
    proposals: list[Proposal] = []
    busy: set[str] = set()
    for command in site.commands.values():
        if len(proposals) >= limit:
            break
        if command.tag and command.about in busy:
            continue
        proposal = decide_command(site, command)
        if proposal is not None:
            proposals.append(proposal)
        if command.tag:
            busy.add(command.about)
    return proposals


def decide_command(site: Site, command: Command) -> Proposal | None:
    """Answer one command; None while a submission that came before it is unanswered, which may be its job."""
    if not command.tag:
        return refuse(command, Reason.INVALID_COMMAND, command.problem)
    if command.job is None:
        return steer(site, command)
    job = site.jobs.get(command.job)
    if job is None:
        if any(seq < command.seq for seq in site.submissions):
            return None
        shown = shorten(command.job, NAME_CHARS_MAX)
        return refuse(command, Reason.UNKNOWN_JOB, f"no job {shown!r} (or it ended and was forgotten)")
    if job.ended:
        return refuse(command, Reason.ALREADY_ENDED, f"the job has {job.phase} already; ends are final")
    reason = shorten(command.reason, REASON_CHARS_MAX)
    if job.phase in (Phase.WAITING, Phase.ROUTED):
        # Nobody executes it. An agent that is about to claim it loses at the job's sequence.
        fact: Fact = Cancelled(job=job.id, actor=command.actor, reason=reason, command_seq=command.seq)
    else:
        fact = CancelRequested(job=job.id, actor=command.actor, reason=reason, command_seq=command.seq)
    return Proposal(
        subject=subjects.job(job.id),
        fact=fact,
        expected=job.seq,
        aggregate=job.id,
        correlationid=job.id,
        causationid=cause(command),
        actor=command.actor,
    )


def decide_expiries(site: Site, now_s: float, *, limit: int = 64) -> list[Proposal]:
    """End jobs that nobody executes and whose end is due: somebody was promised it, or their queue clock ran out.

    A promise is kept by whoever executes the job. Where that one gave the job back instead, it is kept here.
    """
    proposals: list[Proposal] = []
    for job_id in site.live:
        if len(proposals) >= limit:
            break
        job = site.jobs[job_id]
        if job.phase not in (Phase.WAITING, Phase.ROUTED):
            continue
        if job.cancel is not None:
            proposals.append(_keep_promise(job, job.cancel))
            continue
        if job.clocks is None:
            continue
        waited_s = now_s - job.queued_ns / 1e9
        if waited_s >= job.clocks.queue.limit_s:
            proposals.append(_expire(job, waited_s))
    return proposals


def _keep_promise(job: Job, wish: CancelWish) -> Proposal:
    return Proposal(
        subject=subjects.job(job.id),
        fact=Cancelled(job=job.id, actor=wish.actor, reason=wish.reason, command_seq=wish.command_seq),
        expected=job.seq,
        aggregate=job.id,
        correlationid=job.id,
        actor=wish.actor,
    )


def _expire(job: Job, waited_s: float) -> Proposal:
    assert job.clocks is not None
    clock = job.clocks.queue
    why = f"; it waited for: {job.reason} {job.detail}".rstrip() if job.reason else ""
    fact = Expired(
        job=job.id,
        clock="queue",
        limit_s=clock.limit_s,
        source=clock.set_by,
        elapsed_s=round(waited_s, 3),
        detail=f"not started in time{why}",
    )
    return Proposal(subject=subjects.job(job.id), fact=fact, expected=job.seq, aggregate=job.id, correlationid=job.id)
