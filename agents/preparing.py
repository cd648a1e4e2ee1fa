"""Before the run: room on the device, the model in it, and proof that it sits where it should.

Only what is not resident takes a turn on its devices: one load or release at a time. What was begun in a turn (a load,
a release) goes on when its job is cancelled, and the turn and the slot are kept until it has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import structlog

from gpukeeper.agents import endings
from gpukeeper.agents.body import Body
from gpukeeper.agents.endings import ClockExpired
from gpukeeper.agents.hold import Hold
from gpukeeper.agents.memory.handoff import Asker, Made, Refused
from gpukeeper.agents.memory.loads import Load
from gpukeeper.agents.memory.turns import Turn
from gpukeeper.agents.placement import Verdict, judge
from gpukeeper.capacity.admission import shows_use
from gpukeeper.events import job as facts
from gpukeeper.events.device import HandedOff
from gpukeeper.events.fact import Fact
from gpukeeper.events.readings import DeviceReading, ResidentModel, RuntimeReading
from gpukeeper.events.reasons import Reason
from gpukeeper.events.runtime import ModelLoaded, Suspect
from gpukeeper.projections.host import Suspicion, why_suspect

_log = structlog.get_logger("gpukeeper.attempt")


class Evidence(msgspec.Struct, frozen=True):
    """One look at the runtime and at the devices that it may use."""

    look: RuntimeReading
    readings: Sequence[DeviceReading]
    #: The runtime's row of the model, where it holds it as the job needs it.
    row: ResidentModel | None
    #: It holds the model with other options: a load replaces it.
    replaces: bool = False


def _sources(verdict: Verdict) -> str:
    """Where a verdict's figures come from, for its event."""
    read = f" ({', '.join(verdict.devices_read)})" if verdict.devices_read else ""
    return f"vram: {verdict.sources.vram}; device: {verdict.sources.device}{read}"


class Preparation:
    """The way of one admitted job to a model that sits where it should."""

    def __init__(self, hold: Hold, *, wanted: Callable[[], bool]) -> None:
        self._hold = hold
        self._wanted = wanted
        self._turn: Turn | None = None
        self._load: Load | None = None
        self._load_over_noted = False
        #: Something was released on the way: what the device showed before is not what it showed at the load.
        self._freed = False

    async def prepare(self, body: Body, evidence: Evidence) -> Fact | None:
        """Bring the model in where it is not, and verify. Returns the fact that ends the attempt, or None: go on.

        Raises:
            RuntimeFailure: the runtime refused or could not.
            ClockExpired: the load clock ran out.
            CancelWanted, Superseded: what was met at the job.
        """
        hold = self._hold
        was_resident = evidence.row is not None
        before, after = evidence.readings, evidence
        if not was_resident:
            clock = hold.route.clocks.load
            loop = asyncio.get_running_loop()
            began = loop.time()
            try:
                async with asyncio.timeout(clock.limit_s):
                    found = await self._bring_in(body, began + clock.limit_s)
            except TimeoutError:
                if self._load is not None:
                    await self._load.break_off()
                raise ClockExpired("load", clock, loop.time() - began) from None
            if isinstance(found, Refused):
                return endings.given_back(hold.so_far(), found.reason, found.detail)
            before, after, was_resident = found
        verdict = await self._verdict(body, before, after, was_resident=was_resident)
        if not verdict.passed:
            return await self._misplaced(body, verdict)
        await hold.append(facts.PlacementVerified(**self._placement(body, verdict)))
        hold.phase = "placed"
        self._leave_turn()
        return None

    async def over(self, *, break_off: bool) -> None:
        """Wait for what was begun in the turn, then leave it.

        Args:
            break_off: end a load rather than wait for it, as when the whole agent stops.
        """
        if self._load is not None and self._load.going:
            await self._load.over(0 if break_off else self._hold.route.clocks.load.limit_s)
        self._note_load_over()
        if self._turn is not None:
            await self._hold.room.handoff.over(self._hold.slot.device.id)
            self._leave_turn()

    def _note_load_over(self) -> None:
        """However the load ended, readings begun from now on show what it left behind, and older ones need not."""
        if self._load is not None and not self._load.going and not self._load_over_noted:
            self._load_over_noted = True
            self._hold.room.ledger = self._hold.room.ledger.loaded(self._hold.epoch, self._hold.room.now())

    def _leave_turn(self) -> None:
        if self._turn is not None:
            self._turn.leave()
            self._turn = None

    async def _bring_in(self, body: Body, until: float) -> tuple[Sequence[DeviceReading], Evidence, bool] | Refused:
        """In a turn of its own: fetch, make room, load, look again. Also says whether somebody else was faster."""
        hold = self._hold
        room, device = hold.room, hold.slot.device
        hold.phase = "awaiting_turn"
        self._turn = await room.turns.take(room.devices_of(hold.provider, device))
        evidence = await self.look(body)
        if evidence.row is not None:
            # It is in the reservation of whoever brought it in, and in every reading since.
            room.ledger = room.ledger.without(hold.epoch)
            return evidence.readings, evidence, True
        if room.provisioner is not None:
            hold.phase = "provisioning"
            await room.provisioner.ensure(hold.provider, body.model, hold.route.job, until)
        made = await self._make_room()
        if isinstance(made, Refused):
            return made
        before, _ = await asyncio.gather(room.read_devices(hold.provider, device), self._tell_handed_off(made))
        hold.phase = "loading"
        self._load = room.loads.begin(hold.provider, body.model, body.work, on_cpu=hold.on_cpu)
        try:
            hold.load_s = await self._load.wait()
        finally:
            self._note_load_over()
        hold.phase = "loaded"
        look, after = await asyncio.gather(room.residency(hold.provider), room.read_devices(hold.provider, device))
        await self._tell_loaded(body, before, after)
        still_replaced = hold.provider.find(evidence.look, body.model) is not None and not self._freed
        return before, Evidence(look, after, hold.provider.find(look, body.model)), still_replaced

    def evidence(self, body: Body, look: RuntimeReading, readings: Sequence[DeviceReading]) -> Evidence:
        """What such a look says about the job's model. A load with other options than the job's does not serve it."""
        hold = self._hold
        row = hold.provider.find(look, body.model)
        if row is not None and not hold.room.tenancy.serves(
            hold.provider.config.name, body.model, hold.provider.load_options(body.work)
        ):
            return Evidence(look, readings, None, replaces=True)
        return Evidence(look, readings, row)

    async def look(self, body: Body) -> Evidence:
        """Look at the runtime and its devices, both begun now."""
        hold = self._hold
        look, readings = await asyncio.gather(
            hold.room.residency(hold.provider), hold.room.read_devices(hold.provider, hold.slot.device)
        )
        return self.evidence(body, look, readings)

    async def _make_room(self) -> Made | Refused | None:
        """Free what is missing, where the device's memory can be measured; otherwise the reservation stands for it."""
        hold = self._hold
        device = hold.slot.device
        need_mb = None if hold.need is None else hold.need.vram_mb
        reading = await hold.room.inventory.read(device.id)
        block = hold.room.still_blocked(reading)
        if block is not None:
            # Since the admission, while others had their turns.
            return Refused(reason=Reason.DEVICE_BLOCKED, detail=block.why)
        if need_mb is None or not shows_use(reading):
            return None
        hold.phase = "reclaiming"
        assert self._turn is not None, "room is made in a turn"
        asker = Asker(turn=self._turn, job=hold.route.job, epoch=hold.epoch, wanted=self._wanted)
        return await hold.room.handoff.make_room(device, need_mb, asker)

    async def _tell_handed_off(self, made: Made | None) -> None:
        """That releases made the room, where they did."""
        hold = self._hold
        if made is None or not made.generations:
            return
        self._freed = True
        handed = HandedOff(
            host=hold.room.host,
            device=hold.slot.device.id,
            job=hold.route.job,
            epoch=hold.epoch,
            need_mb=made.need_mb or 0,
            free_mb=made.free_mb,
            generations=made.generations,
        )
        await hold.slot.subject.append(handed, job=hold.route.job, epoch=hold.epoch)
        _log.info("handed_off", **hold.context(), releases=len(made.generations))

    async def _tell_loaded(self, body: Body, before: Sequence[DeviceReading], after: Sequence[DeviceReading]) -> None:
        hold = self._hold
        name = hold.provider.config.name
        loaded = ModelLoaded(
            host=hold.room.host,
            runtime=name,
            model=body.model,
            job=hold.route.job,
            epoch=hold.epoch,
            load_s=hold.load_s or 0.0,
            device=hold.slot.device.id,
            vram_mb=measured_rise_mb(before, after),
            load_options=hold.provider.load_options(body.work),
        )
        await hold.room.runtime_subject(name).append(loaded, job=hold.route.job)

    async def _verdict(
        self, body: Body, before: Sequence[DeviceReading], after: Evidence, *, was_resident: bool
    ) -> Verdict:
        hold = self._hold
        return judge(
            intended=hold.slot.device.kind,
            model=body.model,
            resident=after.row,
            residency_known=after.look.resident is not None,
            reports_vram=hold.provider.reports_vram,
            model_bytes=await self._model_bytes(after.row, body.model),
            before=before,
            after=after.readings,
            was_resident=was_resident,
            process_use_mb=await hold.room.process_use_mb(hold.provider, after.readings),
            min_ratio=hold.provider.config.min_vram_ratio,
        )

    async def _model_bytes(self, row: ResidentModel | None, model: str) -> int | None:
        if row is not None and row.size_bytes is not None:
            return row.size_bytes
        return await self._hold.provider.model_bytes(model)

    async def _misplaced(self, body: Body, verdict: Verdict) -> Fact:
        """One attempt, no reload loop: the job fails, and no more work goes there until the runtime passes again."""
        assert verdict.reason is not None
        hold = self._hold
        await hold.append(facts.PlacementFailed(**self._placement(body, verdict), reason=verdict.reason))
        await suspect(hold, body.model, verdict.reason, verdict.detail)
        return endings.failed(hold.so_far(), verdict.reason, verdict.detail)

    def _placement(self, body: Body, verdict: Verdict) -> dict[str, Any]:
        hold = self._hold
        return {
            "job": hold.route.job,
            "epoch": hold.epoch,
            "runtime": hold.provider.config.name,
            "model": body.model,
            "intended": hold.slot.device.kind,
            "size_bytes": verdict.size_bytes,
            "vram_bytes": verdict.vram_bytes,
            "ratio": verdict.ratio,
            "device_before_mb": verdict.device_before_mb,
            "device_after_mb": verdict.device_after_mb,
            "sources": _sources(verdict),
            "load_s": hold.load_s,
            "detail": verdict.detail,
        }


async def suspect(hold: Hold, model: str, reason: Reason, detail: str) -> None:
    """Send no more work to the runtime until it is seen to be as it should."""
    name = hold.provider.config.name
    fact = Suspect(
        host=hold.room.host,
        runtime=name,
        model=model,
        job=hold.route.job,
        reason=reason,
        detail=detail,
        device=hold.slot.device.id,
    )
    hold.room.suspects[name] = Suspicion(model, hold.slot.device.id, why_suspect(fact))
    await hold.room.runtime_subject(name).append(fact, job=hold.route.job)


def measured_rise_mb(before: Sequence[DeviceReading], after: Sequence[DeviceReading]) -> int | None:
    """By how much the use of these devices rose in all; None where some reading does not show it."""
    earlier = {reading.device: reading for reading in before}
    rise_mb = 0
    for reading in after:
        first = earlier.get(reading.device)
        if first is None or first.used_mb is None or reading.used_mb is None or not shows_use(reading):
            return None
        rise_mb += max(0, reading.used_mb - first.used_mb)
    return rise_mb or None
