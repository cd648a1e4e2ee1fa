"""Whether a device has room for a job, as far as the last heartbeat tells. Pure.

An estimate by the rules that the agent decides with on live readings: what the heartbeat does not say, the agent reads.
"""

from __future__ import annotations

from gpukeeper.capacity.admission import shows_use
from gpukeeper.capacity.need import which_need
from gpukeeper.capacity.owners import owners_on, tenant_by_beat
from gpukeeper.capacity.reclaim import Plan, plan
from gpukeeper.events.device import Considered
from gpukeeper.events.reasons import Reason
from gpukeeper.projections.host import Host
from gpukeeper.projections.job import ACTIVE, Job, Phase
from gpukeeper.projections.site import Site
from gpukeeper.scheduler.feasible import Option
from gpukeeper.scheduler.live import HostLive

TOO_LITTLE_MEMORY = "too little free memory"
#: Owners that a reason names.
_SHOWN_MAX = 4


def room_for(site: Site, job: Job, option: Option, evidence: HostLive | None) -> tuple[str | None, bool]:
    """Why the job would be denied there, or None; and whether others would be asked to let go for it."""
    reading = evidence.device(option.device.id) if evidence is not None else None
    learned_mb = site.learned.peak_mb(option.host.name, option.runtime.name, job.model)
    need = which_need(declared_mb=job.vram_mb, learned_mb=learned_mb)
    if need is None or need.vram_mb is None or evidence is None or reading is None or reading.free_mb is None:
        return None, False
    usable_mb = reading.free_mb - option.device.headroom_mb
    if need.vram_mb <= usable_mb:
        return None, False
    words = f"{TOO_LITTLE_MEMORY}: {usable_mb} of {reading.total_mb} MB usable, {need.vram_mb} MB asked"
    if not shows_use(reading):
        return words, False
    found = _releases(site, option, evidence, need.vram_mb - usable_mb)
    if found.chosen:
        return None, True
    stays = [_stays(each) for each in found.considered if each.kept is not Reason.OTHER_DEVICE]
    return "; ".join((words, *stays[:_SHOWN_MAX])), False


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


def _stays(each: Considered) -> str:
    name = each.runtime if each.model is None else f"{each.runtime}/{each.model}"
    held = "an unknown amount" if each.held_mb is None else f"{each.held_mb} MB"
    return f"{name} holds {held} and stays: {each.detail}"
