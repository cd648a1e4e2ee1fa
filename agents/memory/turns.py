"""One load or release at a time on each device: whoever changes what a device holds takes its turn."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable


class Turn:
    """The right to load into and release from some devices. Leave it once; leaving twice changes nothing."""

    def __init__(self, turns: Turns, devices: list[str]) -> None:
        self._turns = turns
        self._devices = devices

    def leave(self) -> None:
        while self._devices:
            self._turns.pass_on(self._devices.pop())


class Turns:
    """The turns of all devices of one host; who waits for one gets it in the order of coming."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def take(self, devices: Iterable[str]) -> Turn:
        """Wait for the turn on all ``devices``. They are taken in one fixed order, so that nobody waits in a circle.

        The caller bounds the wait. One that is cancelled holds nothing.
        """
        taken: list[str] = []
        try:
            for device in sorted(set(devices)):
                await self._take_one(device)
                taken.append(device)
        except BaseException:
            Turn(self, taken).leave()
            raise
        return Turn(self, taken)

    def take_at_once(self, devices: Iterable[str]) -> Turn | None:
        """The turn on all ``devices``, or None where somebody has that of one of them.

        For who holds a turn already: waiting for more with it in hand could wait in a circle.
        """
        wanted = sorted(set(devices))
        if any(device in self._taken for device in wanted):
            return None
        self._taken.update(wanted)
        return Turn(self, wanted)

    def taken(self, device: str) -> bool:
        """Whether somebody loads or releases there now."""
        return device in self._taken

    def pass_on(self, device: str) -> None:
        """Give the turn to whoever waits longest, or to nobody."""
        waiting = self._waiting.get(device)
        while waiting:
            next_one = waiting.popleft()
            if not next_one.done():
                next_one.set_result(None)
                return
        self._waiting.pop(device, None)
        self._taken.discard(device)

    async def _take_one(self, device: str) -> None:
        if device not in self._taken:
            self._taken.add(device)
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(device, deque()).append(mine)
        try:
            await mine
        except BaseException:
            if mine.done() and not mine.cancelled():
                # It came in the same moment.
                self.pass_on(device)
            raise
