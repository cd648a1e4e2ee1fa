"""What one agent must know of the log: routes sent to its host, and the claims on its devices."""

from __future__ import annotations

import msgspec

from gpukeeper.events import device as device_facts
from gpukeeper.events import host as host_facts
from gpukeeper.events import route as route_facts
from gpukeeper.events import runtime as runtime_facts
from gpukeeper.events.codec import Event
from gpukeeper.events.job import Clocks
from gpukeeper.projections.device import (
    Claim,
    OpenRelease,
    ReclaimWish,
    device_key,
    open_release,
    reclaim_wish,
    why_drained,
)
from gpukeeper.projections.home import is_at_home
from gpukeeper.projections.host import ActWish, Suspicion, act_wish, pin_of, why_suspect
from gpukeeper.projections.learned import Learned
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
    #: Further devices, to be claimed after ``device`` in this order, or none of them.
    more_devices: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        """All of its devices, in the order in which they are claimed."""
        return (self.device, *self.more_devices)


class HostView:
    """Folds the subjects that an agent follows. Start it from a site's snapshot, or empty from sequence 1."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.seq = 0
        #: Instance of the agent that joined last, and when.
        self.instance_id = ""
        self.joined_seq = 0
        self.host_seq = 0
        #: Routes that nobody has claimed, by job, in the order in which they were sent.
        self.routes: dict[str, PendingRoute] = {}
        self.claims: dict[str, dict[int, Claim]] = {}
        #: Last sequence of each device's and runtime's subject.
        self.device_seq: dict[str, int] = {}
        self.runtime_seq: dict[str, int] = {}
        #: Runtimes whose last placement check failed.
        self.suspects: dict[str, Suspicion] = {}
        #: What stays until it is unpinned, by runtime: see :func:`gpukeeper.projections.host.is_pinned`.
        self.pins: dict[str, tuple[str, ...]] = {}
        #: Devices that somebody took out of service, and why.
        self.drained: dict[str, str] = {}
        #: What models took when they were loaded here.
        self.learned = Learned()
        #: When each device was put back into service last.
        self.resumed: dict[str, int] = {}
        #: Wishes of operators that this host has not answered, by sequence, with the device or runtime.
        self.reclaim_wishes: dict[int, tuple[str, ReclaimWish]] = {}
        self.act_wishes: dict[int, tuple[str, ActWish]] = {}
        #: Releases that this host was told to have begun and not to have ended, with the device.
        self.releases: dict[int, tuple[str, OpenRelease]] = {}

    @classmethod
    def from_site(cls, site: Site, host: str) -> HostView:
        """What folding the followed subjects from 1 gives, without the routes of jobs that have moved on since."""
        view = cls(host)
        view.seq = site.seq
        known = site.hosts.get(host)
        if known is not None:
            view.instance_id = known.instance_id
            view.joined_seq = known.joined_seq
            view.host_seq = known.seq
            view.runtime_seq = {runtime.name: runtime.seq for runtime in known.registry}
            suspects = {runtime.name: runtime.suspicion for runtime in known.registry}
            view.pins = {runtime.name: runtime.pins for runtime in known.registry if runtime.pins}
            view.act_wishes = {wish.seq: (runtime.name, wish) for runtime in known.registry for wish in runtime.wishes}
            view.suspects = {name: suspicion for name, suspicion in suspects.items() if suspicion is not None}
        view.learned = Learned(site.learned.state(host))
        routes: list[PendingRoute] = []
        for device in site.devices.values():
            if device.host != host:
                continue
            view.device_seq[device.id] = device.seq
            if device.drained is not None:
                view.drained[device.id] = device.drained
            view.releases |= {each.seq: (device.id, each) for each in device.releases}
            view.reclaim_wishes |= {wish.seq: (device.id, wish) for wish in device.wishes}
            view.claims[device.id] = {claim.epoch: claim for claim in device.claims}
            for job_id in site.routed.get(device_key(host, device.id), ()):
                job = site.jobs[job_id]
                assert job.route is not None
                if job.route.device != device.id:
                    # It is listed under each of its devices; the first one's claim takes the route up.
                    continue
                assert job.clocks is not None
                routes.append(
                    PendingRoute(
                        seq=job.route.seq,
                        job=job_id,
                        device=device.id,
                        runtime=job.route.runtime,
                        submission_seq=job.submission_seq,
                        job_seq=job.route.job_seq,
                        attempt=job.attempt,
                        clocks=job.clocks,
                        more_devices=job.route.more_devices,
                    )
                )
        view.routes = {route.job: route for route in sorted(routes, key=lambda route: route.seq)}
        return view

    def apply(self, event: Event) -> None:
        """Fold one event of a followed subject; an event at or below :attr:`seq` changes nothing."""
        if event.seq <= self.seq:
            return
        self.seq = event.seq
        self._keep_up(event)
        if not is_at_home(event):
            return
        fact = event.data
        if isinstance(fact, route_facts.Routed):
            self.routes.pop(fact.job, None)
            self.routes[fact.job] = PendingRoute(
                seq=event.seq,
                job=fact.job,
                device=fact.device,
                runtime=fact.runtime,
                submission_seq=fact.submission_seq,
                job_seq=fact.job_seq,
                attempt=fact.attempt,
                clocks=fact.clocks,
                more_devices=fact.more_devices,
            )
        elif isinstance(fact, route_facts.Unrouted):
            pending = self.routes.get(fact.job)
            if pending is not None and pending.seq == fact.route_seq:
                del self.routes[fact.job]
        elif isinstance(fact, host_facts.Joined):
            self.instance_id = fact.instance_id
            self.joined_seq = event.seq
        elif isinstance(fact, runtime_facts.Suspect):
            self.suspects[fact.runtime] = Suspicion(fact.model, fact.device, why_suspect(fact))
        elif isinstance(fact, runtime_facts.HealthChanged):
            if fact.suspect is None:
                self.suspects.pop(fact.runtime, None)
        elif isinstance(fact, device_facts.Claimed):
            self.claims[fact.device][event.seq] = Claim(
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
            self.claims[fact.device].pop(fact.epoch, None)
        else:
            self._apply_wish(event.seq, fact)

    def _apply_wish(self, seq: int, fact: object) -> None:
        """What operators asked for, and what was answered."""
        match fact:
            case device_facts.Drained():
                self.drained[fact.device] = why_drained(fact)
            case device_facts.Resumed():
                self.drained.pop(fact.device, None)
                self.resumed[fact.device] = seq
            case device_facts.ReclaimWanted():
                self.reclaim_wishes[seq] = (fact.device, reclaim_wish(seq, fact))
            case device_facts.ReclaimRequested():
                self.releases[seq] = (fact.device, open_release(seq, fact))
            case device_facts.Reclaimed() | device_facts.ReclaimRefused() | device_facts.ReclaimFailed():
                more = not isinstance(fact, device_facts.ReclaimRefused) and fact.more
                if fact.wanted_seq is not None and not more:
                    self.reclaim_wishes.pop(fact.wanted_seq, None)
                if not isinstance(fact, device_facts.ReclaimRefused):
                    self.releases.pop(fact.generation, None)
            case runtime_facts.ModelLoaded():
                self.learned.apply(fact)
            case runtime_facts.Pinned():
                pins = self.pins.get(fact.runtime, ())
                self.pins[fact.runtime] = tuple(sorted({*pins, pin_of(fact.model)}))
            case runtime_facts.Unpinned():
                pins = tuple(pin for pin in self.pins.pop(fact.runtime, ()) if pin != pin_of(fact.model))
                if pins:
                    self.pins[fact.runtime] = pins
            case runtime_facts.ActWanted():
                self.act_wishes[seq] = (fact.runtime, act_wish(seq, fact))
            case runtime_facts.Acted():
                self.act_wishes.pop(fact.wanted_seq, None)
            case _:
                pass

    def _keep_up(self, event: Event) -> None:
        """Whatever an event says, the next append to its subject rests on its sequence."""
        match event.stored.subject.split(".")[2:]:
            case ["host", _]:
                self.host_seq = event.seq
            case ["device", _, name]:
                self.device_seq[name] = event.seq
                self.claims.setdefault(name, {})
            case ["runtime", _, name]:
                self.runtime_seq[name] = event.seq
            case _:
                pass
