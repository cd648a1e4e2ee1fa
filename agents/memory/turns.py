"""One load or release at a time on each device: whoever changes what a device holds takes its turn."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable


class Turn:
    """The right to load into and release from some devices. Leave it once; leaving twice changes nothing."""

    def __init__(self, turns: Turns, devices: frozenset[str]) -> None:
        self._turns = turns
        self.devices = devices
        self._left = False

    def leave(self) -> None:
        if not self._left:
            self._left = True
            self._turns.give_back(self.devices)


class Turns:
    """The turns of all devices of one host.

    All devices of a turn are given at once, in the order of asking: nobody holds one while it waits for another, and
    who waits for several is not passed by those who came later for one of them.
    """

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._waiting: list[tuple[frozenset[str], asyncio.Future[Turn]]] = []

    async def take(self, devices: Iterable[str]) -> Turn:
        """Wait for the turn on all ``devices``. The caller bounds the wait. One that is cancelled holds nothing."""
        wanted = frozenset(devices)
        given: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self._waiting.append((wanted, given))
        self._give_out()
        try:
            return await given
        except asyncio.CancelledError:
            if given.done() and not given.cancelled():
                given.result().leave()
            else:
                self._waiting.remove((wanted, given))
                self._give_out()
            raise

    def take_at_once(self, devices: Iterable[str]) -> Turn | None:
        """The turn on all ``devices`` if nobody holds any of them, past those who wait; None otherwise."""
        wanted = frozenset(devices)
        if wanted & self._taken:
            return None
        self._taken |= wanted
        return Turn(self, wanted)

    def taken(self, device: str) -> bool:
        """Whether somebody loads or releases there now."""
        return device in self._taken

    def give_back(self, devices: frozenset[str]) -> None:
        """What a :class:`Turn` does when it is left."""
        self._taken -= devices
        self._give_out()

    def _give_out(self) -> None:
        """Give a turn to each of the waiting whose devices are neither taken nor wanted by one before it."""
        spoken_for = set(self._taken)
        still: list[tuple[frozenset[str], asyncio.Future[Turn]]] = []
        for wanted, given in self._waiting:
            if wanted & spoken_for:
                still.append((wanted, given))
            else:
                self._taken |= wanted
                given.set_result(Turn(self, wanted))
            spoken_for |= wanted
        self._waiting = still
