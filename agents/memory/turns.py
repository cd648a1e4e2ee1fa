"""One load or release at a time on each device: whoever changes what a device holds takes its turn."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable


class Turn:
    """The right to load into and release from some devices. Leave it once; leaving twice changes nothing."""

    def __init__(self, locks: list[asyncio.Lock]) -> None:
        self._locks = locks

    def leave(self) -> None:
        while self._locks:
            self._locks.pop().release()


class Turns:
    """The turns of all devices of one host."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}

    async def take(self, devices: Iterable[str]) -> Turn:
        """Wait for the turn on all ``devices``. They are taken in one fixed order, so that nobody waits in a circle.

        The caller bounds the wait. One that is cancelled holds nothing.
        """
        taken: list[asyncio.Lock] = []
        try:
            for device in sorted(set(devices)):
                lock = self._locks.setdefault(device, asyncio.Lock())
                await lock.acquire()
                taken.append(lock)
        except BaseException:
            Turn(taken).leave()
            raise
        return Turn(taken)

    def taken(self, device: str) -> bool:
        """Whether somebody loads or releases there now."""
        lock = self._locks.get(device)
        return lock is not None and lock.locked()
