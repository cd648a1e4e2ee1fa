"""One release to its end: it is told, asked for, and believed only as far as the device shows it. Each step an event.

The sequence of its `reclaim_requested` is its generation. What is not wanted any more when that is stored is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import structlog

from gpukeeper.agents.memory.settling import Settling
from gpukeeper.agents.runtimes.port import Provider, RuntimeFailure
from gpukeeper.capacity.device import Device
from gpukeeper.capacity.reclaim import Hurdle, Owner, Plan, hurdles
from gpukeeper.events import device as facts
from gpukeeper.events.fact import Fact
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


class Released(msgspec.Struct, frozen=True, kw_only=True):
    """What one release came to. ``reason`` is None where the device shows it."""

    generation: int
    reason: Reason | None = None
    detail: str = ""
    #: Its event said that another answer to the wish follows.
    more: bool = False


class Release:
    """One owner that is asked to let go on one device.

    Args:
        before: the reading that it was decided on.
        wanted_mb: what must be free for whoever asks; None where all that can be had is wanted.
        found: the plan that chose the owner.
        more: others are to be asked after this one.
    """

    def __init__(
        self,
        room: HostRoom,
        device: Device,
        owner: Owner,
        asker: Asker,
        *,
        before: DeviceReading,
        wanted_mb: int | None,
        found: Plan,
        more: bool,
    ) -> None:
        self._room = room
        self._device = device
        self._owner = owner
        self._asker = asker
        self._before = before
        self._wanted_mb = wanted_mb
        self._found = found
        self._more = more
        self._generation = 0
        self._began_s = 0.0
        self._settling = Settling(before_mb=before.free_mb or 0, promised_mb=owner.held_mb or 0, wanted_mb=wanted_mb)

    async def run(self) -> Released:
        """Ask, and wait until the device shows what came of it, for no longer than the owner's entry allows."""
        self._generation = await self._tell_requested()
        self._began_s = asyncio.get_running_loop().time()
        provider = self._room.tenancy.provider(self._owner.runtime)
        hurdle = self._dropped()
        if provider is None or hurdle is not None:
            hurdle = hurdle or Hurdle(Reason.NOT_RELEASABLE, "it is not in the registry any more")
            return await self._failed(hurdle.reason, f"the release of {self._owner.label} was dropped: {hurdle.detail}")
        try:
            async with asyncio.timeout(provider.config.release_timeout_s):
                await provider.release(self._owner.model)
                await settle(self._room, self._device.id, self._settling)
        except RuntimeFailure as failure:
            return await self._failed(Reason.RELEASE_FAILED, f"{self._owner.label} did not let go: {failure.detail}")
        except TimeoutError:
            if not self._settling.yielded:
                return await self._blocked(provider)
        except Exception as fault:
            # Not by the provider's contract: the log is told before the fault goes on to whoever asked.
            await self._failed(Reason.INTERNAL, f"{self._owner.label}: {type(fault).__name__}: {fault}"[:2000])
            raise
        return await self._reclaimed()

    async def _tell_requested(self) -> int:
        owner, asker = self._owner, self._asker
        requested = facts.ReclaimRequested(
            host=self._room.host,
            device=self._device.id,
            runtime=owner.runtime,
            model=owner.model,
            promised_mb=owner.held_mb,
            free_mb=self._before.free_mb,
            idle_s=owner.idle_s,
            job=asker.job,
            need_mb=self._wanted_mb,
            wanted_seq=asker.wanted_seq,
            considered=self._found.considered,
        )
        return await self._append(requested)

    def _dropped(self) -> Hurdle | None:
        """Why the release is not to be sent any more, now that it is in the log; None where it is.

        Whatever was seen, pinned or begun while it was being stored counts, and so does that nobody looked since.
        """
        if not self._asker.wanted():
            return Hurdle(Reason.NOT_NEEDED, "whoever needed it is gone")
        name = (self._owner.runtime, self._owner.model)
        owners = self._room.owners_on(self._device.id, but=self._asker.epoch, releasing=False)
        again = next((each for each in owners if (each.runtime, each.model) == name), None)
        if again is None:
            return Hurdle(Reason.NOT_NEEDED, "it holds nothing there any more")
        return next(iter(hurdles(again)), None)

    async def _reclaimed(self) -> Released:
        owner, asker, settling = self._owner, self._asker, self._settling
        short = self._wanted_mb is not None and settling.free_mb < self._wanted_mb
        more = asker.wanted_seq is not None and (self._more or short)
        reclaimed = facts.Reclaimed(
            host=self._room.host,
            device=self._device.id,
            generation=self._generation,
            runtime=owner.runtime,
            model=owner.model,
            promised_mb=owner.held_mb,
            measured_mb=settling.measured_mb,
            free_mb=settling.free_mb,
            settle_s=self._since_s(),
            job=asker.job,
            wanted_seq=asker.wanted_seq,
            more=more,
        )
        unloaded = ModelUnloaded(
            host=self._room.host,
            runtime=owner.runtime,
            model=owner.model,
            why="reclaim" if asker.wanted_seq is None else "operator",
            job=asker.job,
            generation=self._generation,
        )
        # At once: whoever asked waits for both, and the device is free already.
        runtime_subject = self._room.runtime_subject(owner.runtime)
        await asyncio.gather(self._append(reclaimed), runtime_subject.append(unloaded, job=asker.job))
        return Released(generation=self._generation, more=more)

    async def _blocked(self, provider: Provider) -> Released:
        """It accepted, and the device does not show it: nothing more is given out there until it does."""
        room, owner, device, settling = self._room, self._owner, self._device.id, self._settling
        look = await room.residency(provider)
        if look.resident is None:
            reason, says = Reason.HANDOFF_TIMEOUT, "it does not say what it holds"
        elif look.resident and (owner.model is None or provider.find(look, owner.model) is not None):
            reason, says = Reason.HANDOFF_TIMEOUT, "it still lists what it should have let go of"
        else:
            reason, says = Reason.RELEASE_FAILED, "it says that it holds nothing more; the owner of the rest is unknown"
        detail = (
            f"{owner.label} accepted to let go of {settling.promised_mb} MB; {settling.measured_mb} MB became free on "
            f"{device} in {self._since_s():.0f} s, and {says}"
        )
        room.block(device, detail, free_mb=settling.before_mb + settling.promised_mb // 2)
        failed = await self._failed(reason, detail)
        room.told_states[device] = "blocked"
        await room.device_subject(device).append(
            facts.Changed(host=room.host, device=device, state="blocked", detail=detail)
        )
        _log.warning("device_blocked", device=device, detail=detail)
        return failed

    async def _failed(self, reason: Reason, detail: str) -> Released:
        owner, asker = self._owner, self._asker
        if owner.model is not None:
            self._room.tenancy.stays(owner.runtime, owner.model)
        more = asker.wanted_seq is not None and self._device.id not in self._room.blocked
        failed = facts.ReclaimFailed(
            host=self._room.host,
            device=self._device.id,
            generation=self._generation,
            runtime=owner.runtime,
            model=owner.model,
            reason=reason,
            detail=detail,
            free_mb=self._settling.free_mb,
            waited_s=self._since_s(),
            job=asker.job,
            wanted_seq=asker.wanted_seq,
            more=more,
        )
        await self._append(failed)
        return Released(generation=self._generation, reason=reason, detail=detail, more=more)

    async def _append(self, fact: Fact) -> int:
        subject = self._room.device_subject(self._device.id)
        return await subject.append(fact, job=self._asker.job, epoch=self._asker.epoch)

    def _since_s(self) -> float:
        return round(asyncio.get_running_loop().time() - self._began_s, 3)


async def settle(room: HostRoom, device_id: str, settling: Settling) -> None:
    """Read the device until it shows enough, or no longer moves. The caller bounds it."""
    while True:
        reading = await room.inventory.read(device_id)
        free_mb = reading.free_mb if reading.state == "healthy" else None
        if settling.saw(free_mb, asyncio.get_running_loop().time()) != "moving":
            return
        await asyncio.sleep(_LOOK_EVERY_S)
