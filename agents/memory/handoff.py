"""Makes room on one device: asks idle owners to let go, one after another, and believes only what the device shows.

Each step is an event on the device's subject. The sequence of a `reclaim_requested` is the generation of its release:
a release that is not wanted any more when its turn has come is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import msgspec
import structlog
from msgspec.structs import replace

from gpukeeper.agents.memory.settling import Settling
from gpukeeper.agents.runtimes.port import Provider, RuntimeFailure
from gpukeeper.capacity.admission import shows_use, usable_mb
from gpukeeper.capacity.device import Device
from gpukeeper.capacity.reclaim import Hurdle, Owner, Plan, hurdles, plan
from gpukeeper.events import device as facts
from gpukeeper.events.device import Considered
from gpukeeper.events.modelnames import same_model
from gpukeeper.events.readings import DeviceReading
from gpukeeper.events.reasons import Reason
from gpukeeper.events.runtime import ModelUnloaded

if TYPE_CHECKING:
    from gpukeeper.agents.room import HostRoom

_log = structlog.get_logger("gpukeeper.handoff")

#: How often the device is read while it settles.
_LOOK_EVERY_S = 0.25


class Asker(msgspec.Struct, frozen=True, kw_only=True):
    """Who needs the room: a job under its claim, or the wish of an operator."""

    job: str | None = None
    epoch: int | None = None
    #: The claim under which its memory on this device is reserved, where that is another: of several devices.
    reserved_under: int | None = None
    wanted_seq: int | None = None
    #: Only this runtime, or only this model of it, may be asked; any otherwise.
    runtime: str | None = None
    model: str | None = None
    #: Whether it is still wanted: a job may have been cancelled meanwhile.
    wanted: Callable[[], bool] = lambda: True
    #: The devices whose turn it holds.
    turn_on: tuple[str, ...] = ()


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """There is room now, by measurement."""

    free_mb: int
    generations: tuple[int, ...] = ()
    #: A wish has got its last word: some owner was asked.
    answered: bool = False


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """There is not, and why."""

    reason: Reason
    detail: str
    considered: tuple[Considered, ...] = ()


class _Released(msgspec.Struct, frozen=True, kw_only=True):
    """What one release came to. ``reason`` is None where the device shows it."""

    generation: int
    reason: Reason | None = None
    detail: str = ""
    #: Its event said that another answer to the wish follows.
    more: bool = False


class Handoff:
    """Releases on the devices of one host. Whoever calls holds the turn of the device."""

    def __init__(self, room: HostRoom) -> None:
        self._room = room
        #: Releases under way, which go on when whoever asked has left.
        self._going: dict[str, asyncio.Task[_Released]] = {}

    async def over(self, device: str) -> None:
        """Wait until nothing is being released there."""
        going = self._going.get(device)
        if going is not None:
            await asyncio.wait({going})

    async def make_room(self, device: Device, need_mb: int | None, asker: Asker) -> Made | Refused:
        """Free what is missing for ``need_mb``, or all that may be freed where that is None.

        Nothing is released where it would not be enough. Each owner is asked at most once.
        """
        asked: set[tuple[str, str | None]] = set()
        generations: list[int] = []
        last: _Released | None = None
        failure: _Released | None = None
        while True:
            reading = await self._room.inventory.read(device.id)
            block = None if asker.epoch is None else self._room.still_blocked(reading)
            if block is not None:
                return Refused(reason=Reason.DEVICE_BLOCKED, detail=block.why)
            usable = self._usable_mb(device, reading, asker)
            if usable is None:
                return Refused(reason=Reason.DEVICE_UNKNOWN, detail=reading.error or f"the device is {reading.state}")
            if need_mb is not None and usable >= need_mb:
                return await self._made(device, reading, generations, last, failure, asker, "enough is free")
            await self._room.observer.look_at_all(await self._room.inventory.read_all())
            found = self.plan(device, None if need_mb is None else need_mb - usable, asker, but=asked)
            if not found.chosen:
                if need_mb is None and generations:
                    words = "whatever may be released has been"
                    return await self._made(device, reading, generations, last, failure, asker, words)
                return await self._refuse(device, need_mb, usable, found, failure, asker)
            owner = found.chosen[0]
            asked.add((owner.runtime, owner.model))
            more = len(found.chosen) > 1
            wanted_mb = None if need_mb is None else (reading.free_mb or 0) + need_mb - usable
            last = await self._release(device, owner, reading, wanted_mb, found, asker, more=more)
            if last.reason is None:
                generations.append(last.generation)
            else:
                failure = last
                if device.id in self._room.blocked:
                    return Refused(reason=last.reason, detail=last.detail, considered=found.considered)

    def plan(
        self,
        device: Device,
        shortfall_mb: int | None,
        asker: Asker,
        *,
        but: Collection[tuple[str, str | None]] = (),
    ) -> Plan:
        """Who would be asked now, by the newest looks. Pure but for them."""
        owners = [
            owner if self._may_take_turn(owner, asker) else replace(owner, loading=True)
            for owner in self._room.owners_on(device.id, but=asker.epoch)
            if (owner.runtime, owner.model) not in but
            and asker.runtime in (None, owner.runtime)
            and (asker.model is None or (owner.model is not None and same_model(owner.model, asker.model)))
        ]
        return plan(shortfall_mb, owners)

    def _elsewhere(self, owner: Owner, asker: Asker) -> set[str]:
        """Devices that a release of this owner may change, and whose turn the asker does not hold."""
        provider = self._room.tenancy.provider(owner.runtime)
        named = () if provider is None else provider.config.devices or self._room.gpu_ids()
        return set(named) - set(asker.turn_on)

    def _may_take_turn(self, owner: Owner, asker: Asker) -> bool:
        """Whether nobody loads or releases on the other devices of this owner."""
        return not any(self._room.turns.taken(device) for device in self._elsewhere(owner, asker))

    def _usable_mb(self, device: Device, reading: DeviceReading, asker: Asker) -> int | None:
        own = asker.epoch if asker.reserved_under is None else asker.reserved_under
        ledger = self._room.ledger if own is None else self._room.ledger.without(own)
        return usable_mb(device, reading, ledger.unseen_mb(reading))

    async def _refuse(
        self,
        device: Device,
        need_mb: int | None,
        usable: int,
        found: Plan,
        failure: _Released | None,
        asker: Asker,
    ) -> Refused:
        stays = "; ".join(_stays(each) for each in found.considered) or "no registered runtime holds any of it"
        asked = "all that can be had" if need_mb is None else f"{need_mb} MB"
        detail = f"asked for {asked}, {usable} MB usable; {stays}"
        reason = Reason.INSUFFICIENT
        if failure is not None and failure.reason is not None:
            reason, detail = failure.reason, f"{failure.detail}; {detail}"
        refused = facts.ReclaimRefused(
            host=self._room.host,
            device=device.id,
            reason=reason,
            detail=detail,
            job=asker.job,
            need_mb=need_mb,
            wanted_seq=asker.wanted_seq,
            considered=found.considered,
        )
        await self._room.device_subject(device.id).append(refused, job=asker.job, epoch=asker.epoch)
        return Refused(reason=reason, detail=detail, considered=found.considered)

    async def _made(
        self,
        device: Device,
        reading: DeviceReading,
        generations: Sequence[int],
        last: _Released | None,
        failure: _Released | None,
        asker: Asker,
        why: str,
    ) -> Made:
        """There is room; a wish whose last answer announced another one gets it."""
        if last is not None and last.more:
            told = f"nothing more is released: {why}"
            refused = facts.ReclaimRefused(
                host=self._room.host,
                device=device.id,
                reason=Reason.NOT_NEEDED,
                detail=told if failure is None else f"{told}; {failure.detail}",
                wanted_seq=asker.wanted_seq,
            )
            await self._room.device_subject(device.id).append(refused)
        return Made(free_mb=reading.free_mb or 0, generations=tuple(generations), answered=last is not None)

    async def _release(
        self,
        device: Device,
        owner: Owner,
        before: DeviceReading,
        wanted_mb: int | None,
        found: Plan,
        asker: Asker,
        *,
        more: bool,
    ) -> _Released:
        """One release to its end, also where whoever asked leaves meanwhile: what was sent cannot be called back."""
        tenancy = self._room.tenancy
        # Before anything is awaited: whoever comes to this runtime from now on waits until it has settled, and whoever
        # would load or release on its other devices until their turn is left.
        turn = self._room.turns.take_at_once(self._elsewhere(owner, asker))
        tenancy.begin_release(owner.runtime, owner.model)
        task = asyncio.create_task(self._to_its_end(device, owner, before, wanted_mb, found, asker, more=more))
        self._going[device.id] = task

        def ended(task: asyncio.Task[_Released]) -> None:
            tenancy.end_release(owner.runtime)
            if turn is not None:
                turn.leave()
            if self._going.get(device.id) is task:
                del self._going[device.id]
            if not task.cancelled():
                # In case nobody waits any more.
                task.exception()

        task.add_done_callback(ended)
        return await asyncio.shield(task)

    async def _to_its_end(
        self,
        device: Device,
        owner: Owner,
        before: DeviceReading,
        wanted_mb: int | None,
        found: Plan,
        asker: Asker,
        *,
        more: bool,
    ) -> _Released:
        room = self._room
        requested = facts.ReclaimRequested(
            host=room.host,
            device=device.id,
            runtime=owner.runtime,
            model=owner.model,
            promised_mb=owner.held_mb,
            free_mb=before.free_mb,
            idle_s=owner.idle_s,
            job=asker.job,
            need_mb=wanted_mb,
            wanted_seq=asker.wanted_seq,
            considered=found.considered,
        )
        subject = room.device_subject(device.id)
        generation = await subject.append(requested, job=asker.job, epoch=asker.epoch)
        provider = room.tenancy.provider(owner.runtime)
        why_not = self._dropped(device, owner, asker)
        began_s = asyncio.get_running_loop().time()
        if provider is None or why_not is not None:
            hurdle = why_not or Hurdle(Reason.NOT_RELEASABLE, "it is not in the registry any more")
            detail = f"the release of {owner.label} was dropped: {hurdle.detail}"
            return await self._failed(device, owner, generation, hurdle.reason, detail, before, began_s, asker)
        settling = Settling(before_mb=before.free_mb or 0, promised_mb=owner.held_mb or 0, wanted_mb=wanted_mb)
        try:
            async with asyncio.timeout(provider.config.release_timeout_s):
                await provider.release(owner.model)
                await self._settle(device.id, settling)
        except RuntimeFailure as failure:
            detail = f"{owner.label} did not let go: {failure.detail}"
            return await self._failed(device, owner, generation, Reason.RELEASE_FAILED, detail, before, began_s, asker)
        except TimeoutError:
            if not settling.yielded:
                return await self._blocked(device, owner, provider, generation, settling, began_s, asker)
        short = wanted_mb is not None and settling.free_mb < wanted_mb
        more = asker.wanted_seq is not None and (more or short)
        reclaimed = facts.Reclaimed(
            host=room.host,
            device=device.id,
            generation=generation,
            runtime=owner.runtime,
            model=owner.model,
            promised_mb=owner.held_mb,
            measured_mb=settling.measured_mb,
            free_mb=settling.free_mb,
            settle_s=_since_s(began_s),
            job=asker.job,
            wanted_seq=asker.wanted_seq,
            more=more,
        )
        await subject.append(reclaimed, job=asker.job, epoch=asker.epoch)
        unloaded = ModelUnloaded(
            host=room.host,
            runtime=owner.runtime,
            model=owner.model,
            why="reclaim" if asker.wanted_seq is None else "operator",
            job=asker.job,
            generation=generation,
        )
        await room.runtime_subject(owner.runtime).append(unloaded, job=asker.job)
        return _Released(generation=generation, more=more)

    def _dropped(self, device: Device, owner: Owner, asker: Asker) -> Hurdle | None:
        """Why the release is not to be sent any more, now that it is in the log; None where it is."""
        if not asker.wanted():
            return Hurdle(Reason.NOT_NEEDED, "whoever needed it is gone")
        name = (owner.runtime, owner.model)
        owners = self._room.owners_on(device.id, but=asker.epoch)
        again = next((each for each in owners if (each.runtime, each.model) == name), None)
        if again is None:
            return Hurdle(Reason.NOT_NEEDED, "it holds nothing there any more")
        return next(iter(hurdles(again)), None)

    async def until_shown(self, device_id: str, before: DeviceReading, promised_mb: int) -> None:
        """Wait until the device shows what a release that nobody asked room for gave back. The caller bounds it."""
        if before.free_mb is None or promised_mb <= 0 or not shows_use(before):
            return
        await self._settle(device_id, Settling(before_mb=before.free_mb, promised_mb=promised_mb, wanted_mb=None))

    async def _settle(self, device_id: str, settling: Settling) -> None:
        """Read the device until it shows enough, or no longer moves."""
        while True:
            reading = await self._room.inventory.read(device_id)
            free_mb = reading.free_mb if reading.state == "healthy" else None
            if settling.saw(free_mb, asyncio.get_running_loop().time()) != "moving":
                return
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _blocked(
        self,
        device: Device,
        owner: Owner,
        provider: Provider,
        generation: int,
        settling: Settling,
        began_s: float,
        asker: Asker,
    ) -> _Released:
        """It accepted, and the device does not show it: nothing more is given out there until it does."""
        look = await self._room.residency(provider)
        waited_s = _since_s(began_s)
        if look.resident is None:
            reason, says = Reason.HANDOFF_TIMEOUT, "it does not say what it holds"
        elif look.resident and (owner.model is None or provider.find(look, owner.model) is not None):
            reason, says = Reason.HANDOFF_TIMEOUT, "it still lists what it should have let go of"
        else:
            reason, says = Reason.RELEASE_FAILED, "it says that it holds nothing more; the owner of the rest is unknown"
        detail = (
            f"{owner.label} accepted to let go of {settling.promised_mb} MB; {settling.measured_mb} MB became free on "
            f"{device.id} in {waited_s:.0f} s, and {says}"
        )
        self._room.block(device.id, detail, free_mb=settling.before_mb + settling.promised_mb // 2)
        failed = await self._failed(device, owner, generation, reason, detail, None, began_s, asker, settling.free_mb)
        self._room.told_states[device.id] = "blocked"
        changed = facts.Changed(host=self._room.host, device=device.id, state="blocked", detail=detail)
        await self._room.device_subject(device.id).append(changed)
        _log.warning("device_blocked", device=device.id, detail=detail)
        return failed

    async def _failed(
        self,
        device: Device,
        owner: Owner,
        generation: int,
        reason: Reason,
        detail: str,
        before: DeviceReading | None,
        began_s: float,
        asker: Asker,
        free_mb: int | None = None,
    ) -> _Released:
        if owner.model is not None:
            self._room.tenancy.stays(owner.runtime, owner.model)
        more = asker.wanted_seq is not None and device.id not in self._room.blocked
        failed = facts.ReclaimFailed(
            host=self._room.host,
            device=device.id,
            generation=generation,
            runtime=owner.runtime,
            model=owner.model,
            reason=reason,
            detail=detail,
            free_mb=free_mb if before is None else before.free_mb,
            waited_s=_since_s(began_s),
            job=asker.job,
            wanted_seq=asker.wanted_seq,
            more=more,
        )
        await self._room.device_subject(device.id).append(failed, job=asker.job, epoch=asker.epoch)
        return _Released(generation=generation, reason=reason, detail=detail, more=more)


def _since_s(began_s: float) -> float:
    """Seconds of the loop's clock, to the millisecond."""
    return round(asyncio.get_running_loop().time() - began_s, 3)


def _stays(each: Considered) -> str:
    name = each.runtime if each.model is None else f"{each.runtime}/{each.model}"
    held = "an unknown amount" if each.held_mb is None else f"{each.held_mb} MB"
    return f"{name} ({held}) stays: {each.kept}, {each.detail}"
