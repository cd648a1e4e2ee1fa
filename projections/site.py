"""The site: every projection that decisions rest on, folded in one pass over the whole log."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from gpukeeper.events import device as device_facts
from gpukeeper.events import host as host_facts
from gpukeeper.events import job as job_facts
from gpukeeper.events import operator as operator_facts
from gpukeeper.events import route as route_facts
from gpukeeper.events import runtime as runtime_facts
from gpukeeper.events import site as site_facts
from gpukeeper.events.codec import Event, Submitted, Unknown, Unreadable
from gpukeeper.events.fact import Fact
from gpukeeper.events.ids import TOKEN_RULE, cleaned_token
from gpukeeper.events.log import Stored
from gpukeeper.events.reasons import Reason
from gpukeeper.events.subjects import COMMAND_PREFIX, EVENT_PREFIX
from gpukeeper.projections.device import Claim, Device, Lapse, device_key
from gpukeeper.projections.home import is_at_home
from gpukeeper.projections.host import Host, Runtime, why_suspect
from gpukeeper.projections.job import CancelWish, Denial, Job, Phase, Route, RouteSeq
from gpukeeper.projections.queue import Queue


class Retention(msgspec.Struct, frozen=True, array_like=True):
    """How long ended jobs stay in memory, in event time and number. The log has them for ever."""

    after_s: float = 86_400.0
    above: int = 100_000


class Waiting(msgspec.Struct, frozen=True, array_like=True):
    """A submission that nobody has answered."""

    seq: int
    stored_ns: int
    producer: str
    raw: bytes
    #: Whether the producer named itself with what is no token; ``producer`` is then the cleaned name.
    misnamed: bool = False


class Command(msgspec.Struct, frozen=True, array_like=True):
    """An operator's command that nobody has answered. ``job`` is None where the command is not readable."""

    seq: int
    stored_ns: int
    actor: str
    event_id: str
    job: str | None
    reason: str
    problem: str = ""


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """An ended job that will be forgotten."""

    job: str
    ended_ns: int


class SiteState(msgspec.Struct, array_like=True):
    """All of a :class:`Site` that is stored; the rest is derived from it."""

    seq: int
    stored_ns: int
    retention: Retention
    jobs: list[Job]
    ended: list[Ended]
    devices: list[Device]
    hosts: list[Host]
    submissions: list[Waiting]
    commands: list[Command]
    lapses: dict[str, Lapse]
    leader: str
    forgotten: int
    unknown: int
    unreadable: int


class Site:
    """The folded state. Read it freely; only :meth:`apply` writes it."""

    def __init__(self, retention: Retention | None = None) -> None:
        #: Last sequence folded, and when the server stored it.
        self.seq = 0
        self.stored_ns = 0
        self.retention = retention or Retention()
        self.jobs: dict[str, Job] = {}
        self.devices: dict[str, Device] = {}
        self.hosts: dict[str, Host] = {}
        #: Submissions without an answer, by sequence.
        self.submissions: dict[int, Waiting] = {}
        #: Commands without an answer, by sequence.
        self.commands: dict[int, Command] = {}
        #: Jobs whose claim ended before they did, by job.
        self.lapses: dict[str, Lapse] = {}
        self.leader = ""
        #: Ended jobs that are no longer in memory.
        self.forgotten = 0
        #: Events of newer versions, and what was no event or stood on a subject that is not its own.
        self.unknown = 0
        self.unreadable = 0
        # Derived, never stored:
        self.queue = Queue()
        #: Jobs sent to a device whose route nobody has claimed yet, by device key.
        self.routed: dict[str, dict[str, None]] = {}
        #: Every job that has not ended.
        self.live: dict[str, None] = {}
        self._ended: deque[Ended] = deque()

    # --- reading

    def free_slots(self, device: Device) -> int:
        """Slots that a new job could take: neither claimed by a live job nor promised to one."""
        taken = sum(1 for claim in device.claims if claim.job in self.live)
        return device.slots - taken - len(self.routed.get(device.key, ()))

    # --- folding

    def apply(self, event: Event) -> None:
        """Fold one event. Total; an event at or below :attr:`seq` changes nothing."""
        stored = event.stored
        if stored.seq <= self.seq:
            return
        self.seq = stored.seq
        self.stored_ns = stored.stored_ns
        data = event.data
        if isinstance(data, Fact) and not is_at_home(event):
            data = Unreadable(f"{data.TYPE} does not belong on {stored.subject}")
        handler = _HANDLERS.get(type(data))
        if handler is not None:
            handler(self, event, data)
        self._keep_up(stored)

    def _keep_up(self, stored: Stored) -> None:
        """Whatever an event says, the next append to its subject rests on its sequence."""
        if not stored.subject.startswith(EVENT_PREFIX):
            return
        kind, *names = stored.subject[len(EVENT_PREFIX) :].split(".")
        match kind, names:
            case "job", [job_id]:
                job = self.jobs.get(job_id)
                if job is not None and job.seq < stored.seq:
                    self.jobs[job_id] = replace(job, seq=stored.seq)
            case "route", [host, job_id]:
                job = self.jobs.get(job_id)
                if job is not None and job.route_seq(host) < stored.seq:
                    others = tuple(known for known in job.route_seqs if known.host != host)
                    self.jobs[job_id] = replace(job, route_seqs=(*others, RouteSeq(host, stored.seq)))
            case "device", [host, device_id]:
                device = self.devices.get(device_key(host, device_id))
                if device is not None and device.seq < stored.seq:
                    self.devices[device.key] = replace(device, seq=stored.seq)
            case "runtime", [host, name]:
                known = self.hosts.get(host)
                runtime = None if known is None else known.runtime(name)
                if runtime is not None and runtime.seq < stored.seq:
                    self._runtime(stored.seq, host, name)
            case "host", [host]:
                known = self.hosts.get(host)
                if known is not None and known.seq < stored.seq:
                    self._host(host, seq=stored.seq)
            case _:
                pass

    def _job(self, job_id: str, **changes: Any) -> Job | None:
        """Replace a job that has not ended, keeping the derived indexes in step. Ends are final."""
        old = self.jobs.get(job_id)
        if old is None or old.ended:
            return None
        new = replace(old, **changes)
        if old.phase is not new.phase:
            if old.phase is Phase.WAITING:
                self.queue.remove(old)
            elif old.phase is Phase.ROUTED:
                self._unlist(old)
        self.jobs[job_id] = new
        if old.phase is not new.phase:
            self._index(new)
        return new

    def _index(self, job: Job) -> None:
        if job.phase is Phase.WAITING:
            self.queue.add(job)
        elif job.phase is Phase.ROUTED and job.route is not None:
            key = device_key(job.route.host, job.route.device)
            device = self.devices.get(key)
            claimed = device is not None and device.follows_route(job.id, job.route.seq)
            if not claimed and job.id not in self.lapses:
                self.routed.setdefault(key, {})[job.id] = None
        if job.ended:
            self.live.pop(job.id, None)
        else:
            self.live[job.id] = None

    def _unlist(self, job: Job) -> None:
        if job.route is not None:
            waiting = self.routed.get(device_key(job.route.host, job.route.device))
            if waiting is not None:
                waiting.pop(job.id, None)

    def _to_queue(self, event: Event, job_id: str, **changes: Any) -> None:
        """Back into the queue: whatever claim or route it had is over."""
        self._job(job_id, phase=Phase.WAITING, since_ns=event.stored.stored_ns, route=None, epoch=0, slot=0, **changes)
        self.lapses.pop(job_id, None)

    def _end(self, event: Event, job_id: str, phase: Phase, reason: str, detail: str) -> None:
        ended = self._job(
            job_id, phase=phase, seq=event.seq, since_ns=event.stored.stored_ns, reason=reason, detail=detail
        )
        if ended is None:
            # A second end cannot be stored while its writer names the right sequence; it is not applied here either.
            return
        self.lapses.pop(job_id, None)
        self._ended.append(Ended(job_id, event.stored.stored_ns))
        self._forget()

    def _forget(self) -> None:
        oldest_ns = self.stored_ns - int(self.retention.after_s * 1e9)
        while self._ended and (len(self._ended) > self.retention.above or self._ended[0].ended_ns < oldest_ns):
            gone = self._ended.popleft()
            self.jobs.pop(gone.job, None)
            self.forgotten += 1

    def _device(self, event: Event, host: str, device_id: str, **changes: Any) -> Device:
        key = device_key(host, device_id)
        old = self.devices.get(key) or Device(host=host, id=device_id, seq=0)
        new = replace(old, seq=event.seq, **changes)
        self.devices[key] = new
        return new

    def _host(self, name: str, **changes: Any) -> Host:
        old = self.hosts.get(name) or Host(name=name, seq=0)
        new = replace(old, **changes)
        self.hosts[name] = new
        return new

    def _runtime(self, seq: int, host: str, name: str, **changes: Any) -> None:
        known = self.hosts.get(host) or Host(name=host, seq=0)
        old = known.runtime(name) or Runtime(name=name, seq=0)
        new = replace(old, seq=seq, **changes)
        others = tuple(r for r in known.registry if r.name != name)
        self._host(host, registry=tuple(sorted((*others, new), key=lambda r: r.name)))

    # --- one method a fact

    def on_submitted(self, event: Event, fact: Submitted) -> None:
        stored = event.stored
        self.submissions[event.seq] = Waiting(event.seq, stored.stored_ns, fact.producer, fact.raw, fact.misnamed)

    def on_accepted(self, event: Event, fact: job_facts.Accepted) -> None:
        submission = self.submissions.pop(fact.submission_seq, None)
        if submission is None or fact.job in self.jobs:
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
            reason=fact.waiting or "",
            detail=fact.detail,
        )
        self.jobs[job.id] = job
        self._index(job)

    def on_rejected(self, event: Event, fact: job_facts.Rejected) -> None:
        submission = self.submissions.pop(fact.submission_seq, None)
        if submission is None or fact.job in self.jobs:
            return
        at_ns = event.stored.stored_ns
        self.jobs[fact.job] = Job(
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
        self._ended.append(Ended(fact.job, at_ns))
        self._forget()

    def on_resubmitted(self, event: Event, fact: job_facts.Resubmitted) -> None:
        self.submissions.pop(fact.submission_seq, None)
        self._job(fact.job, seq=event.seq)

    def on_waiting(self, event: Event, fact: job_facts.Waiting) -> None:
        old = self.jobs.get(fact.job)
        if old is None:
            return
        if old.phase is Phase.WAITING:
            self._job(fact.job, seq=event.seq, reason=fact.reason, detail=fact.detail)
        elif fact.epoch is not None:
            lapses = old.lapses + (fact.reason == Reason.CLAIM_LAPSED)
            self._to_queue(event, fact.job, seq=event.seq, reason=fact.reason, detail=fact.detail, lapses=lapses)
        # Otherwise it was decided beside a route, on the same sequence: it says why the job waited until then.

    def on_routed(self, event: Event, fact: route_facts.Routed) -> None:
        old = self.jobs.get(fact.job)
        if old is None or old.phase is not Phase.WAITING:
            # Two leaders, or a job that moved on: the agent that tries this route loses at the job's sequence.
            return
        self._job(
            fact.job,
            phase=Phase.ROUTED,
            since_ns=event.stored.stored_ns,
            route=Route(event.seq, fact.host, fact.device, fact.runtime, fact.job_seq),
            attempt=fact.attempt,
            reason="",
            detail=fact.why,
        )

    def on_unrouted(self, event: Event, fact: route_facts.Unrouted) -> None:
        old = self.jobs.get(fact.job)
        if old is None or old.phase is not Phase.ROUTED or old.route is None or old.route.seq != fact.route_seq:
            return
        lapses = old.lapses + (fact.reason == Reason.CLAIM_LAPSED)
        self._to_queue(event, fact.job, reason=fact.reason, detail=fact.detail, lapses=lapses)

    def on_admitted(self, event: Event, fact: job_facts.Admitted) -> None:
        admitted = self._job(
            fact.job,
            phase=Phase.ADMITTED,
            seq=event.seq,
            since_ns=event.stored.stored_ns,
            route=Route(fact.route_seq, fact.host, fact.device, fact.runtime),
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
        self.lapses.pop(fact.job, None)
        device = self.devices.get(device_key(fact.host, fact.device))
        claim = None if device is None else device.claim(fact.epoch)
        if claim is None or claim.job != fact.job:
            # Its agent had not heard yet that the claim was over. Nobody will end that claim again, so the job is an
            # orphan from the start.
            detail = "it was admitted under a claim that had ended"
            self.lapses[fact.job] = Lapse(fact.host, fact.device, fact.epoch, event.seq, _id_of(event), detail)

    def on_denied(self, event: Event, fact: job_facts.Denied) -> None:
        old = self.jobs.get(fact.job)
        if old is None or old.ended:
            return
        at_ns = event.stored.stored_ns
        earlier = [d for d in old.denials if (d.host, d.device) == (fact.host, fact.device)]
        others = [d for d in old.denials if (d.host, d.device) != (fact.host, fact.device)]
        count = earlier[0].count + 1 if earlier else 1
        # One for each device, so that none is asked again before its time: the site's devices are the bound.
        denials = (*others, Denial(fact.host, fact.device, at_ns, count))
        self._to_queue(
            event,
            fact.job,
            seq=event.seq,
            reason=Reason.DENIED,
            detail=f"{fact.reason}: {fact.detail}",
            denials=denials,
        )

    def on_placement_verified(self, event: Event, fact: job_facts.PlacementVerified) -> None:
        self._job(fact.job, phase=Phase.PLACED, seq=event.seq, since_ns=event.stored.stored_ns, detail=fact.detail)

    def on_started(self, event: Event, fact: job_facts.Started) -> None:
        self._job(fact.job, phase=Phase.RUNNING, seq=event.seq, since_ns=event.stored.stored_ns)

    def on_progress(self, event: Event, fact: job_facts.Progress) -> None:
        self._job(fact.job, seq=event.seq, tokens=fact.tokens)

    def on_cancel_requested(self, event: Event, fact: job_facts.CancelRequested) -> None:
        self.commands.pop(fact.command_seq, None)
        self._job(fact.job, seq=event.seq, cancel=CancelWish(fact.actor, fact.reason, fact.command_seq))

    def on_note(self, event: Event, fact: job_facts.PlacementFailed | job_facts.LateResult) -> None:
        self._job(fact.job, seq=event.seq)

    def on_succeeded(self, event: Event, fact: job_facts.Succeeded) -> None:
        self._end(event, fact.job, Phase.SUCCEEDED, "", "")

    def on_failed(self, event: Event, fact: job_facts.Failed) -> None:
        self._end(event, fact.job, Phase.FAILED, fact.reason, fact.detail)

    def on_cancelled(self, event: Event, fact: job_facts.Cancelled) -> None:
        if fact.command_seq is not None:
            self.commands.pop(fact.command_seq, None)
        self._end(event, fact.job, Phase.CANCELLED, Reason.CANCELLED, f"{fact.actor}: {fact.reason}".rstrip(": "))

    def on_expired(self, event: Event, fact: job_facts.Expired) -> None:
        detail = f"{fact.clock} clock: {fact.elapsed_s:.1f} s of {fact.limit_s:g} s, set by {fact.source}"
        self._end(event, fact.job, Phase.EXPIRED, Reason.DEADLINE, detail)

    def on_unroutable(self, event: Event, fact: job_facts.Unroutable) -> None:
        self._end(event, fact.job, Phase.UNROUTABLE, fact.reason, fact.detail)

    def on_lost(self, event: Event, fact: job_facts.Lost) -> None:
        self._end(event, fact.job, Phase.LOST, fact.reason, fact.detail)

    def on_preempted(self, event: Event, fact: job_facts.Preempted) -> None:
        old = self.jobs.get(fact.job)
        if old is None or old.ended:
            return
        self._to_queue(
            event,
            fact.job,
            seq=event.seq,
            queued_ns=event.stored.stored_ns,
            preemptions=old.preemptions + 1,
            reason=fact.reason,
            detail=fact.detail,
        )

    def on_appeared(self, event: Event, fact: device_facts.Appeared) -> None:
        self._device(
            event,
            fact.host,
            fact.device,
            kind=fact.kind,
            name=fact.name,
            slots=fact.slots,
            total_mb=fact.total_mb,
            headroom_mb=fact.headroom_mb,
            unschedulable=fact.unschedulable,
            parent=fact.parent,
            state="healthy",
            detail="",
        )

    def on_changed(self, event: Event, fact: device_facts.Changed) -> None:
        self._device(event, fact.host, fact.device, state=fact.state, detail=fact.detail)

    def on_claimed(self, event: Event, fact: device_facts.Claimed) -> None:
        claim = Claim(
            epoch=event.seq,
            job=fact.job,
            attempt=fact.attempt,
            slot=fact.slot,
            route_seq=fact.route_seq,
            boot_id=fact.boot_id,
            instance_id=fact.instance_id,
            claimed_ns=event.stored.stored_ns,
        )
        old = self.devices.get(device_key(fact.host, fact.device))
        claims = () if old is None else old.claims
        self._device(event, fact.host, fact.device, claims=(*claims, claim))
        job = self.jobs.get(fact.job)
        if job is not None and job.route is not None and job.route.seq == fact.route_seq:
            self._unlist(job)

    def on_released(self, event: Event, fact: device_facts.Released) -> None:
        claim = self._drop_claim(event, fact.host, fact.device, fact.epoch)
        detail = "its agent gave the slot up"
        self._orphan(claim, Lapse(fact.host, fact.device, fact.epoch, event.seq, _id_of(event), detail))

    def on_claim_lapsed(self, event: Event, fact: device_facts.ClaimLapsed) -> None:
        claim = self._drop_claim(event, fact.host, fact.device, fact.epoch)
        lapse = Lapse(
            host=fact.host,
            device=fact.device,
            epoch=fact.epoch,
            seq=event.seq,
            event_id=_id_of(event),
            detail=fact.detail,
            last_beat=fact.last_beat,
            last_beat_at=fact.last_beat_at,
            silent_s=fact.silent_s,
        )
        self._orphan(claim, lapse)

    def _drop_claim(self, event: Event, host: str, device_id: str, epoch: int) -> Claim | None:
        old = self.devices.get(device_key(host, device_id))
        claims = () if old is None else tuple(c for c in old.claims if c.epoch != epoch)
        self._device(event, host, device_id, claims=claims)
        return None if old is None else old.claim(epoch)

    def _orphan(self, claim: Claim | None, lapse: Lapse) -> None:
        """Note that a job lost the claim it lives under; the scheduler ends it or queues it again."""
        job = None if claim is None else self.jobs.get(claim.job)
        if claim is None or job is None or job.ended or job.phase is Phase.WAITING:
            return
        if job.phase is Phase.ROUTED:
            lives_under_it = job.route is not None and job.route.seq == claim.route_seq
        else:
            lives_under_it = job.epoch == claim.epoch
        if lives_under_it:
            self.lapses[job.id] = lapse

    def on_registered(self, event: Event, fact: runtime_facts.Registered) -> None:
        self._runtime(
            event.seq,
            fact.host,
            fact.runtime,
            provider=fact.provider,
            url=fact.url,
            devices=fact.devices,
            loads_models=fact.loads_models,
            pull=fact.pull,
        )

    def on_health_changed(self, event: Event, fact: runtime_facts.HealthChanged) -> None:
        changes: dict[str, Any] = {"suspect": fact.suspect}
        if fact.suspect is None:
            changes |= {"suspect_model": "", "suspect_device": ""}
        self._runtime(
            event.seq,
            fact.host,
            fact.runtime,
            healthy=fact.healthy,
            models=fact.models,
            detail=fact.detail,
            **changes,
        )

    def on_model_loaded(self, event: Event, fact: runtime_facts.ModelLoaded) -> None:
        self._runtime(event.seq, fact.host, fact.runtime)

    def on_suspect(self, event: Event, fact: runtime_facts.Suspect) -> None:
        self._runtime(
            event.seq,
            fact.host,
            fact.runtime,
            suspect=why_suspect(fact),
            suspect_model=fact.model,
            suspect_device=fact.device,
        )

    def on_joined(self, event: Event, fact: host_facts.Joined) -> None:
        self._host(
            fact.host,
            seq=event.seq,
            instance_id=fact.instance_id,
            boot_id=fact.boot_id,
            version=fact.version,
            joined_ns=event.stored.stored_ns,
            joined_seq=event.seq,
            left=False,
            devices=fact.devices,
            runtimes=fact.runtimes,
        )

    def on_left(self, event: Event, fact: host_facts.Left) -> None:
        del event
        known = self.hosts.get(fact.host)
        if known is None or known.instance_id == fact.instance_id:
            # The goodbye of an earlier instance says nothing about the one that speaks for the host now.
            self._host(fact.host, left=True)

    def on_leader_elected(self, event: Event, fact: site_facts.LeaderElected) -> None:
        del event
        self.leader = fact.instance_id

    def on_command_refused(self, event: Event, fact: site_facts.CommandRefused) -> None:
        del event
        self.commands.pop(fact.command_seq, None)

    def on_cancel(self, event: Event, fact: operator_facts.Cancel) -> None:
        self._command(event, job=fact.job, reason=fact.reason)

    def on_unreadable(self, event: Event, fact: Unreadable) -> None:
        self.unreadable += 1
        self._command(event, job=None, reason="", problem=fact.problem)

    def on_unknown(self, event: Event, fact: Unknown) -> None:
        self.unknown += 1
        self._command(event, job=None, reason="", problem=f"unknown command {fact.type!r}")

    def _command(self, event: Event, *, job: str | None, reason: str, problem: str = "") -> None:
        stored = event.stored
        if not stored.subject.startswith(COMMAND_PREFIX):
            return
        given = stored.subject[len(COMMAND_PREFIX) :]
        actor = cleaned_token(given)
        if actor != given:
            job, problem = None, f"the actor's name must be {TOKEN_RULE}; shown as {actor}"
        self.commands[event.seq] = Command(event.seq, stored.stored_ns, actor, _id_of(event), job, reason, problem)

    # --- storing

    def state(self) -> SiteState:
        """What a snapshot holds."""
        return SiteState(
            seq=self.seq,
            stored_ns=self.stored_ns,
            retention=self.retention,
            jobs=list(self.jobs.values()),
            ended=list(self._ended),
            devices=list(self.devices.values()),
            hosts=list(self.hosts.values()),
            submissions=list(self.submissions.values()),
            commands=list(self.commands.values()),
            lapses=dict(self.lapses),
            leader=self.leader,
            forgotten=self.forgotten,
            unknown=self.unknown,
            unreadable=self.unreadable,
        )

    @classmethod
    def restore(cls, state: SiteState) -> Site:
        """The site that ``state`` was taken from."""
        site = cls(state.retention)
        site.seq = state.seq
        site.stored_ns = state.stored_ns
        site.devices = {device.key: device for device in state.devices}
        site.hosts = {host.name: host for host in state.hosts}
        site.submissions = {waiting.seq: waiting for waiting in state.submissions}
        site.commands = {command.seq: command for command in state.commands}
        site.lapses = dict(state.lapses)
        site.leader = state.leader
        site.forgotten = state.forgotten
        site.unknown = state.unknown
        site.unreadable = state.unreadable
        site._ended = deque(state.ended)
        site.jobs = {job.id: job for job in state.jobs}
        live = [job for job in state.jobs if not job.ended]
        site.live = {job.id: None for job in live}
        # What was sent to a device is listed in the order in which it was sent.
        for job in sorted(live, key=lambda job: 0 if job.route is None else job.route.seq):
            site._index(job)
        return site


def _id_of(event: Event) -> str:
    return "" if event.envelope is None else event.envelope.id


#: Fact -> method. A fact that no projection needs is simply not here.
_HANDLERS: dict[type, Callable[[Site, Event, Any], None]] = {
    Submitted: Site.on_submitted,
    Unreadable: Site.on_unreadable,
    Unknown: Site.on_unknown,
    operator_facts.Cancel: Site.on_cancel,
    job_facts.Accepted: Site.on_accepted,
    job_facts.Rejected: Site.on_rejected,
    job_facts.Resubmitted: Site.on_resubmitted,
    job_facts.Waiting: Site.on_waiting,
    job_facts.Admitted: Site.on_admitted,
    job_facts.Denied: Site.on_denied,
    job_facts.PlacementVerified: Site.on_placement_verified,
    job_facts.PlacementFailed: Site.on_note,
    job_facts.Started: Site.on_started,
    job_facts.Progress: Site.on_progress,
    job_facts.CancelRequested: Site.on_cancel_requested,
    job_facts.Succeeded: Site.on_succeeded,
    job_facts.Failed: Site.on_failed,
    job_facts.Cancelled: Site.on_cancelled,
    job_facts.Preempted: Site.on_preempted,
    job_facts.Expired: Site.on_expired,
    job_facts.Unroutable: Site.on_unroutable,
    job_facts.Lost: Site.on_lost,
    job_facts.LateResult: Site.on_note,
    route_facts.Routed: Site.on_routed,
    route_facts.Unrouted: Site.on_unrouted,
    device_facts.Appeared: Site.on_appeared,
    device_facts.Changed: Site.on_changed,
    device_facts.Claimed: Site.on_claimed,
    device_facts.Released: Site.on_released,
    device_facts.ClaimLapsed: Site.on_claim_lapsed,
    runtime_facts.Registered: Site.on_registered,
    runtime_facts.HealthChanged: Site.on_health_changed,
    runtime_facts.ModelLoaded: Site.on_model_loaded,
    runtime_facts.Suspect: Site.on_suspect,
    host_facts.Joined: Site.on_joined,
    host_facts.Left: Site.on_left,
    site_facts.LeaderElected: Site.on_leader_elected,
    site_facts.CommandRefused: Site.on_command_refused,
}
