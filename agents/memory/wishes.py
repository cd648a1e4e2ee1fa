"""What operators ask of this host's agent: to free memory, and to begin, stop or restart a container.

A wish stands on the device's or the runtime's subject and is answered there, once. Wishes about one thing are answered
one after another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, cast

import structlog

from gpukeeper.agents.containers.steward import ActOutcome
from gpukeeper.agents.memory.handoff import Refused
from gpukeeper.agents.memory.release import Asker
from gpukeeper.agents.writer import NotRecorded
from gpukeeper.events.device import ReclaimRefused
from gpukeeper.events.reasons import Reason
from gpukeeper.events.runtime import Act, Acted
from gpukeeper.events.tasks import end_all

if TYPE_CHECKING:
    from gpukeeper.agents.containers.steward import Steward
    from gpukeeper.agents.room import HostRoom
    from gpukeeper.projections.device import ReclaimWish
    from gpukeeper.projections.host import ActWish

_log = structlog.get_logger("gpukeeper.wishes")

#: How long a wish waits for its turn on the device.
TURN_LIMIT_S = 600.0


class Wishes:
    """Takes up the wishes that the log shows, each once."""

    def __init__(self, room: HostRoom, steward: Steward | None) -> None:
        self._room = room
        self._steward = steward
        self._going: dict[int, asyncio.Task[None]] = {}

    def take_up(self) -> None:
        """Begin what is new."""
        for seq, (device, wish) in self._room.view.reclaim_wishes.items():
            if seq not in self._going:
                self._begin(seq, self._reclaim(device, wish))
        for seq, (runtime, wish) in self._room.view.act_wishes.items():
            if seq not in self._going:
                self._begin(seq, self._act(runtime, wish))
        open_wishes = {*self._room.view.reclaim_wishes, *self._room.view.act_wishes}
        for seq in [seq for seq, task in self._going.items() if task.done() and seq not in open_wishes]:
            del self._going[seq]

    async def close(self) -> None:
        """Leave what is under way. What is unanswered is taken up by the next agent of this host."""
        await end_all(self._going.values())

    def _begin(self, seq: int, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work, name=f"wish {seq}")
        task.add_done_callback(_look_at)
        self._going[seq] = task

    async def _reclaim(self, device_id: str, wish: ReclaimWish) -> None:
        room = self._room
        device = next((each for each in room.inventory.devices if each.id == device_id), None)
        if device is None:
            await self._refuse(device_id, wish, Reason.UNKNOWN_DEVICE, "this host does not find the device now")
            return
        try:
            async with asyncio.timeout(TURN_LIMIT_S):
                turn = await room.turns.take((device_id,))
        except TimeoutError:
            detail = f"loads and releases took turns there for {TURN_LIMIT_S:g} s"
            await self._refuse(device_id, wish, Reason.OWNER_BUSY, detail)
            return
        try:
            asker = Asker(wanted_seq=wish.seq, runtime=wish.runtime, model=wish.model, turn_on=(device_id,))
            made = await room.handoff.make_room(device, wish.vram_mb, asker)
            if isinstance(made, Refused):
                if made.reason is Reason.DEVICE_UNKNOWN:
                    await self._refuse(device_id, wish, made.reason, made.detail)
            elif not made.answered:
                await self._refuse(device_id, wish, Reason.NOT_NEEDED, f"{made.free_mb} MB are free already")
        finally:
            try:
                await room.handoff.over(device_id)
            finally:
                turn.leave()

    async def _refuse(self, device_id: str, wish: ReclaimWish, reason: Reason, detail: str) -> None:
        refused = ReclaimRefused(
            host=self._room.host,
            device=device_id,
            reason=reason,
            detail=detail,
            need_mb=wish.vram_mb,
            wanted_seq=wish.seq,
        )
        await self._room.device_subject(device_id).append(refused)

    async def _act(self, runtime: str, wish: ActWish) -> None:
        room = self._room
        outcome = self._why_not(runtime, wish.act) or await self._in_turn(runtime, wish.act)
        acted = Acted(
            host=room.host,
            runtime=runtime,
            act=cast("Act", wish.act),
            wanted_seq=wish.seq,
            done=outcome.done,
            reason=outcome.reason,
            detail=outcome.detail,
        )
        await room.runtime_subject(runtime).append(acted)

    def _why_not(self, runtime: str, act: str) -> ActOutcome | None:
        """Why nobody tries it now; None where it may be tried."""
        jobs = self._room.tenancy.jobs(runtime)
        if act != "begin" and jobs:
            detail = f"{jobs} job(s) load or run there: cancel them or drain its devices first"
            return ActOutcome(done=False, reason=Reason.OWNER_BUSY, detail=detail)
        if self._steward is None:
            return ActOutcome(done=False, reason=Reason.NO_CONTAINER, detail="the registry names no container")
        return None

    async def _in_turn(self, runtime: str, act: str) -> ActOutcome:
        """Act while nobody loads or releases on its devices: the device would show both as one change."""
        assert self._steward is not None, "looked at before"
        room = self._room
        try:
            async with asyncio.timeout(TURN_LIMIT_S):
                turn = await room.turns.take(self._devices_of(runtime))
        except TimeoutError:
            detail = f"loads and releases took turns on its devices for {TURN_LIMIT_S:g} s"
            return ActOutcome(done=False, reason=Reason.OWNER_BUSY, detail=detail)
        try:
            # A job may have come meanwhile.
            why_not = self._why_not(runtime, act)
            if why_not is not None:
                return why_not
            room.tenancy.begin_release(runtime, None)
            try:
                return await self._steward.perform(runtime, cast("Act", act))
            finally:
                room.tenancy.end_release(runtime)
        finally:
            turn.leave()

    def _devices_of(self, runtime: str) -> tuple[str, ...]:
        """All that it may use: those that its registry entry names, or all of the host."""
        provider = self._room.tenancy.provider(runtime)
        named = () if provider is None else provider.config.devices
        return named or tuple(device.id for device in self._room.inventory.devices)


def _look_at(task: asyncio.Task[None]) -> None:
    if task.cancelled():
        return
    error = task.exception()
    if isinstance(error, NotRecorded):
        _log.error("wish_not_answered", why=error.message)
    elif error is not None:
        _log.error("wish_broke", exc_info=error)
