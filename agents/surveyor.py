"""Looks at devices and runtimes, tells the log what changed, and sends heartbeats.

A heartbeat is sent on time with the newest finished look; a look that takes long never delays it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import structlog
from msgspec.structs import replace

from gpukeeper.agents.catalogue import told
from gpukeeper.agents.config import AgentConfig
from gpukeeper.agents.containers.standing import is_crash_looping
from gpukeeper.agents.placement import judge
from gpukeeper.agents.room import HostRoom
from gpukeeper.agents.runtimes.port import Provider, Signs
from gpukeeper.agents.stopping import StopProof
from gpukeeper.agents.writer import NotRecorded
from gpukeeper.capacity.device import Device
from gpukeeper.events import subjects
from gpukeeper.events.clock import new_id, now_rfc3339
from gpukeeper.events.codec import encode
from gpukeeper.events.device import Appeared, Changed
from gpukeeper.events.log import Appended, Log, Record
from gpukeeper.events.readings import ClaimBeat, DeviceReading, Heartbeat, ResidentModel, RuntimeReading
from gpukeeper.events.reasons import Reason
from gpukeeper.events.runtime import HealthChanged, Registered
from gpukeeper.projections.host import Suspicion

_log = structlog.get_logger("gpukeeper.surveyor")

#: How long a heartbeat waits for a look before it goes out with the one before.
_LOOK_WAIT_S = 2.0
#: A pause between two looks of more than so many heartbeats proves nothing about what was done in it.
_LOOKS_MISSED_MAX = 3.0


class Surveyor:
    """What this host's devices and runtimes are like now."""

    def __init__(
        self,
        room: HostRoom,
        config: AgentConfig,
        beats: Log,
        providers: Mapping[str, Provider],
        claims: Callable[[], Sequence[ClaimBeat]],
        on_lost: Callable[[str, str], None] = lambda _device, _why: None,
    ) -> None:
        self._room = room
        self._config = config
        self._beats = beats
        self._providers = providers
        self._claims = claims
        self._on_lost = on_lost
        self.devices: tuple[Device, ...] = ()
        self.readings: dict[str, DeviceReading] = {}
        self.looks: dict[str, RuntimeReading] = {}
        self._told_runtimes: dict[str, tuple[bool, tuple[str, ...] | None, str, bool]] = {}
        self._told_registry: dict[str, Registered] = {}
        self._told_problems: tuple[str, ...] = ()
        #: Of suspects that gave no progress: what looks have shown of their work since.
        self._stop_proofs: dict[str, tuple[Suspicion, StopProof]] = {}
        self._look: asyncio.Task[None] | None = None
        self.stopping = False

    async def announce(self) -> None:
        """Find the devices, look at everything once, and tell the log what this host is."""
        self.devices = await self._find()
        self.readings = await self._room.inventory.read_all()
        for device in self.devices:
            reading = self.readings.get(device.id)
            total_mb = None if reading is None else reading.total_mb
            limits = [each for each in (total_mb, device.limit_mb) if each is not None]
            appeared = Appeared(
                host=self._room.host,
                device=device.id,
                kind=device.kind,
                name=device.name,
                slots=device.slots,
                total_mb=min(limits) if limits else None,
                headroom_mb=device.headroom_mb,
                unschedulable=device.unschedulable,
                parent=device.parent,
            )
            await self._room.device_subject(device.id).append(appeared)
            self._room.told_states[device.id] = "healthy"
        for name in self._providers:
            await self._tell_registry(name)
        await self._survey()

    async def devices_changed(self) -> bool:
        """Find the devices again: whether they are others than those that were announced."""
        found = await self._find()
        return _as_announced(found) != _as_announced(self.devices)

    async def _find(self) -> tuple[Device, ...]:
        """The devices now. What is wrong with finding them is logged once, when it changes."""
        devices = await self._room.inventory.find()
        problems = tuple(self._room.inventory.problems())
        if problems != self._told_problems:
            self._told_problems = problems
            _log.warning("device_problems", problems="; ".join(problems) or "none any more")
        return devices

    def _register(self) -> None:
        """Every provider is an owner of memory from its first look on."""
        for provider in self._providers.values():
            self._room.tenancy.register(
                provider,
                grace_s=self._config.idle_grace_of(provider.config),
                gap_max_s=_LOOKS_MISSED_MAX * self._config.heartbeat_s,
            )

    async def _survey(self) -> None:
        """Look at every device and runtime at once, and tell the log what is another than before."""
        names = list(self._providers)
        self._register()
        suspects = dict(self._room.suspects)
        readings = {device: self._shown(one) for device, one in (await self._room.inventory.read_all()).items()}
        looks = await self._room.observer.look_at_all(readings)
        self.readings = readings
        self.looks = {name: looks[name] for name in names if name in looks}
        for device in self.devices:
            reading = readings.get(device.id)
            if reading is not None and reading.state == "lost":
                self._on_lost(device.id, reading.error or "the device is lost")
            await _as_far_as_it_goes(self._tell_device(device, reading))
        for name, look in self.looks.items():
            # A suspicion that came up meanwhile is about what this look may not have seen yet.
            suspicion = self._room.suspects.get(name)
            known = suspicion is not None and suspicion is suspects.get(name)
            cleared = known and suspicion is not None and await self._clears(name, look, suspicion)
            await _as_far_as_it_goes(self._tell_registry(name))
            await _as_far_as_it_goes(self._tell_runtime(name, look, cleared=cleared))

    def _shown(self, reading: DeviceReading) -> DeviceReading:
        """A device with an owner that did not let go is shown as blocked, with its figures."""
        block = self._room.still_blocked(reading)
        return reading if block is None else replace(reading, state="blocked", error=block.why)

    async def _tell_device(self, device: Device, reading: DeviceReading | None) -> None:
        # Once more: a device may have been blocked since it was read.
        reading = None if reading is None else self._shown(reading)
        state = "unknown" if reading is None else reading.state
        if self._room.told_states.get(device.id) == state:
            return
        detail = "" if reading is None or reading.error is None else reading.error
        changed = Changed(host=self._room.host, device=device.id, state=state, detail=detail, reading=reading)
        # Before it is stored: what a handoff tells meanwhile comes after it.
        self._room.told_states[device.id] = state
        try:
            await self._room.device_subject(device.id).append(changed)
        except NotRecorded:
            self._room.told_states.pop(device.id, None)
            raise
        _log.warning("device_changed", device=device.id, state=state, detail=detail)

    async def _tell_registry(self, name: str) -> None:
        """What the runtime can do shows only when it answers, for some: a llama.cpp server may be a router."""
        provider = self._providers[name]
        registered = Registered(
            host=self._room.host,
            runtime=name,
            provider=provider.config.provider,
            url=provider.config.url,
            devices=provider.config.devices,
            loads_models=provider.loads_models,
            releases=provider.releases,
            idle_grace_s=self._config.idle_grace_of(provider.config),
            container=provider.config.container,
            pull=provider.config.pull if provider.pulls else (),
        )
        if self._told_registry.get(name) == registered:
            return
        await self._room.runtime_subject(name).append(registered)
        self._told_registry[name] = registered

    async def _tell_runtime(self, name: str, look: RuntimeReading, *, cleared: bool) -> None:
        models, untold = told(look.models)
        # A container that keeps restarting is another state than one that is down for once.
        known = (look.healthy, models, untold, is_crash_looping(look))
        if self._told_runtimes.get(name) == known and not cleared:
            return
        suspicion = self._room.suspects.get(name)
        if cleared:
            del self._room.suspects[name]
            suspicion = None
        health = HealthChanged(
            host=self._room.host,
            runtime=name,
            healthy=look.healthy,
            models=models,
            detail="; ".join(why for why in (look.error, untold) if why),
            suspect=None if suspicion is None else suspicion.why,
        )
        await self._room.runtime_subject(name).append(health)
        self._told_runtimes[name] = known
        _log.info("runtime_seen", runtime=name, healthy=look.healthy, models=models, detail=health.detail)

    async def _clears(self, name: str, look: RuntimeReading, suspicion: Suspicion) -> bool:
        """A suspect runtime is trusted again when the model that failed is gone, or passes the check it failed."""
        if not look.healthy or look.resident is None:
            return False
        provider = self._providers[name]
        row = provider.find(look, suspicion.model)
        if suspicion.reason == Reason.DEADLINE and not self._left_its_work(name, look, row, suspicion):
            return False
        device = next((one for one in self.devices if one.id == suspicion.device), None)
        if row is None or device is None:
            return True
        ids = self._room.devices_of(provider, device)
        readings = [self.readings[each] for each in ids if each in self.readings]
        verdict = judge(
            intended=device.kind,
            model=suspicion.model,
            resident=row,
            reports_vram=provider.reports_vram,
            before=(),
            after=readings,
            was_resident=True,
            process_use_mb=await self._room.process_use_mb(provider, readings),
            min_ratio=provider.config.min_vram_ratio,
        )
        return verdict.passed

    def _left_its_work(self, name: str, look: RuntimeReading, row: ResidentModel | None, suspicion: Suspicion) -> bool:
        """Whether a runtime that gave no progress is proven to work on that no more. Unknown is not idle."""
        if look.activity == "busy":
            return False
        if self._room.work_left.get(name) is suspicion:
            return True
        known = self._stop_proofs.get(name)
        if known is None or known[0] is not suspicion:
            known = self._stop_proofs[name] = (suspicion, StopProof(None))
        return known[1].shown_by(Signs(activity=look.activity, resident=row is not None))

    # --- heartbeats

    async def run(self) -> None:
        """Look and beat, until cancelled."""
        try:
            while True:
                if self._look is None or self._look.done():
                    if self._look is not None:
                        self._look.result()
                    self._look = asyncio.create_task(self._survey())
                done, _ = await asyncio.wait({self._look}, timeout=min(_LOOK_WAIT_S, self._config.heartbeat_s))
                if not done:
                    _log.warning("look_takes_long", waited_s=_LOOK_WAIT_S)
                await self.beat()
                await asyncio.sleep(self._config.heartbeat_s)
        finally:
            if self._look is not None:
                self._look.cancel()
                await asyncio.gather(self._look, return_exceptions=True)

    async def beat(self) -> None:
        """Send one heartbeat. One that is not stored is no error here: silence is what it looks like."""
        beat = Heartbeat(
            host=self._room.host,
            boot_id=self._room.boot_id,
            instance_id=self._room.instance_id,
            sent_at=now_rfc3339(),
            interval_s=self._config.heartbeat_s,
            claims=tuple(self._claims()),
            devices=tuple(self.readings.values()),
            # The catalogue stands in the log, whenever it changes.
            runtimes=tuple(replace(look, models=None) for look in self.looks.values()),
            stopping=self.stopping,
        )
        event_id = new_id()
        body = encode(
            beat,
            event_id=event_id,
            source=f"/site/{self._config.site}/agent/{self._room.host}",
            subject=self._room.host,
            time=beat.sent_at,
        )
        record = Record(subject=subjects.beat(self._room.host), body=body, event_id=event_id)
        outcome = await self._beats.append(record)
        if not isinstance(outcome, Appended):
            _log.warning("heartbeat_not_stored", outcome=type(outcome).__name__, detail=outcome.detail)


def _as_announced(devices: Sequence[Device]) -> list[Device]:
    """Without the driver's index, which is no part of what a device is."""
    return [replace(device, index=None) for device in devices]


async def _as_far_as_it_goes(telling: Awaitable[None]) -> None:
    """News that the log refuses for good are tried again at the next look; they keep no other news and no heartbeat."""
    try:
        await telling
    except NotRecorded as error:
        _log.error("news_not_recorded", why=error.message)
