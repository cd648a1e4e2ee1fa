"""The site: every projection that decisions rest on, folded in one pass over the whole log."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
from msgspec.structs import replace

from gpukeeper.events.codec import Event, Unreadable
from gpukeeper.events.fact import Fact
from gpukeeper.events.log import Stored
from gpukeeper.events.subjects import EVENT_PREFIX
from gpukeeper.projections.device import Device, Lapse, device_key
from gpukeeper.projections.folding.handlers import HANDLERS
from gpukeeper.projections.home import is_at_home
from gpukeeper.projections.host import Host, Runtime
from gpukeeper.projections.job import Job, Phase, RouteSeq
from gpukeeper.projections.learned import Learned, LearnedLoad
from gpukeeper.projections.queue import Queue
from gpukeeper.projections.unanswered import Command, Waiting


class Retention(msgspec.Struct, frozen=True, array_like=True):
    """How long ended jobs stay in memory, in event time and number. The log has them for ever."""

    after_s: float = 86_400.0
    above: int = 100_000


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
    learned: list[LearnedLoad]


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
        #: What models took when they were loaded.
        self.learned = Learned()
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
        handler = HANDLERS.get(type(data))
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
                    self.change_runtime(stored.seq, host, name)
            case "host", [host]:
                known = self.hosts.get(host)
                if known is not None and known.seq < stored.seq:
                    self.change_host(host, seq=stored.seq)
            case _:
                pass

    def change_job(self, job_id: str, **changes: Any) -> Job | None:
        """Replace a job that has not ended, keeping the derived indexes in step. Ends are final."""
        old = self.jobs.get(job_id)
        if old is None or old.ended:
            return None
        new = replace(old, **changes)
        if old.phase is not new.phase:
            if old.phase is Phase.WAITING:
                self.queue.remove(old)
            elif old.phase is Phase.ROUTED:
                self.unlist(old)
        self.jobs[job_id] = new
        if old.phase is not new.phase:
            self.index(new)
        return new

    def index(self, job: Job) -> None:
        if job.phase is Phase.WAITING:
            self.queue.add(job)
        elif job.phase is Phase.ROUTED and job.route is not None:
            for name in job.route.devices:
                key = device_key(job.route.host, name)
                device = self.devices.get(key)
                claimed = device is not None and device.follows_route(job.id, job.route.seq)
                if not claimed and job.id not in self.lapses:
                    self.routed.setdefault(key, {})[job.id] = None
        if job.ended:
            self.live.pop(job.id, None)
        else:
            self.live[job.id] = None

    def unlist(self, job: Job, device_id: str | None = None) -> None:
        """It is promised no slot any more: on this device, or on all that its route names."""
        if job.route is not None:
            for name in job.route.devices if device_id is None else (device_id,):
                waiting = self.routed.get(device_key(job.route.host, name))
                if waiting is not None:
                    waiting.pop(job.id, None)

    def to_queue(self, event: Event, job_id: str, **changes: Any) -> None:
        """Back into the queue: whatever claim or route it had is over."""
        self.change_job(
            job_id, phase=Phase.WAITING, since_ns=event.stored.stored_ns, route=None, epoch=0, slot=0, **changes
        )
        self.lapses.pop(job_id, None)

    def end_job(self, event: Event, job_id: str, phase: Phase, reason: str, detail: str) -> None:
        ended = self.change_job(
            job_id, phase=phase, seq=event.seq, since_ns=event.stored.stored_ns, reason=reason, detail=detail
        )
        if ended is None:
            # A second end cannot be stored while its writer names the right sequence; it is not applied here either.
            return
        self.lapses.pop(job_id, None)
        self.note_end(job_id, event.stored.stored_ns)

    def note_end(self, job_id: str, ended_ns: int) -> None:
        """It will be forgotten, in its turn."""
        self._ended.append(Ended(job_id, ended_ns))
        self._forget()

    def _forget(self) -> None:
        oldest_ns = self.stored_ns - int(self.retention.after_s * 1e9)
        while self._ended and (len(self._ended) > self.retention.above or self._ended[0].ended_ns < oldest_ns):
            gone = self._ended.popleft()
            self.jobs.pop(gone.job, None)
            self.forgotten += 1

    def change_device(self, event: Event, host: str, device_id: str, **changes: Any) -> Device:
        key = device_key(host, device_id)
        old = self.devices.get(key) or Device(host=host, id=device_id, seq=0)
        new = replace(old, seq=event.seq, **changes)
        self.devices[key] = new
        return new

    def change_host(self, name: str, **changes: Any) -> Host:
        old = self.hosts.get(name) or Host(name=name, seq=0)
        new = replace(old, **changes)
        self.hosts[name] = new
        return new

    def change_runtime(self, seq: int, host: str, name: str, **changes: Any) -> None:
        known = self.hosts.get(host) or Host(name=host, seq=0)
        old = known.runtime(name) or Runtime(name=name, seq=0)
        new = replace(old, seq=seq, **changes)
        others = tuple(r for r in known.registry if r.name != name)
        self.change_host(host, registry=tuple(sorted((*others, new), key=lambda r: r.name)))

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
            learned=self.learned.state(),
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
        site.learned = Learned(state.learned)
        site._ended = deque(state.ended)
        site.jobs = {job.id: job for job in state.jobs}
        live = [job for job in state.jobs if not job.ended]
        site.live = {job.id: None for job in live}
        # What was sent to a device is listed in the order in which it was sent.
        for job in sorted(live, key=lambda job: 0 if job.route is None else job.route.seq):
            site.index(job)
        return site
