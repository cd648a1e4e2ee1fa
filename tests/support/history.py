"""Histories of a site, in words: each call is one event, stored under the next sequence and folded at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gpukeeper.events import device, host, job, operator, route, runtime, site, subjects
from gpukeeper.events.codec import Event, decode, encode
from gpukeeper.events.fact import Fact
from gpukeeper.events.job import Clock, Clocks
from gpukeeper.events.log import Stored
from gpukeeper.events.proposal import Proposal
from gpukeeper.events.readings import ClaimBeat, DeviceReading, Heartbeat, ResidentModel, RuntimeReading
from gpukeeper.events.reasons import Reason
from gpukeeper.projections.device import Device
from gpukeeper.projections.home import home_of
from gpukeeper.projections.job import Job
from gpukeeper.projections.site import Retention, Site
from gpukeeper.scheduler.config import SchedulerConfig
from gpukeeper.scheduler.live import Live
from support.virtual_time import START_NS

CLOCKS = Clocks(
    queue=Clock(limit_s=86_400, source="tests"),
    load=Clock(limit_s=600, source="tests"),
    first_byte=Clock(limit_s=300, source="tests"),
    idle=Clock(limit_s=300, source="tests"),
    run=Clock(limit_s=21_600, source="tests"),
)


def clocks(**limits_s: float) -> Clocks:
    """The usual clocks, but for those named (``queue=5``)."""
    named = {name: Clock(limit_s=limit_s, source=f"job deadlines.{name}_s") for name, limit_s in limits_s.items()}
    usual = {name: getattr(CLOCKS, name) for name in CLOCKS.__struct_fields__}
    return Clocks(**(usual | named))


class History:
    """A log in memory, the site folded from it, and what an observer heard.

    Everything has a default, so that a test names only what it is about: host ``h1`` with device ``g0`` and runtime
    ``ollama`` that has model ``m``; job ``a``.
    """

    def __init__(self, retention: Retention | None = None, *, config: SchedulerConfig | None = None) -> None:
        self.events: list[Event] = []
        self.site = Site(retention)
        self.live = Live()
        self.config = config or SchedulerConfig()
        self.at_ns = START_NS

    # --- time and storage

    @property
    def now_s(self) -> float:
        return self.at_ns / 1e9

    def after(self, seconds: float) -> History:
        """Let time pass before what comes next."""
        self.at_ns += int(seconds * 1e9)
        return self

    @property
    def seq(self) -> int:
        return len(self.events)

    def stored(self, subject: str, body: bytes) -> int:
        """Any bytes on any subject. Returns the sequence."""
        self.at_ns += 1_000_000
        event = decode(Stored(self.seq + 1, self.at_ns, subject, body))
        self.events.append(event)
        self.site.apply(event)
        return event.seq

    def fact(self, fact: Fact, *, subject: str | None = None, actor: str = "op") -> int:
        """A fact, where it belongs unless a subject is named. Returns the sequence."""
        where = subject or home_of(fact) or subjects.command(actor)
        number = self.seq + 1
        body = encode(fact, event_id=f"e{number}", source="/tests", subject="tests", time="2025-06-15T12:00:00Z")
        return self.stored(where, body)

    def proposed(self, *proposals: Proposal) -> None:
        """Decisions, stored as they are where the subject is still as they expect; an AssertionError otherwise."""
        for proposal in proposals:
            last = max((e.seq for e in self.events if e.stored.subject == proposal.subject), default=0)
            assert proposal.expected in (None, last), f"{proposal.subject}: expects {proposal.expected}, is at {last}"
            self.fact(proposal.fact, subject=proposal.subject)

    # --- submissions and commands

    def submitted(self, *, producer: str = "cli", raw: bytes | None = None, **fields: Any) -> int:
        body = {"model": "m", "prompt": "p"} | fields
        return self.stored(f"gpuq.submit.{producer}", json.dumps(body).encode() if raw is None else raw)

    def cancel_wanted(self, job_id: str = "a", *, actor: str = "op", reason: str = "") -> int:
        return self.fact(operator.Cancel(job=job_id, reason=reason), actor=actor)

    # --- hosts

    def joined(
        self,
        name: str = "h1",
        *,
        devices: Sequence[str] = ("g0",),
        runtimes: Sequence[str] = ("ollama",),
        models: Sequence[str] | None = ("m",),
        slots: int = 1,
        total_mb: int | None = 24_000,
        instance: str | None = None,
        heard: bool = True,
        **device_fields: Any,
    ) -> int:
        """An agent announces its devices and runtimes, joins, and is heard."""
        for device_id in devices:
            self.appeared(name, device_id, slots=slots, total_mb=total_mb, **device_fields)
        for runtime_name in runtimes:
            self.registered(name, runtime_name)
            self.health(name, runtime_name, models=models)
        seq = self.fact(
            host.Joined(
                host=name,
                boot_id=f"boot-{name}",
                instance_id=instance or f"{name}-1",
                version="0.1.0",
                pid=1,
                devices=tuple(devices),
                runtimes=tuple(runtimes),
            )
        )
        if heard:
            self.beat(name)
        return seq

    def left(self, name: str = "h1", *, instance: str | None = None) -> int:
        return self.fact(host.Left(host=name, instance_id=instance or f"{name}-1"))

    def appeared(
        self,
        name: str = "h1",
        device_id: str = "g0",
        *,
        slots: int = 1,
        total_mb: int | None = 24_000,
        **fields: Any,
    ) -> int:
        given: dict[str, Any] = {"kind": "gpu", "name": "card"} | fields
        return self.fact(device.Appeared(host=name, device=device_id, slots=slots, total_mb=total_mb, **given))

    def changed(self, state: Any, name: str = "h1", device_id: str = "g0", *, detail: str = "") -> int:
        return self.fact(device.Changed(host=name, device=device_id, state=state, detail=detail))

    def registered(self, name: str = "h1", runtime_name: str = "ollama", **fields: Any) -> int:
        given: dict[str, Any] = {"provider": "ollama", "url": "http://x", "devices": (), "loads_models": True} | fields
        return self.fact(runtime.Registered(host=name, runtime=runtime_name, **given))

    def health(
        self,
        name: str = "h1",
        runtime_name: str = "ollama",
        *,
        healthy: bool = True,
        models: Sequence[str] | None = ("m",),
        **fields: Any,
    ) -> int:
        had = None if models is None else tuple(models)
        return self.fact(runtime.HealthChanged(host=name, runtime=runtime_name, healthy=healthy, models=had, **fields))

    def suspected(self, name: str = "h1", runtime_name: str = "ollama", *, model: str = "m") -> int:
        return self.fact(
            runtime.Suspect(
                host=name,
                runtime=runtime_name,
                model=model,
                job="a",
                reason=Reason.CPU_FALLBACK,
                detail="0.0% is in VRAM",
                device="g0",
            )
        )

    def beat(
        self,
        name: str = "h1",
        *,
        claims: Sequence[ClaimBeat] = (),
        resident: Sequence[str] = (),
        runtime_name: str = "ollama",
        interval_s: float = 5.0,
        stopping: bool = False,
        devices: Sequence[DeviceReading] = (),
        from_before: bool = False,
    ) -> Heartbeat:
        """A heartbeat is heard. Nothing of it is in the log."""
        rows = tuple(ResidentModel(model=model) for model in resident)
        looks = (RuntimeReading(runtime=runtime_name, read_at="t", healthy=True, resident=rows),) if rows else ()
        beat = Heartbeat(
            host=name,
            boot_id=f"boot-{name}",
            instance_id=f"{name}-1",
            sent_at="2025-06-15T12:00:00Z",
            interval_s=interval_s,
            claims=tuple(claims),
            devices=tuple(devices),
            runtimes=looks,
            stopping=stopping,
        )
        self.live.heard(beat, from_before=from_before)
        return beat

    def silence(self, seconds: float, *, broker_healthy: bool = True, tick_s: float = 1.0) -> None:
        """An observer listens for ``seconds``, tick by tick, and hears nothing."""
        claims: dict[str, tuple[int, ...]] = {}
        for held in self.site.devices.values():
            if held.claims:
                claims[held.host] = (*claims.get(held.host, ()), *(claim.epoch for claim in held.claims))
        for key, jobs in self.site.routed.items():
            if jobs:
                claims.setdefault(key.partition("/")[0], ())
        for _ in range(round(seconds / tick_s)):
            self.live.tick(tick_s, broker_healthy=broker_healthy, claims=claims)
        self.after(seconds)

    # --- one job's life

    def accepted(self, job_id: str = "a", **fields: Any) -> int:
        """A submission and its acceptance."""
        submission = fields.pop("submission_seq", None) or self.submitted(id=job_id)
        given: dict[str, Any] = {
            "producer": "cli",
            "digest": f"digest-{job_id}",
            "kind": "inference",
            "task": "generate",
            "model": "m",
            "clocks": CLOCKS,
        }
        return self.fact(job.Accepted(job=job_id, submission_seq=submission, **(given | fields)))

    def waits(self, job_id: str = "a", *, reason: Reason = Reason.CAPACITY, epoch: int | None = None) -> int:
        return self.fact(job.Waiting(job=job_id, reason=reason, detail="so it is", epoch=epoch))

    def routed(
        self, job_id: str = "a", name: str = "h1", device_id: str = "g0", *, runtime_name: str = "ollama"
    ) -> int:
        known = self.site.jobs.get(job_id)
        return self.fact(
            route.Routed(
                job=job_id,
                host=name,
                device=device_id,
                runtime=runtime_name,
                submission_seq=1 if known is None else known.submission_seq,
                job_seq=0 if known is None else known.seq,
                attempt=1 if known is None else known.attempt + 1,
                clocks=CLOCKS,
                why="best of 1",
            )
        )

    def unrouted(self, job_id: str = "a", name: str = "h1", *, route_seq: int | None = None) -> int:
        return self.fact(
            route.Unrouted(
                job=job_id,
                host=name,
                route_seq=self._route_seq(job_id) if route_seq is None else route_seq,
                reason=Reason.NO_ROUTE,
                detail="withdrawn",
            )
        )

    def claimed(
        self,
        job_id: str = "a",
        name: str = "h1",
        device_id: str = "g0",
        *,
        slot: int = 0,
        route_seq: int | None = None,
        instance: str | None = None,
    ) -> int:
        """The slot is taken. Returns the epoch."""
        return self.fact(
            device.Claimed(
                host=name,
                device=device_id,
                slot=slot,
                job=job_id,
                attempt=1,
                route_seq=self._route_seq(job_id) if route_seq is None else route_seq,
                boot_id=f"boot-{name}",
                instance_id=instance or f"{name}-1",
            )
        )

    def admitted(self, job_id: str = "a", name: str = "h1", device_id: str = "g0", *, epoch: int | None = None) -> int:
        return self.fact(
            job.Admitted(
                job=job_id,
                host=name,
                device=device_id,
                slot=0,
                epoch=self._epoch(job_id) if epoch is None else epoch,
                attempt=1,
                route_seq=self._route_seq(job_id),
                runtime="ollama",
                instance_id=f"{name}-1",
                resident=False,
            )
        )

    def denied(
        self, job_id: str = "a", name: str = "h1", device_id: str = "g0", *, reason: Reason = Reason.INSUFFICIENT
    ) -> int:
        return self.fact(
            job.Denied(
                job=job_id,
                host=name,
                device=device_id,
                slot=0,
                epoch=self._epoch(job_id),
                attempt=1,
                route_seq=self._route_seq(job_id),
                runtime="ollama",
                reason=reason,
                detail="too little",
            )
        )

    def placed(self, job_id: str = "a") -> int:
        return self.fact(
            job.PlacementVerified(
                job=job_id, epoch=self._epoch(job_id), runtime="ollama", model="m", intended="gpu", detail="all of it"
            )
        )

    def misplaced(self, job_id: str = "a") -> int:
        return self.fact(
            job.PlacementFailed(
                job=job_id,
                epoch=self._epoch(job_id),
                runtime="ollama",
                model="m",
                intended="gpu",
                reason=Reason.CPU_FALLBACK,
            )
        )

    def started(self, job_id: str = "a") -> int:
        return self.fact(job.Started(job=job_id, epoch=self._epoch(job_id), attempt=1))

    def progressed(self, job_id: str = "a", *, tokens: int = 7) -> int:
        return self.fact(job.Progress(job=job_id, epoch=self._epoch(job_id), tokens=tokens, elapsed_s=1.0))

    def cancel_requested(self, job_id: str = "a", *, command_seq: int = 0) -> int:
        return self.fact(job.CancelRequested(job=job_id, command_seq=command_seq, actor="op", reason="enough"))

    def succeeded(self, job_id: str = "a") -> int:
        return self.fact(job.Succeeded(job=job_id, epoch=self._epoch(job_id), attempt=1))

    def failed(self, job_id: str = "a", *, reason: Reason = Reason.RUNTIME_ERROR) -> int:
        return self.fact(job.Failed(job=job_id, reason=reason, detail="it broke", epoch=self._epoch(job_id)))

    def cancelled(self, job_id: str = "a", *, command_seq: int | None = None) -> int:
        return self.fact(job.Cancelled(job=job_id, actor="op", reason="enough", command_seq=command_seq))

    def preempted(self, job_id: str = "a") -> int:
        return self.fact(
            job.Preempted(job=job_id, epoch=self._epoch(job_id), reason=Reason.AGENT_STOPPING, detail="grace ended")
        )

    def released(self, job_id: str = "a", name: str = "h1", device_id: str = "g0", *, epoch: int | None = None) -> int:
        held = self._epoch(job_id) if epoch is None else epoch
        return self.fact(device.Released(host=name, device=device_id, epoch=held, job=job_id))

    def lapsed(self, job_id: str = "a", name: str = "h1", device_id: str = "g0", *, epoch: int | None = None) -> int:
        held = self._epoch(job_id) if epoch is None else epoch
        return self.fact(
            device.ClaimLapsed(
                host=name,
                device=device_id,
                epoch=held,
                job=job_id,
                reason=Reason.CLAIM_LAPSED,
                detail="no heartbeat for 30 s",
                last_beat=ClaimBeat(job=job_id, device=device_id, slot=0, epoch=held, tokens=3),
                last_beat_at="2025-06-15T12:00:00Z",
                silent_s=30.0,
            )
        )

    def elected(self, instance: str = "s1") -> int:
        return self.fact(site.LeaderElected(instance_id=instance, lease_revision=1, version="0.1.0"))

    # --- a job brought to a phase, on a host that has joined

    def is_routed(self, job_id: str = "a", **where: Any) -> int:
        self.accepted(job_id)
        return self.routed(job_id, **where)

    def is_claimed(self, job_id: str = "a", *, slot: int = 0, **where: Any) -> int:
        """Accepted, routed, claimed. Returns the epoch."""
        self.is_routed(job_id, **where)
        return self.claimed(job_id, slot=slot, **where)

    def is_admitted(self, job_id: str = "a", *, slot: int = 0, **where: Any) -> int:
        """... and admitted. Returns the epoch."""
        epoch = self.is_claimed(job_id, slot=slot, **where)
        self.admitted(job_id, **where)
        return epoch

    def is_running(self, job_id: str = "a", *, slot: int = 0, **where: Any) -> int:
        """... placed and started. Returns the epoch."""
        epoch = self.is_admitted(job_id, slot=slot, **where)
        self.placed(job_id)
        self.started(job_id)
        return epoch

    # --- looking

    def job(self, job_id: str = "a") -> Job:
        return self.site.jobs[job_id]

    def device(self, name: str = "h1", device_id: str = "g0") -> Device:
        return self.site.devices[f"{name}/{device_id}"]

    def _route_seq(self, job_id: str) -> int:
        """Of the last route that was stored for the job."""
        seqs = [event.seq for event in self.events if isinstance(event.data, route.Routed) and event.data.job == job_id]
        return seqs[-1] if seqs else 0

    def _epoch(self, job_id: str) -> int:
        """Of the last claim that was stored for the job."""
        seqs = [
            event.seq for event in self.events if isinstance(event.data, device.Claimed) and event.data.job == job_id
        ]
        return seqs[-1] if seqs else 0
