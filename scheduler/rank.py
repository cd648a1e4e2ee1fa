"""Which of the possible places a job goes to now: availability first, then a score whose terms are shown."""

from __future__ import annotations

import msgspec

from gpukeeper.events.reasons import Reason
from gpukeeper.events.route import Candidate
from gpukeeper.projections.device import Device
from gpukeeper.projections.job import Job
from gpukeeper.projections.site import Site
from gpukeeper.scheduler.config import ScoreWeights
from gpukeeper.scheduler.estimate import Room, room_for
from gpukeeper.scheduler.feasible import Option, lists_model, must_fetch
from gpukeeper.scheduler.live import Live

#: A device that denied a job is asked again after 5, 10, 20, 40, then every 60 seconds.
_DENIED_FIRST_S = 5.0
_DENIED_LIMIT_S = 60.0
_DENIED_DOUBLINGS_MAX = 4

#: Why a place cannot begin now, where the router tells these reasons apart.
NO_FREE_SLOT = "no free slot"
DRAINED = "out of service"


class Ranked(msgspec.Struct, frozen=True):
    """One option with its score, or why it cannot begin now."""

    option: Option
    candidate: Candidate
    #: Free memory on the device, where nobody but its agent can tell whether that is enough; 0 otherwise.
    unsure_free_mb: int = 0
    #: Further devices, where the job takes several.
    more: tuple[Device, ...] = ()

    @property
    def immediate(self) -> bool:
        return self.candidate.unavailable is None


def unavailable(option: Option, live: Live, free_slots: int) -> str | None:
    """Why this place cannot begin a job now, or None. The first reason that applies."""
    host, runtime, device = option.host, option.runtime, option.device
    if host.left:
        return "its agent has stopped"
    if not live.is_fresh(host.name):
        known = live.hosts.get(host.name)
        silent = "never heard" if known is None or known.beat is None else f"silent for {known.silent_s:.0f} s"
        return f"its agent is {silent}"
    if not runtime.healthy:
        return f"runtime {runtime.name} does not answer: {runtime.detail}".rstrip(": ")
    if runtime.suspect is not None:
        return f"runtime {runtime.name} is suspect: {runtime.suspect}"
    if device.unschedulable is not None:
        return device.unschedulable
    if device.drained is not None:
        return f"{DRAINED} {device.drained}"
    if device.state != "healthy":
        return f"the device is {device.state}: {device.detail}".rstrip(": ")
    if free_slots <= 0:
        return NO_FREE_SLOT
    return None


def denied_until_s(job: Job, option: Option) -> float | None:
    """When this device may be asked again, in seconds of the server's clock, where it denied the job."""
    for denial in job.denials:
        if denial.host == option.host.name and denial.device == option.device.id:
            doublings = min(denial.count - 1, _DENIED_DOUBLINGS_MAX)
            wait_s = min(_DENIED_LIMIT_S, _DENIED_FIRST_S * 2**doublings)
            return denial.at_ns / 1e9 + wait_s
    return None


def rank(site: Site, live: Live, weights: ScoreWeights, job: Job, option: Option, free: int, now_s: float) -> Ranked:
    """Score one option for one job."""
    host, runtime, device = option.host, option.runtime, option.device
    why_not = unavailable(option, live, free)
    terms: dict[str, float] = {}
    if why_not in (None, NO_FREE_SLOT):
        # A denial is shown before a slot that is taken: else the reason would change with every job that passes.
        again_s = denied_until_s(job, option)
        if again_s is not None and now_s < again_s:
            why = f": {job.detail}" if job.reason == Reason.DENIED and job.detail else ""
            why_not = f"it denied the job; asked again in {again_s - now_s:.0f} s{why}"
    evidence = live.hosts.get(host.name)
    reading = evidence.runtime(runtime.name) if evidence else None
    resident = [model.model for model in (reading.resident or ())] if reading else []
    warm = lists_model(resident, job.model)
    room = Room()
    if why_not is None and not warm:
        room = room_for(site, job, option, evidence)
        why_not = room.why_not
    if runtime.healthy:
        terms["runtime_up"] = weights.runtime_up
    if warm:
        terms["warm"] = weights.warm
    elif room.releases or (resident and not room.fits):
        terms["evicts"] = weights.evicts
    else:
        terms["fits"] = weights.fits
    if not warm and must_fetch(runtime, job.model):
        terms["provision"] = weights.provision
    if free == device.slots:
        terms["idle"] = weights.idle
    queued = len(site.routed.get(device.key, ()))
    if queued:
        terms["queued"] = weights.queued * queued
    candidate = Candidate(
        host=host.name,
        device=device.id,
        runtime=runtime.name,
        score=sum(terms.values()),
        terms=terms,
        unavailable=why_not,
    )
    return Ranked(option, candidate, 0 if room.fits else room.free_mb)


def best_first(ranked: list[Ranked], origin: str | None) -> list[Ranked]:
    """Immediate options by score; the host that took the job first on a tie, then by name. Behind them the others.

    Where nobody knows whether the job fits, the devices of one host are tried from the emptiest on.
    """
    return sorted(
        ranked,
        key=lambda one: (
            not one.immediate,
            -one.candidate.score,
            one.candidate.host != origin,
            one.candidate.host,
            -one.unsure_free_mb,
            one.candidate.device,
            one.candidate.runtime,
        ),
    )
