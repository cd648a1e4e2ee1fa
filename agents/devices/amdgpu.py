"""AMD GPUs through sysfs, each in a lane of its own, so that one that hangs or is gone hides no other."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import msgspec

from gpukeeper.agents.devices.amdgpu_sysfs import SYS_DRM, Card, CardUnreadable, card_folders, measure, probe
from gpukeeper.agents.devices.hostmemory import PROC_MEMINFO
from gpukeeper.agents.devices.lane import Lane, LaneClosed, LaneStuck
from gpukeeper.capacity.device import Device
from gpukeeper.events.instants import utc_text
from gpukeeper.events.readings import DeviceReading, DeviceState

#: GPUs that are looked at. Each may cost a thread.
DEVICES_MAX = 64


class AmdSource:
    """Finds and reads AMD GPUs under ids made of the chip's ``unique_id``, else of the PCI address.

    Two parts of one ``unique_id`` (partitions of one chip) go by their PCI addresses. A GPU that was found once stays
    listed, and reads ``lost`` while it is gone; it is found again when it returns, under whatever number.
    """

    def __init__(
        self, *, now: Callable[[], datetime], limit_s: float, drm: Path = SYS_DRM, meminfo: Path = PROC_MEMINFO
    ) -> None:
        self._now = now
        self._limit_s = limit_s
        self._drm = drm
        self._meminfo = meminfo
        self._list = Lane("AMD GPUs")
        self._lanes: dict[str, Lane] = {}
        self._known: dict[str, Card] = {}
        self._finding = asyncio.Lock()
        self._list_problem: str | None = None
        #: By folder: what kept a GPU from being identified.
        self._unidentified: dict[str, str] = {}

    async def find(self) -> tuple[Device, ...]:
        """Every AMD GPU, in the kernel's order, and those found earlier that are gone."""
        async with self._finding:
            await self._look()
        return tuple(card.device for card in self._known.values())

    async def read(self, device: Device) -> DeviceReading:
        """Measure one device. One that is not where it was found is looked for, once."""
        read_at = utc_text(self._now())  # before the call: the figures are at least this fresh
        card = self._known.get(device.id)
        reading = None if card is None else await self._measure(card, read_at)
        if reading is not None and reading.state != "lost":
            return reading
        async with self._finding:
            if self._known.get(device.id) == card:  # another reading may have looked meanwhile
                await self._look()
        found = self._known.get(device.id)
        if found is not None and found != card:
            return await self._measure(found, read_at)
        return reading or self._absent(device.id, read_at)

    def is_integrated(self, device_id: str) -> bool:
        """Whether this device is a part of a processor rather than a card."""
        card = self._known.get(device_id)
        return card is not None and card.integrated

    def problem(self) -> str | None:
        """What the last look could not do, or None. That there are no AMD GPUs is no problem."""
        parts = [self._list_problem] if self._list_problem else []
        parts += [text for _, text in sorted(self._unidentified.items())]
        return "; ".join(parts) or None

    async def close(self) -> None:
        """End the threads. One that is stuck is left behind."""
        lanes = (self._list, *self._lanes.values())
        await asyncio.gather(*(lane.close(limit_s=self._limit_s) for lane in lanes))

    async def _measure(self, card: Card, read_at: str) -> DeviceReading:
        try:
            return await self._lane(card.folder).call(
                lambda: measure(self._drm, card, read_at=read_at, meminfo=self._meminfo), limit_s=self._limit_s
            )
        except (LaneStuck, LaneClosed) as error:
            return _failed(card.device.id, read_at, "unknown", error.message)

    async def _look(self) -> None:
        self._unidentified.clear()
        try:
            folders = await self._list.call(lambda: card_folders(self._drm), limit_s=self._limit_s)
        except (CardUnreadable, LaneStuck, LaneClosed) as error:
            self._list_problem = f"AMD GPUs: {error.message}"
            return
        count = len(folders)
        self._list_problem = f"the kernel lists {count} GPUs, {DEVICES_MAX} are used" if count > DEVICES_MAX else None
        looks = await asyncio.gather(*(self._identify(folder) for folder in folders[:DEVICES_MAX]))
        cards = [card for card in looks if card is not None]
        shared = Counter(card.device.id for card in cards)
        for card in cards:
            told = card if shared[card.device.id] == 1 else self._by_place(card)
            if told is not None:
                self._known[told.device.id] = told

    async def _identify(self, folder: str) -> Card | None:
        """The AMD GPU in this folder; None where it is none, or cannot be identified, which is noted."""
        try:
            return await self._lane(folder).call(lambda: probe(self._drm, folder), limit_s=self._limit_s)
        except CardUnreadable as error:
            self._unidentified[folder] = error.message
        except (LaneStuck, LaneClosed) as error:
            self._unidentified[folder] = f"{folder}: {error.message}"
        return None

    def _by_place(self, card: Card) -> Card | None:
        """The card under the id of its place; None, which is noted, where that is not told either."""
        if card.place_id is None or card.place_id == card.device.id:
            self._unidentified[card.folder] = f"{card.folder}: another GPU goes by {card.device.id} too"
            return None
        return msgspec.structs.replace(card, device=msgspec.structs.replace(card.device, id=card.place_id))

    def _absent(self, device_id: str, read_at: str) -> DeviceReading:
        """What to say of a device that the kernel has never listed."""
        problem = self.problem()
        text = "the kernel lists no AMD GPU of this id"
        if problem is None:
            return _failed(device_id, read_at, "lost", text)
        return _failed(device_id, read_at, "unknown", f"{text}; {problem}")

    def _lane(self, folder: str) -> Lane:
        if folder not in self._lanes:
            self._lanes[folder] = Lane(f"AMD {folder}")
        return self._lanes[folder]


def _failed(device_id: str, read_at: str, state: DeviceState, error: str) -> DeviceReading:
    return DeviceReading(device=device_id, source="amdgpu", read_at=read_at, state=state, error=error)
