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
from gpukeeper.agents.memory.handoff import Made, Refused
from gpukeeper.agents.memory.loads import Load
from gpukeeper.agents.memory.release import Asker
from gpukeeper.agents.memory.turns import Turn
from gpukeeper.agents.placement import Verdict, judge
from gpukeeper.agents.room import Slot
from gpukeeper.capacity.admission import shows_use
from gpukeeper.events import job as facts
from gpukeeper.events.device import HandedOff
from gpukeeper.events.fact import Fact
from gpukeeper.events.readings import DeviceReading, ResidentModel, RuntimeReading
from gpukeeper.events.reasons import Reason
from gpukeeper.events.runtime import ModelLoaded, Suspect
from gpukeeper.projections.host import Suspicion, why_suspect

_log = structlog.get_logger("gpukeeper.attempt")

#: Looks at a runtime that may have left out a model, and the pause between them.
_LOOKS_MAX = 3
_LOOK_AGAIN_S = 0.25


class Evidence(msgspec.Struct, frozen=True):
    """One look at the runtime and at the devices that it may use."""

    look: RuntimeReading
    readings: Sequence[DeviceReading]
    #: The runtime's row of the model, where it holds it as the job needs it.
    row: ResidentModel | None
    #: It holds the model with other options: a load replaces it.
    replaces: bool = False
    #: Why it must not be replaced now, in words.
    kept: str | None = None
    #: It does not list the model, which is no proof that it is gone: why, in words.
    disputed: str | None = None


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
        #: What the load is for, until it was told.
        self._body: Body | None = None
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
                    found = await self._bring_in(body)
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

    async def recheck(self, body: Body, ran_s: float) -> None:
        """Look again after a run of ``ran_s`` seconds. A model that has moved out of VRAM makes its runtime suspect.

        One that is gone, or whose figures are missing, was not seen to be misplaced.
        """
        hold = self._hold
        look, readings = await asyncio.gather(
            hold.room.residency(hold.provider), hold.room.read_devices(hold.provider, hold.slot.device)
        )
        row = hold.provider.find(look, body.model)
        if row is None:
            return
        verdict = await self._verdict(body, (), Evidence(look, readings, row), was_resident=True)
        if verdict.reason is None:
            return
        if verdict.reason is Reason.PLACEMENT_UNKNOWN:
            _log.warning("placement_not_rechecked", **hold.context(), why=verdict.detail)
            return
        await suspect(hold, body.model, verdict.reason, f"after a run of {ran_s:.0f} s: {verdict.detail}")

    async def over(self, *, break_off: bool) -> None:
        """Wait for what was begun in the turn, then leave it.

        Args:
            break_off: end a load rather than wait for it, as when the whole agent stops.
        """
        if self._load is not None and self._load.going:
            await self._load.over(0 if break_off else self._hold.route.clocks.load.limit_s)
        self._note_load_over()
        try:
            await self._tell_loaded_for_others()
            if self._turn is not None:
                for slot, _ in self._hold.claims:
                    await self._hold.room.handoff.over(slot.device.id)
        finally:
            # Also where the log refuses the news: nobody else would ever load or release there.
            self._leave_turn()

    def _note_load_over(self) -> None:
        """However the load ended, readings begun from now on show what it left behind, and older ones need not."""
        if self._load is not None and not self._load.going and not self._load_over_noted:
            self._load_over_noted = True
            room = self._hold.room
            for _, epoch in self._hold.claims:
                room.ledger = room.ledger.loaded(epoch, room.now())

    def _leave_turn(self) -> None:
        if self._turn is not None:
            self._turn.leave()
            self._turn = None

    async def _bring_in(self, body: Body) -> tuple[Sequence[DeviceReading], Evidence, bool] | Refused:
        """In a turn of its own: make room, load, look again. Also says whether somebody else was faster."""
        hold = self._hold
        room, device = hold.room, hold.slot.device
        hold.phase = "awaiting_turn"
        self._turn = await room.turns.take(room.devices_of(hold.provider, device))
        await room.uses.until_asked(hold.provider.config.name, body.model, but=hold.epoch)
        evidence = await self.look(body)
        if evidence.row is not None:
            self.in_use(body)
            for _, epoch in hold.claims:
                # It is in the reservation of whoever brought it in, and in every reading since.
                room.ledger = room.ledger.without(epoch)
            return evidence.readings, evidence, True
        if evidence.disputed is not None:
            return Refused(reason=Reason.RESIDENCY_UNKNOWN, detail=evidence.disputed)
        if evidence.kept is not None:
            return Refused(reason=Reason.OWNER_BUSY, detail=evidence.kept)
        made = await self._make_room()
        if isinstance(made, Refused):
            return made
        before, _ = await asyncio.gather(room.read_devices(hold.provider, device), self._tell_handed_off(made))
        hold.phase = "loading"
        room.tenancy.use(hold.provider.config.name, hold.epoch)
        self._body = body
        self._load = room.loads.begin(hold.provider, body.model, body.work, on_cpu=hold.on_cpu)
        try:
            hold.load_s = await self._load.wait()
        finally:
            self._note_load_over()
        self.in_use(body)
        hold.phase = "loaded"
        look, after = await asyncio.gather(self._look_after_load(body), room.read_devices(hold.provider, device))
        self._body = None
        await self._tell_loaded(body, before, after)
        still_replaced = hold.provider.find(evidence.look, body.model) is not None and not self._freed
        return before, Evidence(look, after, hold.provider.find(look, body.model)), still_replaced

    async def _look_after_load(self, body: Body) -> RuntimeReading:
        """What it holds now; asked again where it leaves out what it has just loaded, as busy ones do."""
        hold = self._hold
        look = await hold.room.residency(hold.provider)
        for _ in range(_LOOKS_MAX - 1):
            if look.resident is None or hold.provider.find(look, body.model) is not None:
                break
            await asyncio.sleep(_LOOK_AGAIN_S)
            look = await hold.room.residency(hold.provider)
        return look

    def evidence(self, body: Body, look: RuntimeReading, readings: Sequence[DeviceReading]) -> Evidence:
        """What such a look says about the job's model. A load with other options than the job's does not serve it."""
        hold = self._hold
        room, name, options = hold.room, hold.provider.config.name, hold.provider.load_options(body.work)
        row = hold.provider.find(look, body.model)
        if row is not None and row.stopping:
            # Its stay is over: what is on its way out serves nobody, and a load brings it back.
            return Evidence(look, readings, None, replaces=True)
        if row is not None and (
            room.loads.replaces(name, body.model, options) or not room.tenancy.serves(name, body.model, options)
        ):
            in_use = room.uses.with_other_options(name, body.model, options, but=hold.epoch)
            kept = f"a job of ours uses {body.model} on {name} with other load options" if in_use else None
            return Evidence(look, readings, None, replaces=True, kept=kept)
        if row is not None or look.resident is None:
            return Evidence(look, readings, row)
        return Evidence(look, readings, None, disputed=self._why_disputed(body.model))

    def _why_disputed(self, model: str) -> str | None:
        """Why it is no proof that ``model`` is gone where a look does not list it; None where it may be."""
        hold = self._hold
        name = hold.provider.config.name
        if hold.room.uses.has(name, model, but=hold.epoch):
            return f"{name} does not list {model} now, though a job of ours uses it"
        earlier = hold.room.tenancy.expects(hold.provider, model)
        return None if earlier is None else f"{name} does not list {model} now, and did at {earlier.read_at}"

    async def look(self, body: Body) -> Evidence:
        """Look at the runtime and its devices, both begun now; again where it may have left the model out."""
        hold = self._hold
        evidence: Evidence | None = None
        for number in range(_LOOKS_MAX):
            if number:
                await asyncio.sleep(_LOOK_AGAIN_S)
            look, readings = await asyncio.gather(
                hold.room.residency(hold.provider), hold.room.read_devices(hold.provider, hold.slot.device)
            )
            evidence = self.evidence(body, look, readings)
            if evidence.disputed is None:
                break
        assert evidence is not None
        return evidence

    def in_use(self, body: Body, *, asked: bool = False) -> None:
        """The job rests on the model as it is resident now: no load for another job takes it away."""
        hold = self._hold
        name, options = hold.provider.config.name, hold.provider.load_options(body.work)
        hold.room.uses.begin(hold.epoch, name, body.model, options, asked=asked)

    async def _make_room(self) -> list[tuple[Slot, int, Made]] | Refused:
        """Free what is missing on each of the job's devices: where releases made the room, under which claim, and how
        much there is."""
        rooms: list[tuple[Slot, int, Made]] = []
        for slot, epoch in self._hold.claims:
            made = await self._make_room_on(slot, epoch)
            if isinstance(made, Refused):
                return made
            if made is not None and made.generations:
                rooms.append((slot, epoch, made))
        self._freed = bool(rooms)
        return rooms

    async def _make_room_on(self, slot: Slot, epoch: int) -> Made | Refused | None:
        """The same on one of them. None where its memory cannot be measured: the reservation stands for it."""
        hold, device = self._hold, slot.device
        need_mb = None if hold.need is None else hold.need.vram_mb
        reading = await hold.room.inventory.read(device.id)
        block = hold.room.still_blocked(reading)
        if block is not None:
            # Since the admission, while others had their turns.
            return Refused(reason=Reason.DEVICE_BLOCKED, detail=block.why)
        if need_mb is None or not shows_use(reading):
            return None
        hold.phase = "reclaiming"
        asker = Asker(
            job=hold.route.job,
            epoch=hold.epoch,
            reserved_under=epoch,
            wanted=self._wanted,
            turn_on=hold.room.devices_of(hold.provider, hold.slot.device),
        )
        return await hold.room.handoff.make_room(device, need_mb, asker)

    async def _tell_handed_off(self, rooms: Sequence[tuple[Slot, int, Made]]) -> None:
        """That releases made the room."""
        hold = self._hold
        for slot, epoch, made in rooms:
            handed = HandedOff(
                host=hold.room.host,
                device=slot.device.id,
                job=hold.route.job,
                epoch=epoch,
                need_mb=0 if hold.need is None else hold.need.vram_mb or 0,
                free_mb=made.free_mb,
                generations=made.generations,
            )
            await slot.subject.append(handed, job=hold.route.job, epoch=epoch)
            _log.info("handed_off", **hold.context(), on=slot.device.id, releases=len(made.generations))

    async def _tell_loaded_for_others(self) -> None:
        """A load that went on though its job had left: nobody measured what it took."""
        hold = self._hold
        if self._load is None or self._body is None or self._load.took_s is None:
            return
        hold.load_s = self._load.took_s
        body, self._body = self._body, None
        await self._tell_loaded(body, (), ())

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


async def suspect(hold: Hold, model: str, reason: Reason, detail: str) -> Suspicion:
    """Send no more work to the runtime until it is seen to be as it should. Returns what it is suspected of."""
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
    suspicion = hold.room.suspects[name] = Suspicion(model, hold.slot.device.id, why_suspect(fact))
    await hold.room.runtime_subject(name).append(fact, job=hold.route.job)
    return suspicion


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
