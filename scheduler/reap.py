"""Claims whose agent fell silent, and jobs that lost their claim.

A claim lapses when its host was silent for the claim's time to live, counted only while this observer could hear, and
the agent does not answer a direct question. When several agents fall silent at once, or the only one does, the observer
is suspected first: it waits one more time to live, unless the broker itself vouches that the agent is gone (nobody
listens on the agent's subject, while the broker answers us).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from gpukeeper.events import subjects
from gpukeeper.events.device import ClaimLapsed
from gpukeeper.events.fact import Fact
from gpukeeper.events.job import Cancelled, Failed, Lost, Waiting
from gpukeeper.events.proposal import Proposal
from gpukeeper.events.reasons import Reason
from gpukeeper.events.route import Unrouted
from gpukeeper.projections.device import Claim, Device, Lapse
from gpukeeper.projections.job import Job, Phase
from gpukeeper.projections.site import Site
from gpukeeper.scheduler.config import SchedulerConfig
from gpukeeper.scheduler.live import HostLive, Live

#: How many attempts at a job may end by a lapse before they have started.
LAPSES_MAX = 5

#: What a direct question to an agent gave: an answer, nobody listening, or nothing in time.
Probe = Literal["answered", "nobody", "silent"]


def suspects(site: Site, live: Live, config: SchedulerConfig) -> list[str]:
    """Hosts that hold claims or routes and were silent for the time to live: whom to ask directly."""
    concerned = {device.host for device in site.devices.values() if device.claims}
    concerned |= {_host_of(key) for key, jobs in site.routed.items() if jobs}
    return sorted(name for name in concerned if live.host(name).silent_s >= config.claim_ttl_s)


def decide_lapses(site: Site, live: Live, config: SchedulerConfig, probes: Mapping[str, Probe]) -> list[Proposal]:
    """End claims that nobody holds any more, one for each device in one look."""
    proposals: list[Proposal] = []
    for device in site.devices.values():
        if not device.claims:
            continue
        known = live.host(device.host)
        doubt = _doubt(site, live, config, device.host)
        for claim in device.claims:
            why = _why_lapsed(claim, known, config, probes.get(device.host), doubt)
            if why is not None:
                proposals.append(_lapse(device, claim, known, why))
                break
    return proposals


def _doubt(site: Site, live: Live, config: SchedulerConfig, name: str) -> str | None:
    """Why the silence of ``name`` may be ours, in words, or None where others are heard that would be silent too."""
    others = [other for other, host in site.hosts.items() if not host.left and other != name]
    if not any(live.is_fresh(other) for other in others):
        return "no agent is heard"
    silent_s = live.host(name).silent_s
    together = [
        other
        for other in others
        if not live.is_fresh(other) and abs(live.host(other).silent_s - silent_s) < config.claim_ttl_s
    ]
    return f"{len(together) + 1} agents fell silent together" if together else None


def _why_lapsed(
    claim: Claim, known: HostLive, config: SchedulerConfig, probe: Probe | None, doubt: str | None
) -> str | None:
    """In words why ``claim`` is held by nobody, or None while that is not proven."""
    ttl_s = config.claim_ttl_s
    unlisted_s = known.unlisted_s.get(claim.epoch, 0.0)
    if unlisted_s >= ttl_s:
        return f"its agent is heard and has not listed the claim for {unlisted_s:.0f} s (limit {ttl_s:g} s)"
    if known.silent_s < ttl_s or probe is None or probe == "answered":
        return None
    if probe == "nobody":
        return f"no heartbeat for {known.silent_s:.0f} s (limit {ttl_s:g} s), and no agent is connected to the broker"
    if doubt is not None and known.silent_s < 2 * ttl_s:
        return None
    others = "other agents are heard" if doubt is None else f"{doubt}, so it waited twice the limit"
    return f"no heartbeat for {known.silent_s:.0f} s (limit {ttl_s:g} s), and no answer to a probe; {others}"


def _lapse(device: Device, claim: Claim, known: HostLive, why: str) -> Proposal:
    beat = known.beat
    fact = ClaimLapsed(
        host=device.host,
        device=device.id,
        epoch=claim.epoch,
        job=claim.job,
        reason=Reason.CLAIM_LAPSED,
        detail=why,
        last_beat=known.claim(claim.epoch),
        last_beat_at=beat.sent_at if beat else None,
        silent_s=round(known.silent_s, 1),
    )
    return Proposal(
        subject=subjects.device(device.host, device.id),
        fact=fact,
        expected=device.seq,
        aggregate=device.key,
        correlationid=claim.job,
        epoch=claim.epoch,
    )


def decide_withdrawals(site: Site, live: Live, config: SchedulerConfig, probes: Mapping[str, Probe]) -> list[Proposal]:
    """Take back routes that an agent will not follow: it left, it is silent and does not answer, or it came back
    without what the route names."""
    #: By job: one that takes several devices is listed under each.
    proposals: dict[str, Proposal] = {}
    for key in sorted(site.routed):
        for job_id in site.routed[key]:
            job = site.jobs[job_id]
            why = _why_withdrawn(site, live, config, probes.get(_host_of(key)), job)
            if why is not None:
                proposals[job_id] = _unroute(job, Reason.NO_ROUTE, why, None)
    return list(proposals.values())


def _why_withdrawn(site: Site, live: Live, config: SchedulerConfig, probe: Probe | None, job: Job) -> str | None:
    assert job.route is not None
    host = site.hosts.get(job.route.host)
    silent_s = live.host(job.route.host).silent_s
    if host is not None and host.left:
        return "the agent of its host has stopped"
    if silent_s >= config.claim_ttl_s and probe in ("nobody", "silent"):
        return f"the agent of its host is silent for {silent_s:.0f} s"
    gone = [] if host is None else [name for name in job.route.devices if name not in host.devices]
    if gone:
        return f"its host has no device {gone[0]} any more"
    if host is not None and job.route.runtime not in host.runtimes:
        return f"its host lists no runtime {job.route.runtime} any more"
    return None


def _host_of(device_key: str) -> str:
    return device_key.partition("/")[0]


def _unroute(job: Job, reason: Reason, detail: str, causation: str | None) -> Proposal:
    assert job.route is not None
    fact = Unrouted(job=job.id, host=job.route.host, route_seq=job.route.seq, reason=reason, detail=detail)
    return Proposal(
        subject=subjects.route(job.route.host, job.id),
        fact=fact,
        expected=job.route_seq(job.route.host),
        aggregate=job.id,
        correlationid=job.id,
        causationid=causation,
    )


def decide_orphans(site: Site) -> list[Proposal]:
    """Give every job that lost its claim its explicit next state."""
    return [_orphan(site.jobs[job_id], lapse) for job_id, lapse in site.lapses.items()]


def _orphan(job: Job, lapse: Lapse) -> Proposal:
    """Started: nobody knows how it ended. Not started: it was surely not executed, and is queued again.

    A job whose agent dies each time before it has started may well be why: it is not queued without end.
    """
    too_often = job.phase is not Phase.RUNNING and job.cancel is None and job.lapses + 1 >= LAPSES_MAX
    if job.phase is Phase.ROUTED and not too_often:
        return _unroute(job, Reason.CLAIM_LAPSED, lapse.detail, lapse.event_id or None)
    fact: Fact
    if job.phase is Phase.RUNNING:
        fact = Lost(
            job=job.id,
            epoch=lapse.epoch,
            host=lapse.host,
            device=lapse.device,
            reason=Reason.OUTCOME_UNKNOWN,
            detail=f"it was running when its claim lapsed: {lapse.detail}",
            last_beat=lapse.last_beat,
            last_beat_at=lapse.last_beat_at,
            silent_s=lapse.silent_s,
        )
    elif job.cancel is not None:
        fact = Cancelled(
            job=job.id,
            actor=job.cancel.actor,
            reason=job.cancel.reason,
            command_seq=job.cancel.command_seq,
            epoch=lapse.epoch,
        )
    elif too_often:
        fact = Failed(
            job=job.id,
            reason=Reason.CLAIM_LAPSED,
            detail=f"its claim lapsed {LAPSES_MAX} times before it had started, the last time: {lapse.detail}",
            epoch=lapse.epoch,
            attempt=job.attempt,
            last_beat=lapse.last_beat,
        )
    else:
        fact = Waiting(job=job.id, reason=Reason.CLAIM_LAPSED, detail=lapse.detail, epoch=lapse.epoch)
    return Proposal(
        subject=subjects.job(job.id),
        fact=fact,
        expected=job.seq,
        aggregate=job.id,
        correlationid=job.id,
        causationid=lapse.event_id or None,
        epoch=lapse.epoch,
    )
