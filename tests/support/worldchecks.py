"""The rules of device authority, stated once more: from the facts and the truth of a world, not the agent's code."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import datetime

import msgspec

from gpukeeper.agents.attempt import Attempt
from gpukeeper.events import device as device_facts
from gpukeeper.events import job as job_facts
from gpukeeper.events import runtime as runtime_facts
from gpukeeper.events.codec import Event
from gpukeeper.events.instants import parse_utc
from gpukeeper.events.readings import DeviceReading, RuntimeReading
from support.world import WorldCard, WorldRuntime
from support.worldhost import HEARTBEAT_S, Host

#: As the surveyor registers it: three heartbeats.
GAP_MAX_S = 3 * HEARTBEAT_S
#: What is stored while a request is on its way to the log may be known to the log before it is to the agent.
_IN_THE_AIR_S = 0.02
#: A load rests on a reading that is not older than this, nor than a reading and an append take.
_FRESH_S = 3.0


class Grant(msgspec.Struct, kw_only=True):
    """Memory that was given to a claim."""

    device: str
    mb: int
    #: When its load was over, however it ended.
    loaded_at: datetime | None = None


class _Op(msgspec.Struct):
    """A load or a release under way, and where it changes what is held."""

    kind: str
    runtime: str
    devices: frozenset[str]
    #: Of a release: it is under way until its end is told.
    generation: int | None = None


class Checks:
    """Watches one world. What is broken stands in ``host.broken``."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.grants: dict[int, Grant] = {}
        self.ops: list[_Op] = []
        #: The claim for which each runtime loads.
        self.loading: dict[str, int] = {}
        #: Releases in the log without an end: by generation.
        self.open: dict[int, device_facts.ReclaimRequested] = {}
        self.requested: set[int] = set()
        #: What each claim asked for, by (epoch, runtime, model).
        self._asked: set[tuple[int, str, str | None]] = set()
        self.pins: dict[str, dict[str | None, float]] = {}
        self.drained: dict[str, float] = {}
        #: Blocked devices: since when, and what was free then, before anything had been yielded.
        self.blocked: dict[str, tuple[float, int]] = {}
        #: What each device showed to be free at the end of its last release.
        self._shown_mb: dict[str, int] = {}
        self.counts: dict[str, int] = {}
        self._seen = 0
        for runtime in host.runtimes:
            runtime.watcher = self

    def broke(self, words: str) -> None:
        self.host.broken.append(f"{asyncio.get_running_loop().time():.3f} s: {words}")

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def agent_is_gone(self) -> None:
        """What it had under way is nobody's; what it had granted ends with its claims."""
        self.ops.clear()
        for grant in self.grants.values():
            grant.loaded_at = grant.loaded_at or self.host.moment()

    # --- the log

    async def follow(self) -> None:
        await self.host.log.follow(lambda _: self.catch_up(), after=0)

    def catch_up(self) -> None:
        """Take in what was stored since."""
        for event in self.host.events[self._seen :]:
            self._on_event(event)
        self._seen = len(self.host.events)

    def _on_event(self, event: Event) -> None:
        fact, now_s = event.data, asyncio.get_running_loop().time()
        match fact:
            case runtime_facts.Pinned():
                self.pins.setdefault(fact.runtime, {})[fact.model] = now_s
            case runtime_facts.Unpinned():
                self.pins.get(fact.runtime, {}).pop(fact.model, None)
            case device_facts.Drained():
                self.drained[fact.device] = now_s
            case device_facts.Resumed():
                self.drained.pop(fact.device, None)
                self.blocked.pop(fact.device, None)
            case device_facts.Appeared():
                self.blocked.pop(fact.device, None)
            case device_facts.Changed(state="blocked"):
                self.blocked.setdefault(fact.device, (now_s, self._shown_mb.get(fact.device, 0)))
                self.count("blocked")
            case device_facts.Changed():
                self.blocked.pop(fact.device, None)
            case device_facts.ReclaimRequested():
                self.open[event.seq] = fact
            case device_facts.Reclaimed() | device_facts.ReclaimFailed():
                self.count(type(fact).__name__)
                requested = self.open.pop(fact.generation, None)
                if requested is None:
                    self.broke(f"{type(fact).__name__} of generation {fact.generation}, which is not open")
                self.ops = [op for op in self.ops if op.generation != fact.generation]
                self._shown_mb[fact.device] = fact.free_mb or 0
                if isinstance(fact, device_facts.Reclaimed) and requested is not None:
                    self._check_measured(fact, requested.need_mb)
            case job_facts.Admitted():
                self._admitted(fact)
            case job_facts.PlacementVerified() if fact.epoch in self.grants:
                # It found its model there, brought in by somebody else.
                if self.grants[fact.epoch].loaded_at is None:
                    del self.grants[fact.epoch]
            case device_facts.Released() | device_facts.ClaimLapsed() if fact.epoch in self.grants:
                if self.grants[fact.epoch].loaded_at is None:
                    del self.grants[fact.epoch]
            case _:
                pass

    def _check_measured(self, fact: device_facts.Reclaimed, wanted_mb: int | None) -> None:
        """A release is done where enough is free, or the device shows at least half of what was promised."""
        enough = wanted_mb is not None and fact.free_mb >= wanted_mb
        if not enough and not 0 < fact.measured_mb * 2 >= (fact.promised_mb or 0):
            self.broke(f"{fact.measured_mb} MB of {fact.promised_mb} MB count as taken back from {fact.runtime}")

    def _admitted(self, fact: job_facts.Admitted) -> None:
        """Invariant 2, on the reading that it was decided on."""
        reading, now_s = fact.reading, asyncio.get_running_loop().time()
        self.count("admitted resident" if fact.resident else "admitted")
        card = self.host.inventory.cards[fact.device]
        if reading is None or reading.state != "healthy" or reading.free_mb is None or reading.total_mb is None:
            self.broke(f"{fact.job} was admitted on a reading without figures")
            return
        if not any(given.reading == reading for given in card.given):
            self.broke(f"{fact.job} was admitted on a reading that nobody gave")
        if now_s - self.drained.get(fact.device, now_s) > _IN_THE_AIR_S:
            self.broke(f"{fact.job} was admitted on {fact.device}, which is out of service")
        if self._is_blocked(card):
            self.broke(f"{fact.job} was admitted on {fact.device}, which is blocked")
        if fact.resident:
            return
        if fact.need_mb is None:
            self.broke(f"{fact.job} was admitted though nobody knows its need")
            return
        would_free_mb = sum(each.held_mb or 0 for each in fact.considered if each.kept is None)
        promised_mb = self._promised_mb(reading, but=fact.epoch)
        if fact.need_mb + promised_mb + card.device.headroom_mb > reading.free_mb + would_free_mb:
            self.broke(
                f"{fact.job} needs {fact.need_mb} MB, others were promised {promised_mb} MB, and {reading.free_mb} MB "
                f"of {fact.device} were free ({would_free_mb} MB more after releases)"
            )
        if fact.usable_mb is None or fact.usable_mb > reading.free_mb - promised_mb - card.device.headroom_mb:
            self.broke(
                f"{fact.job}: {fact.usable_mb} MB are not usable of {reading.free_mb} MB, {promised_mb} promised"
            )
        self.grants[fact.epoch] = Grant(device=fact.device, mb=fact.need_mb)

    def _is_blocked(self, card: WorldCard) -> bool:
        """Whether no reading has shown since that anything was yielded."""
        since_s, free_mb = self.blocked.get(card.device.id, (0.0, None))
        if free_mb is None:
            return False
        shown = [g.reading for g in card.given if g.there_s >= since_s and isinstance(g.reading, DeviceReading)]
        return not any(reading.free_mb is not None and reading.free_mb > free_mb for reading in shown)

    def _promised_mb(self, reading: DeviceReading, *, but: int) -> int:
        """What others were given that the reading cannot show."""
        at = parse_utc(reading.read_at)
        return sum(
            grant.mb
            for epoch, grant in self.grants.items()
            if epoch != but and grant.device == reading.device and (grant.loaded_at is None or at <= grant.loaded_at)
        )

    # --- what runtimes are asked

    def load_asked(self, runtime: WorldRuntime, model: str) -> None:
        self.count("load")
        now_s = asyncio.get_running_loop().time()
        self._begin_op(_Op("load", runtime.name, frozenset(card.device.id for card in runtime.cards)))
        loaders = [each for each in self._attempts(runtime.name) if each.phase == "loading"]
        if len(loaders) != 1:
            self.broke(f"a load of {model} on {runtime.name} belongs to {len(loaders)} jobs")
            return
        (attempt,) = loaders
        self.loading[runtime.name] = attempt.epoch
        device = attempt.slot.device
        if device.id in self.host.agent.room.blocked:
            self.broke(f"{model} is loaded on {device.id}, which is blocked")
        card = self.host.inventory.cards[device.id]
        grant = self.grants.get(attempt.epoch)
        if grant is None:
            self.broke(f"{model} is loaded for {attempt.route.job}, which was granted nothing")
            return
        fresh = [
            given.reading
            for given in card.given
            if isinstance(given.reading, DeviceReading) and given.there_s >= now_s - _FRESH_S
        ]
        if not any(self._fits(reading, grant, attempt.epoch, card) for reading in fresh):
            shown = [reading.free_mb for reading in fresh]
            self.broke(f"{model} needs {grant.mb} MB on {device.id}, whose newest readings show {shown} MB")

    def _fits(self, reading: DeviceReading, grant: Grant, epoch: int, card: WorldCard) -> bool:
        if reading.free_mb is None:
            return False
        at = parse_utc(reading.read_at)
        over = {each.epoch for each in self.host.agent.attempts.values() if each.released}
        promised_mb = sum(
            other.mb
            for number, other in self.grants.items()
            if number != epoch
            and other.device == reading.device
            and (at <= other.loaded_at if other.loaded_at is not None else number < epoch and number not in over)
        )
        return grant.mb + promised_mb + card.device.headroom_mb <= reading.free_mb

    def load_over(self, runtime: WorldRuntime) -> None:
        self.ops = [op for op in self.ops if (op.kind, op.runtime) != ("load", runtime.name)]
        grant = self.grants.get(self.loading.pop(runtime.name, 0))
        if grant is not None:
            grant.loaded_at = self.host.moment()

    def release_asked(self, runtime: WorldRuntime, model: str | None) -> None:
        """Invariant 5."""
        self.count("release")
        name, label = runtime.name, f"a release of {runtime.name}/{model}"
        found = [
            (seq, fact)
            for seq, fact in self.open.items()
            if (fact.runtime, fact.model) == (name, model) and seq not in self.requested
        ]
        fact = None
        generation = None
        if found:
            generation, fact = found[0]
            self.requested.add(generation)
            self._check_evidence(runtime, fact, label)
        elif not any(
            each.phase == "running" and self.host.site.jobs[each.route.job].ended for each in self._attempts(name)
        ):
            self.broke(f"{label} stands nowhere in the log")
        self._begin_op(_Op("release", name, frozenset(c.device.id for c in runtime.sits.values()), generation))
        now_s = asyncio.get_running_loop().time()
        for pin, since_s in self.pins.get(name, {}).items():
            if (pin is None or model is None or pin == model) and now_s - since_s > _IN_THE_AIR_S:
                self.broke(f"{label}, which is pinned")
        if any(row.pinned and model in (None, row.model) for row in self._newest_look(runtime).resident or ()):
            self.broke(f"{label}, which the runtime itself keeps")
        asker = None if fact is None else fact.job
        for each in self.host.agent.attempts.values():
            if fact is None or each.route.job != asker:
                continue
            if each.stop_reason is not None:
                self.broke(f"{label} for {asker}, which was told to stop ({each.stop_reason})")
            if (each.epoch, name, model) in self._asked:
                self.broke(f"{label} for {asker}, which asked for it before")
            self._asked.add((each.epoch, name, model))
        others = [
            each.route.job
            for each in self._attempts(name)
            if each.route.job != asker and not (fact is None and self.host.site.jobs[each.route.job].ended)
        ]
        if others:
            self.broke(f"{label}, where {', '.join(others)} is or comes")
        if runtime.loading or runtime.working:
            self.broke(f"{label}, which works for us")

    def _check_evidence(self, runtime: WorldRuntime, fact: device_facts.ReclaimRequested, label: str) -> None:
        if fact.device not in {card.device.id for card in runtime.cards}:
            self.broke(f"{label} for {fact.device}, which it cannot use")
        card = self.host.inventory.cards[fact.device]
        shown = [given.reading for given in card.given[-20:] if isinstance(given.reading, DeviceReading)]
        if not any(use.container == runtime.name and use.used_mb for each in shown for use in each.processes or ()):
            self.broke(f"{label} for {fact.device}, where nothing of it was seen")
        now, loop_s = self.host.moment(), asyncio.get_running_loop().time()
        looks = sorted((g for g in runtime.given if g.there_s <= loop_s), key=lambda g: g.begun_at)
        grace_s = runtime.config.idle_grace_s or 0.0
        newest: datetime | None = None
        since: datetime | None = None
        for given in reversed(looks):
            look = given.reading
            assert isinstance(look, RuntimeReading)
            later = since or now
            if not look.healthy or look.activity != "idle" or (later - given.begun_at).total_seconds() > GAP_MAX_S:
                break
            newest = newest or given.begun_at
            since = given.begun_at
        if newest is None or since is None or (newest - since).total_seconds() < grace_s:
            self.broke(f"{label}, which was not seen to be idle for its {grace_s:g} s")
            return
        began_s = (newest - now).total_seconds() + loop_s - grace_s
        if runtime.worked_s > began_s:
            self.broke(f"{label}, which worked for us {loop_s - runtime.worked_s:.1f} s ago")

    @staticmethod
    def _newest_look(runtime: WorldRuntime) -> RuntimeReading:
        """Of those that were there."""
        newest = max(runtime.given, key=lambda given: given.begun_at).reading
        assert isinstance(newest, RuntimeReading)
        return newest

    def release_over(self, runtime: WorldRuntime) -> None:
        self.ops = [
            op for op in self.ops if not (op.kind == "release" and op.runtime == runtime.name and op.generation is None)
        ]

    def run_asked(self, runtime: WorldRuntime, model: str) -> None:
        self.count("run")
        if any(op.kind == "release" and op.runtime == runtime.name for op in self.ops):
            self.broke(f"a run of {model} on {runtime.name}, which is letting go")
        if model not in runtime.sits and model not in runtime.went_by_itself:
            self.broke(f"a run of {model} on {runtime.name}, which does not hold it")

    def _attempts(self, runtime: str) -> list[Attempt]:
        return [
            each
            for each in self.host.agent.attempts.values()
            if each.provider.config.name == runtime and each.epoch and not each.released
        ]

    def _begin_op(self, op: _Op) -> None:
        for other in self.ops:
            if other.devices & op.devices:
                self.broke(f"{op.kind} on {op.runtime} beside {other.kind} on {other.runtime}: {other.devices}")
        self.ops.append(op)

    # --- at the end

    def at_rest(self) -> None:
        """Everything has been given back."""
        room = self.host.agent.room
        for generation, fact in self.open.items():
            self.broke(f"the release of {fact.runtime} (generation {generation}) was never told the end of")
        if self.host.agent.attempts:
            self.broke(f"attempts are left: {[a.route.job for a in self.host.agent.attempts.values()]}")
        for card in self.host.cards:
            free = 0
            while room.take_slot(card.device.id) is not None:
                free += 1
            if free != card.device.slots:
                self.broke(f"{card.device.slots - free} slot(s) of {card.device.id} are never given back")
            if room.turns.taken(card.device.id):
                self.broke(f"the turn of {card.device.id} is never given back")
        for runtime in self.host.runtimes:
            if room.tenancy.jobs(runtime.name) or room.tenancy.is_releasing(runtime.name):
                self.broke(f"{runtime.name} is in use for ever")
            if room.tenancy.working(runtime.name):
                self.broke(f"{runtime.name} works for ever")
        if any(not each.released for each in room.ledger.reservations):
            self.broke(f"memory is promised for ever: {room.ledger.reservations}")


def jobs_left(host: Host) -> Iterable[str]:
    """Jobs that are neither ended nor in the queue."""
    return [
        f"{job} is {known.phase}"
        for job in host.jobs
        if not (known := host.site.jobs[job]).ended and known.phase not in ("waiting", "routed")
    ]
