"""What one agent must know of the log: routes sent to its host, and the claims on its devices."""

from __future__ import annotations

import msgspec

from gpukeeper.events import device as device_facts
from gpukeeper.events import host as host_facts
from gpukeeper.events import route as route_facts
from gpukeeper.events.codec import Event
from gpukeeper.events.job import Clocks
from gpukeeper.projections.device import Claim, device_key
from gpukeeper.projections.site import Site


class PendingRoute(msgspec.Struct, frozen=True, kw_only=True):
    """A job that was sent here and that nobody claimed yet."""

    seq: int
    job: str
    device: str
    runtime: str
    submission_seq: int
    job_seq: int
    attempt: int
    clocks: Clocks


class HostView:
    """Folds the subjects that an agent follows. Start it from a site's snapshot, or empty from sequence 1."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.seq = 0
        #: Instance of the agent that joined last.
        self.instance_id = ""
        self.host_seq = 0
        self.routes: dict[str, PendingRoute] = {}
        self.claims: dict[str, dict[int, Claim]] = {}
        #: Last sequence of each device's and runtime's subject.
        self.device_seq: dict[str, int] = {}
        self.runtime_seq: dict[str, int] = {}

    @classmethod
    def from_site(cls, site: Site, host: str) -> HostView:
        view = cls(host)
        view.seq = site.seq
        known = site.hosts.get(host)
        if known is not None:
            view.instance_id = known.instance_id
            view.host_seq = known.seq
            view.runtime_seq = {runtime.name: runtime.seq for runtime in known.registry}
        for device in site.devices.values():
            if device.host != host:
                continue
            view.device_seq[device.id] = device.seq
            view.claims[device.id] = {claim.epoch: claim for claim in device.claims}
            for job_id in site.routed.get(device_key(host, device.id), ()):
                job = site.jobs[job_id]
                assert job.route is not None
                assert job.clocks is not None
                view.routes[job_id] = PendingRoute(
                    seq=job.route.seq,
                    job=job_id,
                    device=device.id,
                    runtime=job.route.runtime,
                    submission_seq=job.submission_seq,
                    job_seq=job.seq,
                    attempt=job.attempt,
                    clocks=job.clocks,
                )
        return view

    def apply(self, event: Event) -> None:
        """Fold one event of a followed subject; an event at or below :attr:`seq` changes nothing."""
        if event.seq <= self.seq:
            return
        self.seq = event.seq
        fact = event.data
        if isinstance(fact, route_facts.Routed):
            self.routes[fact.job] = PendingRoute(
                seq=event.seq,
                job=fact.job,
                device=fact.device,
                runtime=fact.runtime,
                submission_seq=fact.submission_seq,
                job_seq=fact.job_seq,
                attempt=fact.attempt,
                clocks=fact.clocks,
            )
        elif isinstance(fact, route_facts.Unrouted):
            pending = self.routes.get(fact.job)
            if pending is not None and pending.seq == fact.route_seq:
                del self.routes[fact.job]
        elif isinstance(fact, host_facts.Joined):
            self.host_seq = event.seq
            self.instance_id = fact.instance_id
        elif isinstance(fact, host_facts.Left):
            self.host_seq = event.seq
        else:
            self._apply_to_device(event)

    def _apply_to_device(self, event: Event) -> None:
        subject = event.stored.subject.split(".")
        aggregate, name = subject[2], subject[-1]
        if aggregate == "runtime":
            self.runtime_seq[name] = event.seq
            return
        if aggregate != "device":
            return
        self.device_seq[name] = event.seq
        fact = event.data
        claims = self.claims.setdefault(name, {})
        if isinstance(fact, device_facts.Claimed):
            claims[event.seq] = Claim(
                epoch=event.seq,
                job=fact.job,
                attempt=fact.attempt,
                slot=fact.slot,
                route_seq=fact.route_seq,
                boot_id=fact.boot_id,
                instance_id=fact.instance_id,
                claimed_ns=event.stored.stored_ns,
            )
            pending = self.routes.get(fact.job)
            if pending is not None and pending.seq == fact.route_seq:
                del self.routes[fact.job]
        elif isinstance(fact, device_facts.Released | device_facts.ClaimLapsed):
            claims.pop(fact.epoch, None)
