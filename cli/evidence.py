"""What the log and the newest heartbeats say about each place for a job, as questions of the preview. Pure.

Whatever is silent or was not said stays unknown: an agent that was not heard in time offers no free memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime

import msgspec

from gpukeeper.capacity.admission import shows_use, usable_mb
from gpukeeper.capacity.decision import Question
from gpukeeper.capacity.device import Device as CapacityDevice
from gpukeeper.capacity.need import which_need
from gpukeeper.capacity.owners import Tenant, owners_on, tenant_by_beat
from gpukeeper.capacity.preview import Candidate
from gpukeeper.capacity.reclaim import Hurdle, Owner
from gpukeeper.cli.agentstate import agent_state
from gpukeeper.cli.livesite import Heard
from gpukeeper.cli.quantities import duration, moment
from gpukeeper.events.instants import parse_utc
from gpukeeper.events.modelnames import same_model
from gpukeeper.events.readings import DeviceReading, RuntimeReading
from gpukeeper.events.reasons import Reason
from gpukeeper.projections.device import Device, device_key
from gpukeeper.projections.host import Host, Runtime
from gpukeeper.projections.job import Job, Phase
from gpukeeper.projections.site import Site
from gpukeeper.scheduler.feasible import Want, may_have, must_fetch

#: The share of a model that must sit in VRAM for it to count as resident on a GPU.
_RESIDENT_SHARE = 0.99


def candidates(site: Site, heard: Mapping[str, Heard], want: Want, *, now_ns: int) -> tuple[Candidate, ...]:
    """One for each device and runtime that ``want`` allows; runtimes without the model only where none has it.

    Args:
        want: ``vram_mb`` is the declared need; None falls back to what loads of before took.
        now_ns: in nanoseconds since the epoch, for the age of the evidence.
    """
    places = list(_places(site, want))
    able = [place for place in places if may_have(place[1], want.model)]
    return tuple(
        HostEvidence(site, host, heard.get(host.name), now_ns).candidate(want, runtime, device)
        for host, runtime, device in able or places
    )


def _places(site: Site, want: Want) -> Iterator[tuple[Host, Runtime, Device]]:
    for _, host in sorted(site.hosts.items()):
        if want.host not in (None, host.name):
            continue
        for runtime in host.registry:
            if runtime.name not in host.runtimes or want.runtime not in (None, runtime.name):
                continue
            for name in runtime.devices or host.devices:
                device = site.devices.get(device_key(host.name, name))
                if device is None or want.place not in ("any", device.kind):
                    continue
                if name in host.devices and want.device in (None, name):
                    yield host, runtime, device


class HostEvidence:
    """What is known of one host."""

    def __init__(self, site: Site, host: Host, heard: Heard | None, now_ns: int) -> None:
        self.site = site
        self.host = host
        state = agent_state(host, heard, now_ns=now_ns)
        #: The newest heartbeat, where it still counts.
        self.heard = heard if state in ("live", "stopping") else None
        self.now_ns = now_ns
        age = "was never heard" if heard is None else f"was heard {duration((now_ns - heard.stored_ns) / 1e9)} ago"
        self.silence = "its agent has stopped" if state == "left" else f"its agent is silent: it {age}"
        #: Jobs that were sent here and have not ended, with the runtime of each.
        self.jobs = [
            (job.route.runtime, job)
            for job in (site.jobs[name] for name in site.live)
            if job.route is not None and job.route.host == host.name
        ]

    def candidate(self, want: Want, runtime: Runtime, device: Device) -> Candidate:
        reading = self.reading(device)
        look = self.look(runtime)
        learned_mb = self.site.learned.peak_mb(self.host.name, runtime.name, want.model)
        question = Question(
            device=_known(device, reading),
            reading=reading,
            reserved_mb=self.reserved_mb(device, reading),
            need=which_need(declared_mb=want.vram_mb, learned_mb=learned_mb),
            resident=_is_resident(want.model, runtime, device, look),
            drained=device.drained,
            blocked=device.detail or "no further word" if device.state == "blocked" else None,
            owners=self.owners(device),
        )
        holders = tuple(claim.job for claim in device.claims if claim.job in self.site.live)
        holders += tuple(self.site.routed.get(device.key, ()))
        return Candidate(
            host=self.host.name,
            runtime=runtime.name,
            question=question,
            obstacle=self._obstacle(want, runtime, look),
            slots_held_by=holders if self.site.free_slots(device) <= 0 else (),
            jobs=tuple((name, job.id) for name, job in self.jobs),
            stale_s=self._age_s(reading),
        )

    def registered(self) -> Iterator[Runtime]:
        """The runtimes of its registry as it joined last."""
        return (runtime for runtime in self.host.registry if runtime.name in self.host.runtimes)

    def reading(self, device: Device) -> DeviceReading:
        """The newest reading; an unknown one where nothing recent says anything."""
        reading = None if self.heard is None else self.heard.device(device.id)
        if reading is None:
            why = self.silence if self.heard is None else "the last heartbeat does not tell of it"
            at = moment(self.now_ns if self.heard is None else self.heard.stored_ns)
            return DeviceReading(device=device.id, source="none", read_at=at, state="unknown", error=why)
        if device.state not in ("healthy", "blocked") and reading.state == "healthy":
            state = "lost" if device.state == "lost" else "unknown"
            return msgspec.structs.replace(reading, state=state, error=device.detail or "as its agent said last")
        return reading

    def look(self, runtime: Runtime) -> RuntimeReading | None:
        """The newest look, where it still counts."""
        return None if self.heard is None else self.heard.runtime(runtime.name)

    def owners(self, device: Device) -> tuple[Owner, ...]:
        """What its registered runtimes hold there."""
        return owners_on(device.id, [self._tenant(each) for each in self.registered()])

    def _tenant(self, runtime: Runtime) -> Tenant:
        here = [job for name, job in self.jobs if name == runtime.name]
        return tenant_by_beat(
            runtime,
            self.look(runtime),
            devices=self.host.devices,
            jobs=len(here),
            loading=any(job.phase is Phase.ADMITTED for job in here),
        )

    def _obstacle(self, want: Want, runtime: Runtime, look: RuntimeReading | None) -> Hurdle | None:
        if self.heard is None:
            # The device's reading says so already, and is unknown.
            return None
        if not runtime.healthy or (look is not None and not look.healthy):
            error = look.error if look is not None and look.error else runtime.detail
            return Hurdle(Reason.RUNTIME_UNREACHABLE, f"{runtime.name} does not answer: {error or 'no further word'}.")
        if runtime.suspect is not None:
            return Hurdle(Reason(runtime.suspect.partition(":")[0]), f"{runtime.name} is suspect: {runtime.suspect}.")
        if not may_have(runtime, want.model):
            return Hurdle(Reason.MODEL_MISSING, f"{runtime.name} does not list {want.model} and may not fetch it.")
        if must_fetch(runtime, want.model) or look is None or look.resident is not None or not runtime.loads_models:
            return None
        return Hurdle(Reason.RESIDENCY_UNKNOWN, f"{runtime.name} did not say what it holds.")

    def reserved_mb(self, device: Device, reading: DeviceReading) -> int:
        """What jobs of ours were promised and the reading cannot show yet; all of it where nobody knows how much."""
        reserved_mb = 0
        for claim in device.claims:
            job = self.site.jobs.get(claim.job)
            if job is None or job.id not in self.site.live or self._shows(job, reading):
                continue
            runtime = "" if job.route is None else job.route.runtime
            need = which_need(
                declared_mb=job.vram_mb, learned_mb=self.site.learned.peak_mb(self.host.name, runtime, job.model)
            )
            if need is None or need.vram_mb is None:
                return max(usable_mb(_known(device, reading), reading, 0) or 0, 0)
            reserved_mb += need.vram_mb
        return reserved_mb

    def _shows(self, job: Job, reading: DeviceReading) -> bool:
        """Whether the reading shows what the job has loaded."""
        if not shows_use(reading) or job.phase not in (Phase.PLACED, Phase.RUNNING):
            return False
        read_at = _instant(reading.read_at)
        return read_at is not None and read_at.timestamp() * 1e9 > job.since_ns

    def _age_s(self, reading: DeviceReading) -> float | None:
        """How old the reading is: since the server got it, and since it was taken before that."""
        if self.heard is None or reading.source == "none":
            return None
        sent_at, read_at = _instant(self.heard.beat.sent_at), _instant(reading.read_at)
        before_s = 0.0 if sent_at is None or read_at is None else (sent_at - read_at).total_seconds()
        return max((self.now_ns - self.heard.stored_ns) / 1e9, 0.0) + max(before_s, 0.0)


def _instant(text: str) -> datetime | None:
    """The moment that an agent wrote down; None where it is none."""
    try:
        return parse_utc(text)
    except ValueError:
        return None


def _known(device: Device, reading: DeviceReading) -> CapacityDevice:
    """The device as decisions see it."""
    return CapacityDevice(
        id=device.id,
        kind="cpu" if device.kind == "cpu" else "gpu",
        name=device.name,
        slots=device.slots,
        headroom_mb=device.headroom_mb,
        limit_mb=_limit_mb(device, reading),
        parent=device.parent,
        unschedulable=device.unschedulable,
    )


def _limit_mb(device: Device, reading: DeviceReading) -> int | None:
    """The limit of the configuration, which is what the agent announced where it is less than the device has."""
    if device.total_mb is None or reading.total_mb is None or device.total_mb >= reading.total_mb:
        return None
    return device.total_mb


def _is_resident(model: str, runtime: Runtime, device: Device, look: RuntimeReading | None) -> bool:
    """Whether the runtime surely holds all of the model on this device."""
    if look is None or not look.healthy or look.resident is None:
        return False
    here = runtime.devices == (device.id,) or any(each.device == device.id for each in look.holdings or ())
    for row in look.resident:
        if not here or row.stopping or not same_model(row.model, model):
            continue
        if device.kind == "cpu":
            return True
        if row.vram_bytes is not None and row.size_bytes and row.vram_bytes >= _RESIDENT_SHARE * row.size_bytes:
            return True
    return False
