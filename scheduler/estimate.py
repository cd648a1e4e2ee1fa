"""Whether a device has room for a job, as far as the last heartbeat tells. Pure.

An estimate by the rules that the agent decides with on live readings: what the heartbeat does not say, the agent reads.
"""

from __future__ import annotations

import msgspec

from gpukeeper.capacity.admission import Admit, shows_use
from gpukeeper.capacity.decision import Question, decide
from gpukeeper.capacity.device import Device as Place
from gpukeeper.capacity.need import which_need
from gpukeeper.capacity.owners import owners_on, tenant_by_beat, why_stays
from gpukeeper.capacity.reclaim import Plan, plan
from gpukeeper.events.readings import DeviceKind
from gpukeeper.projections.device import Device
from gpukeeper.projections.host import Host
from gpukeeper.projections.job import ACTIVE, Job, Phase
from gpukeeper.projections.site import Site
from gpukeeper.scheduler.feasible import Option
from gpukeeper.scheduler.live import HostLive

TOO_LITTLE_MEMORY = "too little free memory"
#: Owners that a reason names.
_SHOWN_MAX = 4


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """What the last heartbeat says about one job on one device. Neither fits nor why_not: only the agent can tell."""

    #: It fits beside all that is there.
    fits: bool = False
    #: It fits once others have let go.
    releases: bool = False
    #: Why it would be denied.
    why_not: str | None = None
    free_mb: int = 0


def room_for(site: Site, job: Job, option: Option, evidence: HostLive | None) -> Room:
    """Whether the job would be admitted there, and at whose cost."""
    reading = evidence.device(option.device.id) if evidence is not None else None
    if evidence is None or reading is None or reading.state != "healthy" or reading.free_mb is None:
        return Room()
    learned_mb = site.learned.peak_mb(option.host.name, option.runtime.name, job.model)
    need = which_need(declared_mb=job.vram_mb, learned_mb=learned_mb)
    if need is None or need.vram_mb is None:
        return Room(free_mb=reading.free_mb)
    decision = decide(Question(device=_place(option.device), reading=reading, need=need))
    if isinstance(decision.admission, Admit):
        return Room(fits=True, free_mb=reading.free_mb)
    words = f"{TOO_LITTLE_MEMORY}: {decision.admission.detail.rstrip('.')}"
    if decision.shortfall_mb is None or not shows_use(reading):
        return Room(why_not=words, free_mb=reading.free_mb)
    found = _releases(site, option, evidence, decision.shortfall_mb)
    if found.chosen:
        return Room(releases=True, free_mb=reading.free_mb)
    words = "; ".join((words, *why_stays(found.considered)[:_SHOWN_MAX]))
    return Room(why_not=words, free_mb=reading.free_mb)


def _place(device: Device) -> Place:
    """The device as decisions see it. What it holds at most is its total, whether limited or not."""
    kind: DeviceKind = "cpu" if device.kind == "cpu" else "gpu"
    return Place(id=device.id, kind=kind, name=device.name, headroom_mb=device.headroom_mb, limit_mb=device.total_mb)


def _releases(site: Site, option: Option, evidence: HostLive, shortfall_mb: int) -> Plan:
    """Who would be asked to let go on the device, by the heartbeat."""
    host = option.host
    tenants = [
        tenant_by_beat(
            runtime,
            evidence.runtime(runtime.name),
            devices=host.devices,
            jobs=len(phases := _phases(site, host, runtime.name)),
            loading=Phase.ADMITTED in phases,
        )
        for runtime in host.registry
        if runtime.name in host.runtimes
    ]
    return plan(shortfall_mb, owners_on(option.device.id, tenants))


def _phases(site: Site, host: Host, runtime: str) -> list[Phase]:
    """The phases of the jobs that hold a claim on this host and load or run on the runtime."""
    found: list[Phase] = []
    for device in site.devices.values():
        for claim in device.claims if device.host == host.name else ():
            job = site.jobs.get(claim.job)
            if job is not None and job.route is not None and job.route.runtime == runtime and not job.ended:
                found.append(job.phase if job.phase in ACTIVE else Phase.ADMITTED)
    return found
