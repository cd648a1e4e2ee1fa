"""Makes room on one device: asks idle owners to let go, one after another, and believes only what the device shows.

Each step is an event on the device's subject; ``release.py`` has the steps of one release.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from gpukeeper.agents.memory.release import Asker, Release, Released, settle
from gpukeeper.agents.memory.settling import Settling
from gpukeeper.capacity.admission import shows_use, usable_mb
from gpukeeper.capacity.device import Device
from gpukeeper.capacity.owners import why_stays
from gpukeeper.capacity.reclaim import Owner, Plan, plan
from gpukeeper.events import device as facts
from gpukeeper.events.device import Considered
from gpukeeper.events.modelnames import same_model
from gpukeeper.events.readings import DeviceReading
from gpukeeper.events.reasons import Reason

if TYPE_CHECKING:
    from gpukeeper.agents.room import HostRoom


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


class Handoff:
    """Releases on the devices of one host. Whoever calls holds the turn of the device."""

    def __init__(self, room: HostRoom) -> None:
        self._room = room
        #: Releases under way, which go on when whoever asked has left.
        self._going: dict[str, asyncio.Task[Released]] = {}

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
        last: Released | None = None
        failure: Released | None = None
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
            replace(owner, turn_taken=self._turn_taken(owner, asker))
            for owner in self._room.owners_on(device.id, but=asker.epoch)
            if (owner.runtime, owner.model) not in but
            and asker.runtime in (None, owner.runtime)
            and (asker.model is None or (owner.model is not None and same_model(owner.model, asker.model)))
        ]
        return plan(shortfall_mb, owners)

    def _elsewhere(self, owner: Owner, asker: Asker) -> frozenset[str]:
        """Devices that a release of this owner may change, and whose turn the asker does not hold."""
        return self._room.tenancy.sits_on(owner.runtime, self._room.gpu_ids()).difference(asker.turn_on)

    def _turn_taken(self, owner: Owner, asker: Asker) -> bool:
        """Whether somebody loads or releases on the other devices of this owner."""
        return any(self._room.turns.taken(device) for device in self._elsewhere(owner, asker))

    def _usable_mb(self, device: Device, reading: DeviceReading, asker: Asker) -> int | None:
        own = asker.epoch if asker.reserved_under is None else asker.reserved_under
        ledger = self._room.ledger if own is None else self._room.ledger.ahead_of(own)
        return usable_mb(device, reading, ledger.unseen_mb(reading))

    async def _refuse(
        self,
        device: Device,
        need_mb: int | None,
        usable: int,
        found: Plan,
        failure: Released | None,
        asker: Asker,
    ) -> Refused:
        stays = "; ".join(why_stays(found.considered)) or "no registered runtime holds any of it"
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
        last: Released | None,
        failure: Released | None,
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
    ) -> Released:
        """One release to its end, also where whoever asked leaves meanwhile: what was sent cannot be called back."""
        tenancy = self._room.tenancy
        # Before anything is awaited: whoever comes to this runtime from now on waits until it has settled, and whoever
        # would load or release on its other devices until their turn is left.
        turn = self._room.turns.take_at_once(self._elsewhere(owner, asker))
        assert turn is not None, "who sits where a turn is taken is not chosen"
        tenancy.begin_release(owner.runtime, owner.model)
        release = Release(self._room, device, owner, asker, before=before, wanted_mb=wanted_mb, found=found, more=more)
        task = asyncio.create_task(release.run(), name=f"release {owner.label}")
        self._going[device.id] = task

        def ended(task: asyncio.Task[Released]) -> None:
            tenancy.end_release(owner.runtime)
            turn.leave()
            if self._going.get(device.id) is task:
                del self._going[device.id]
            if not task.cancelled():
                # In case nobody waits any more.
                task.exception()

        task.add_done_callback(ended)
        return await asyncio.shield(task)

    async def until_shown(self, device_id: str, before: DeviceReading, promised_mb: int) -> None:
        """Wait until the device shows what a release that nobody asked room for gave back. The caller bounds it."""
        if before.free_mb is None or promised_mb <= 0 or not shows_use(before):
            return
        await settle(self._room, device_id, Settling(before_mb=before.free_mb, promised_mb=promised_mb, wanted_mb=None))
