"""What facts about jobs and their routes do to the site."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpukeeper.events import job as job_facts
from gpukeeper.events import route as route_facts
from gpukeeper.events.codec import Event, Submitted
from gpukeeper.events.reasons import Reason
from gpukeeper.projections.device import Lapse, device_key
from gpukeeper.projections.job import CancelWish, Denial, Job, Phase, Route
from gpukeeper.projections.unanswered import Waiting

if TYPE_CHECKING:
    from gpukeeper.projections.site import Site


#: Reasons that say nothing against the place that the job came back from.
_TRIED_AGAIN_AT_ONCE = (Reason.HANDED_BACK, Reason.CLAIM_LAPSED)


def on_submitted(site: Site, event: Event, fact: Submitted) -> None:
    stored = event.stored
    site.submissions[event.seq] = Waiting(event.seq, stored.stored_ns, fact.producer, fact.raw, fact.misnamed)


def on_accepted(site: Site, event: Event, fact: job_facts.Accepted) -> None:
    submission = site.submissions.pop(fact.submission_seq, None)
    if submission is None or fact.job in site.jobs:
        # Two schedulers that led for a moment may answer one submission differently, on two subjects that no
        # sequence joins. The first answer in the log counts.
        return
    at_ns = event.stored.stored_ns
    job = Job(
        id=fact.job,
        submission_seq=fact.submission_seq,
        producer=fact.producer,
        digest=fact.digest,
        kind=fact.kind,
        task=fact.task,
        model=fact.model,
        phase=Phase.WAITING,
        seq=event.seq,
        since_ns=at_ns,
        submitted_ns=submission.stored_ns,
        accepted_seq=event.seq,
        accepted_ns=at_ns,
        queued_ns=at_ns,
        clocks=fact.clocks,
        runtime=fact.runtime,
        host=fact.host,
        device=fact.device,
        origin=fact.origin,
        place=fact.place,
        priority=fact.priority,
        vram_mb=fact.vram_mb,
        on_capacity=fact.on_capacity,
        gpus=fact.gpus,
        reason=fact.waiting or "",
        detail=fact.detail,
    )
    site.jobs[job.id] = job
    site.index(job)


def on_rejected(site: Site, event: Event, fact: job_facts.Rejected) -> None:
    submission = site.submissions.pop(fact.submission_seq, None)
    if submission is None or fact.job in site.jobs:
        return
    at_ns = event.stored.stored_ns
    site.jobs[fact.job] = Job(
        id=fact.job,
        submission_seq=fact.submission_seq,
        producer=fact.producer,
        digest="",
        kind="",
        task="",
        model="",
        phase=Phase.REJECTED,
        seq=event.seq,
        since_ns=at_ns,
        submitted_ns=submission.stored_ns,
        accepted_seq=event.seq,
        accepted_ns=at_ns,
        reason=fact.reason,
        detail="; ".join(f"{p.path}: {p.message}" if p.path else p.message for p in fact.problems),
    )
    site.note_end(fact.job, at_ns)


def on_resubmitted(site: Site, event: Event, fact: job_facts.Resubmitted) -> None:
    site.submissions.pop(fact.submission_seq, None)
    site.change_job(fact.job, seq=event.seq)


def on_waiting(site: Site, event: Event, fact: job_facts.Waiting) -> None:
    old = site.jobs.get(fact.job)
    if old is None:
        return
    if old.phase is Phase.WAITING:
        site.change_job(fact.job, seq=event.seq, reason=fact.reason, detail=fact.detail)
    elif fact.epoch is not None:
        if fact.reason not in _TRIED_AGAIN_AT_ONCE and old.route is not None:
            # There was no room after all: that place is not asked again at once.
            denials = _with_denial(old, old.route.host, old.route.device, event.stored.stored_ns)
            site.to_queue(event, fact.job, seq=event.seq, reason=fact.reason, detail=fact.detail, denials=denials)
            return
        lapses = old.lapses + (fact.reason == Reason.CLAIM_LAPSED)
        site.to_queue(event, fact.job, seq=event.seq, reason=fact.reason, detail=fact.detail, lapses=lapses)
    # Otherwise it was decided beside a route, on the same sequence: it says why the job waited until then.


def on_routed(site: Site, event: Event, fact: route_facts.Routed) -> None:
    old = site.jobs.get(fact.job)
    if old is None or old.phase is not Phase.WAITING:
        # Two leaders, or a job that moved on: the agent that tries this route loses at the job's sequence.
        return
    site.change_job(
        fact.job,
        phase=Phase.ROUTED,
        since_ns=event.stored.stored_ns,
        route=Route(event.seq, fact.host, fact.device, fact.runtime, fact.job_seq, fact.more_devices),
        attempt=fact.attempt,
        reason="",
        detail=fact.why,
    )


def on_unrouted(site: Site, event: Event, fact: route_facts.Unrouted) -> None:
    old = site.jobs.get(fact.job)
    if old is None or old.phase is not Phase.ROUTED or old.route is None or old.route.seq != fact.route_seq:
        return
    lapses = old.lapses + (fact.reason == Reason.CLAIM_LAPSED)
    site.to_queue(event, fact.job, reason=fact.reason, detail=fact.detail, lapses=lapses)


def on_admitted(site: Site, event: Event, fact: job_facts.Admitted) -> None:
    admitted = site.change_job(
        fact.job,
        phase=Phase.ADMITTED,
        seq=event.seq,
        since_ns=event.stored.stored_ns,
        route=Route(fact.route_seq, fact.host, fact.device, fact.runtime, 0, fact.more_devices),
        attempt=fact.attempt,
        epoch=fact.epoch,
        slot=fact.slot,
        instance_id=fact.instance_id,
        tokens=0,
        reason="",
        detail=fact.detail,
    )
    if admitted is None:
        return
    site.lapses.pop(fact.job, None)
    device = site.devices.get(device_key(fact.host, fact.device))
    claim = None if device is None else device.claim(fact.epoch)
    if claim is None or claim.job != fact.job:
        # Its agent had not heard yet that the claim was over. Nobody will end that claim again, so the job is an
        # orphan from the start.
        detail = "it was admitted under a claim that had ended"
        site.lapses[fact.job] = Lapse(fact.host, fact.device, fact.epoch, event.seq, event.event_id, detail)


def on_denied(site: Site, event: Event, fact: job_facts.Denied) -> None:
    old = site.jobs.get(fact.job)
    if old is None or old.ended:
        return
    denials = _with_denial(old, fact.host, fact.device, event.stored.stored_ns)
    site.to_queue(
        event,
        fact.job,
        seq=event.seq,
        reason=Reason.DENIED,
        detail=f"{fact.reason}: {fact.detail}",
        denials=denials,
    )


def _with_denial(job: Job, host: str, device: str, at_ns: int) -> tuple[Denial, ...]:
    """One for each device, so that none is asked again before its time: the site's devices are the bound."""
    earlier = [d for d in job.denials if (d.host, d.device) == (host, device)]
    others = [d for d in job.denials if (d.host, d.device) != (host, device)]
    count = earlier[0].count + 1 if earlier else 1
    return (*others, Denial(host, device, at_ns, count))


def on_placement_verified(site: Site, event: Event, fact: job_facts.PlacementVerified) -> None:
    site.change_job(fact.job, phase=Phase.PLACED, seq=event.seq, since_ns=event.stored.stored_ns, detail=fact.detail)


def on_started(site: Site, event: Event, fact: job_facts.Started) -> None:
    site.change_job(fact.job, phase=Phase.RUNNING, seq=event.seq, since_ns=event.stored.stored_ns)


def on_progress(site: Site, event: Event, fact: job_facts.Progress) -> None:
    site.change_job(fact.job, seq=event.seq, tokens=fact.tokens)


def on_cancel_requested(site: Site, event: Event, fact: job_facts.CancelRequested) -> None:
    site.commands.pop(fact.command_seq, None)
    site.change_job(fact.job, seq=event.seq, cancel=CancelWish(fact.actor, fact.reason, fact.command_seq))


def on_note(site: Site, event: Event, fact: job_facts.PlacementFailed | job_facts.LateResult) -> None:
    site.change_job(fact.job, seq=event.seq)


def on_succeeded(site: Site, event: Event, fact: job_facts.Succeeded) -> None:
    site.end_job(event, fact.job, Phase.SUCCEEDED, "", "")


def on_failed(site: Site, event: Event, fact: job_facts.Failed) -> None:
    site.end_job(event, fact.job, Phase.FAILED, fact.reason, fact.detail)


def on_cancelled(site: Site, event: Event, fact: job_facts.Cancelled) -> None:
    if fact.command_seq is not None:
        site.commands.pop(fact.command_seq, None)
    site.end_job(event, fact.job, Phase.CANCELLED, Reason.CANCELLED, f"{fact.actor}: {fact.reason}".rstrip(": "))


def on_expired(site: Site, event: Event, fact: job_facts.Expired) -> None:
    detail = f"{fact.clock} clock: {fact.elapsed_s:.1f} s of {fact.limit_s:g} s, set by {fact.source}"
    site.end_job(event, fact.job, Phase.EXPIRED, Reason.DEADLINE, detail)


def on_unroutable(site: Site, event: Event, fact: job_facts.Unroutable) -> None:
    site.end_job(event, fact.job, Phase.UNROUTABLE, fact.reason, fact.detail)


def on_lost(site: Site, event: Event, fact: job_facts.Lost) -> None:
    site.end_job(event, fact.job, Phase.LOST, fact.reason, fact.detail)


def on_preempted(site: Site, event: Event, fact: job_facts.Preempted) -> None:
    old = site.jobs.get(fact.job)
    if old is None or old.ended:
        return
    site.to_queue(
        event,
        fact.job,
        seq=event.seq,
        queued_ns=event.stored.stored_ns,
        preemptions=old.preemptions + 1,
        reason=fact.reason,
        detail=fact.detail,
    )
