"""Makes room on one device: asks idle owners to let go, one after another, and believes only what the device shows.

Each step is an event on the device's subject. The sequence of a `reclaim_requested` is the generation of its release:
a release that is not wanted any more when its turn has come is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import msgspec
import structlog

from gpukeeper.agents.memory.settling import Settling
from gpukeeper.agents.memory.turns import Turn
from gpukeeper.agents.runtimes.port import Provider, RuntimeFailure
from gpukeeper.capacity.admission import usable_mb
from gpukeeper.capacity.device import Device
from gpukeeper.capacity.reclaim import Hurdle, Owner, Plan, hurdles, plan
from gpukeeper.events import device as facts
from gpukeeper.events.device import Considered
from gpukeeper.events.readings import DeviceReading
from gpukeeper.events.reasons import Reason
from gpukeeper.events.runtime import ModelUnloaded

if TYPE_CHECKING:
    from gpukeeper.agents.room import HostRoom

_log = structlog.get_logger("gpukeeper.handoff")

#: How often the device is read while it settles.
_LOOK_EVERY_S = 0.25


def _now_s() -> float:
    """By the loop's clock, like the limits of releases."""
    return asyncio.get_running_loop().time()


class Asker(msgspec.Struct, frozen=True, kw_only=True):
    """Who needs the room: a job under its claim, or the wish of an operator."""

    #: Under which it releases.
    turn: Turn
    job: str | None = None
    epoch: int | None = None
    wanted_seq: int | None = None
    #: Only this runtime, or only this model of it, may be asked; any otherwise.
    runtime: str | None = None
    model: str | None = None
    #: Whether it is still wanted: a job may have been cancelled meanwhile.
    wanted: Callable[[], bool] = lambda: True


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """There is room now, by measurement."""

    free_mb: int
    need_mb: int | None = None
    generations: tuple[int, ...] = ()


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
        failure: _Released | None = None
        unanswered = False
        while True:
            reading = await self._room.inventory.read(device.id)
            usable = self._usable_mb(device, reading, asker)
            if usable is None:
                return Refused(reason=Reason.DEVICE_UNKNOWN, detail=reading.error or f"the device is {reading.state}")
            if need_mb is not None and usable >= need_mb:
                if unanswered:
                    await self._nothing_more(device, asker, "enough is free")
                return Made(free_mb=reading.free_mb or 0, need_mb=need_mb, generations=tuple(generations))
            await self._room.observer.look_at_all(await self._room.inventory.read_all())
            found = self.plan(device, None if need_mb is None else need_mb - usable, asker, but=asked)
            if not found.chosen:
                if need_mb is None and generations:
                    if unanswered:
                        await self._nothing_more(device, asker, "whatever may be released has been")
                    return Made(free_mb=reading.free_mb or 0, need_mb=need_mb, generations=tuple(generations))
                return await self._refuse(device, need_mb, usable, found, failure, asker)
            owner = found.chosen[0]
            asked.add((owner.runtime, owner.model))
            more = asker.wanted_seq is not None and len(found.chosen) > 1
            wanted_mb = None if need_mb is None else (reading.free_mb or 0) + need_mb - usable
            released = await self._release(device, owner, reading, wanted_mb, found, asker, more=more)
            if released.reason is None:
                generations.append(released.generation)
                unanswered = more
            else:
                failure = released
                if device.id in self._room.blocked:
                    return Refused(reason=released.reason, detail=released.detail, considered=found.considered)

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
            msgspec.structs.replace(owner, turn_taken=self._turn_taken(owner, asker))
            for owner in self._room.owners_on(device.id, but=asker.epoch)
            if (owner.runtime, owner.model) not in but
            and asker.runtime in (None, owner.runtime)
            and asker.model in (None, owner.model)
        ]
        return plan(shortfall_mb, owners)

    def _usable_mb(self, device: Device, reading: DeviceReading, asker: Asker) -> int | None:
        ledger = self._room.ledger if asker.epoch is None else self._room.ledger.ahead_of(asker.epoch)
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

    async def _nothing_more(self, device: Device, asker: Asker, detail: str) -> None:
        """The last word on a wish, where the last release said that more would follow."""
        refused = facts.ReclaimRefused(
            host=self._room.host,
            device=device.id,
            reason=Reason.NOT_NEEDED,
            detail=f"nothing more is released: {detail}",
            wanted_seq=asker.wanted_seq,
        )
        await self._room.device_subject(device.id).append(refused)

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
        beside = self._room.turns.take_at_once(self._sits_on(owner) - asker.turn.devices)
        assert beside is not None, "who sits where a turn is taken is not chosen"
        # Before anything is awaited: whoever comes to this runtime from now on waits until it has settled.
        tenancy.releasing(owner.runtime, going=True)
        task = asyncio.create_task(self._to_its_end(device, owner, before, wanted_mb, found, asker, more=more))
        self._going[device.id] = task

        def ended(task: asyncio.Task[_Released]) -> None:
            tenancy.releasing(owner.runtime, going=False)
            beside.leave()
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
        began_s = _now_s()
        if provider is None or why_not is not None:
            why_not = why_not or Hurdle(Reason.NOT_RELEASABLE, "it is not in the registry any more")
            return await self._failed(device, owner, generation, why_not.reason, why_not.detail, before, began_s, asker)
        settling = Settling(before_mb=before.free_mb or 0, promised_mb=owner.held_mb or 0, wanted_mb=wanted_mb)
        try:
            async with asyncio.timeout(provider.config.release_timeout_s):
                await provider.release(owner.model)
                await self._settle(device, settling)
        except RuntimeFailure as failure:
            detail = f"{owner.label} did not let go: {failure.detail}"
            return await self._failed(device, owner, generation, Reason.RELEASE_FAILED, detail, before, began_s, asker)
        except TimeoutError:
            if not settling.yielded:
                return await self._blocked(device, owner, provider, generation, settling, began_s, asker)
        except Exception as fault:
            # Not by the provider's contract: the log is told before the fault goes on to whoever asked.
            detail = f"{owner.label}: {type(fault).__name__}: {fault}"[:2000]
            await self._failed(device, owner, generation, Reason.INTERNAL, detail, before, began_s, asker)
            raise
        reclaimed = facts.Reclaimed(
            host=room.host,
            device=device.id,
            generation=generation,
            runtime=owner.runtime,
            model=owner.model,
            promised_mb=owner.held_mb,
            measured_mb=settling.measured_mb,
            free_mb=settling.free_mb,
            settle_s=round(_now_s() - began_s, 3),
            job=asker.job,
            wanted_seq=asker.wanted_seq,
            more=more,
        )
        unloaded = ModelUnloaded(
            host=room.host,
            runtime=owner.runtime,
            model=owner.model,
            why="reclaim" if asker.wanted_seq is None else "operator",
            job=asker.job,
            generation=generation,
        )
        # At once: whoever asked waits for both, and the device is free already.
        await asyncio.gather(
            subject.append(reclaimed, job=asker.job, epoch=asker.epoch),
            room.runtime_subject(owner.runtime).append(unloaded, job=asker.job),
        )
        return _Released(generation=generation)

    def _dropped(self, device: Device, owner: Owner, asker: Asker) -> Hurdle | None:
        """Why the release is not to be sent any more, now that it is in the log; None where it is.

        Whatever was seen, pinned or begun while it was being stored counts, and so does that nobody looked since.
        """
        if not asker.wanted():
            return Hurdle(Reason.NOT_NEEDED, "whoever needed it is gone")
        name = (owner.runtime, owner.model)
        for now in self._room.owners_on(device.id, but=asker.epoch, releasing=False):
            if (now.runtime, now.model) == name:
                return next(iter(hurdles(now)), None)
        return Hurdle(Reason.OTHER_DEVICE, "it is not there any more")

    def _sits_on(self, owner: Owner) -> frozenset[str]:
        """The devices that a release of it may change."""
        return self._room.tenancy.sits_on(owner.runtime, self._room.gpu_ids())

    def _turn_taken(self, owner: Owner, asker: Asker) -> bool:
        others = self._sits_on(owner) - asker.turn.devices
        return any(self._room.turns.taken(other) for other in others)

    async def _settle(self, device: Device, settling: Settling) -> None:
        """Read the device until it shows enough, or no longer moves."""
        while True:
            reading = await self._room.inventory.read(device.id)
            free_mb = reading.free_mb if reading.state == "healthy" else None
            if settling.saw(free_mb, _now_s()) != "moving":
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
        waited_s = _now_s() - began_s
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
        failed = facts.ReclaimFailed(
            host=self._room.host,
            device=device.id,
            generation=generation,
            runtime=owner.runtime,
            model=owner.model,
            reason=reason,
            detail=detail,
            free_mb=free_mb if before is None else before.free_mb,
            waited_s=round(_now_s() - began_s, 3),
            job=asker.job,
            wanted_seq=asker.wanted_seq,
        )
        await self._room.device_subject(device.id).append(failed, job=asker.job, epoch=asker.epoch)
        return _Released(generation=generation, reason=reason, detail=detail)


def _stays(each: Considered) -> str:
    name = each.runtime if each.model is None else f"{each.runtime}/{each.model}"
    held = "an unknown amount" if each.held_mb is None else f"{each.held_mb} MB"
    return f"{name} ({held}) stays: {each.kept}, {each.detail}"
