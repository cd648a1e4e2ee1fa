"""NVIDIA GPUs through NVML, each in a lane of its own, so that one that hangs or is lost hides no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from gpukeeper.agents.devices.containers import PROC
from gpukeeper.agents.devices.hostmemory import PROC_MEMINFO
from gpukeeper.agents.devices.lane import Lane, LaneClosed, LaneStuck
from gpukeeper.agents.devices.nvml_library import NvmlFailure, NvmlLibrary, Status
from gpukeeper.agents.devices.nvml_probe import Found, measure, probe
from gpukeeper.agents.devices.pci import SYS_PCI, has_nvidia_hardware
from gpukeeper.capacity.device import Device
from gpukeeper.events.instants import utc_text
from gpukeeper.events.readings import DeviceReading, DeviceState

#: GPUs that are looked at. Each may cost a thread.
DEVICES_MAX = 64
_NO_DRIVER = frozenset({Status.LIBRARY_NOT_FOUND, Status.DRIVER_NOT_LOADED})


class NvmlSource:
    """Finds and reads NVIDIA GPUs and MIG slices by UUID.

    Threads: one for the driver as a whole and one for each GPU (its slices share it), started when first needed. While
    a GPU's call is stuck its readings are ``unknown`` at once and no thread is added; when the call returns the GPU is
    read again.

    A GPU that was found once stays listed, and reads ``lost`` when it is gone. A MIG slice that is gone from a GPU that
    answers is dropped: somebody configured it away. A GPU that is lost before it told its UUID has no identity to be
    listed under; :meth:`problem` tells of it.
    """

    def __init__(
        self,
        *,
        now: Callable[[], datetime],
        limit_s: float,
        meminfo: Path = PROC_MEMINFO,
        proc: Path = PROC,
        pci: Path = SYS_PCI,
    ) -> None:
        self._now = now
        self._limit_s = limit_s
        self._meminfo = meminfo
        self._proc = proc
        self._pci = pci
        self._driver = Lane("NVML")
        self._lanes: dict[int, Lane] = {}
        self._library: NvmlLibrary | None = None
        self._known: dict[str, Found] = {}
        self._finding = asyncio.Lock()
        self._driver_problem: str | None = None
        self._absent = False
        #: By the driver's index: what kept a GPU from being identified, and whether it may still turn out to be there.
        self._unidentified: dict[int, tuple[DeviceState, str]] = {}

    async def find(self) -> tuple[Device, ...]:
        """Every GPU and slice, in the driver's order, and those found earlier that are gone."""
        async with self._finding:
            await self._look()
        return tuple(found.device for found in self._known.values())

    async def read(self, device: Device) -> DeviceReading:
        """Measure one device. One that was never found is looked for first."""
        read_at = utc_text(self._now())  # before the call: the figures are at least this fresh
        if self._must_look(device):
            async with self._finding:
                if self._must_look(device):  # another reading may have looked meanwhile
                    await self._look()
        found = self._known.get(device.id)
        if found is None:
            state, error = self._why_absent()
            return DeviceReading(device=device.id, source="none", read_at=read_at, state=state, error=error)
        library = self._library
        try:
            if library is None:
                return _unknown(device.id, read_at, self._driver_problem or "NVML is not initialised")
            return await self._lane(found.index).call(
                lambda: measure(library, found, read_at=read_at, meminfo=self._meminfo, proc=self._proc),
                limit_s=self._limit_s,
            )
        except NvmlFailure as failure:  # the driver is gone: start it again at the next look
            self._library = None
            return _unknown(device.id, read_at, failure.message)
        except (LaneStuck, LaneClosed) as error:
            return _unknown(device.id, read_at, error.message)

    @property
    def absent(self) -> bool:
        """Whether the last look found neither a driver of NVIDIA's on this host nor hardware that it would be for."""
        return self._absent

    def problem(self) -> str | None:
        """What the last look could not do, or None."""
        parts = [self._driver_problem] if self._driver_problem else []
        parts += [f"GPU {index}: {text}" for index, (_, text) in sorted(self._unidentified.items())]
        return "; ".join(parts) or None

    async def close(self) -> None:
        """End the threads and shut NVML down. A thread that is stuck is left behind, and NVML then stays up."""
        ended = await asyncio.gather(*(lane.close(limit_s=self._limit_s) for lane in self._lanes.values()))
        library, self._library = self._library, None
        if library is not None and all(ended):
            try:
                await self._driver.call(library.shutdown, limit_s=self._limit_s)
            except (NvmlFailure, LaneStuck) as error:
                self._driver_problem = f"NVML did not shut down: {error.message}"
        await self._driver.close(limit_s=self._limit_s)

    def _must_look(self, device: Device) -> bool:
        return device.id not in self._known or self._library is None

    async def _look(self) -> None:
        self._unidentified.clear()
        try:
            library, count = await self._driver.call(self._start, limit_s=self._limit_s)
        except (NvmlFailure, LaneStuck, LaneClosed) as error:
            self._library = None
            self._absent = (
                isinstance(error, NvmlFailure) and error.status in _NO_DRIVER and not await self._has_hardware()
            )
            self._driver_problem = f"NVML: {error.message}"
            return
        except ImportError as error:
            self._driver_problem = f"NVML: the binding (nvidia-ml-py) cannot be imported: {error}"
            return
        self._library = library
        self._absent = False
        self._driver_problem = f"NVML lists {count} GPUs, {DEVICES_MAX} are used" if count > DEVICES_MAX else None
        looks = (self._identify(library, index) for index in range(min(count, DEVICES_MAX)))
        for seen in await asyncio.gather(*looks):
            self._remember(seen)

    def _start(self) -> tuple[NvmlLibrary, int]:
        """In the driver's thread: initialise NVML where that has not been done, and count the GPUs."""
        library = self._library
        if library is None:
            library = NvmlLibrary()
            library.init()
        return library, library.count()

    async def _has_hardware(self) -> bool:
        try:
            return await self._driver.call(lambda: has_nvidia_hardware(self._pci), limit_s=self._limit_s)
        except (LaneStuck, LaneClosed):
            return True  # nobody knows

    async def _identify(self, library: NvmlLibrary, index: int) -> tuple[Found, ...]:
        """The GPU at ``index`` and its slices; nothing where it cannot be identified, which is noted."""
        try:
            return await self._lane(index).call(lambda: probe(library, index), limit_s=self._limit_s)
        except NvmlFailure as failure:
            self._unidentified[index] = ("lost", failure.message)
        except (LaneStuck, LaneClosed) as error:
            self._unidentified[index] = ("unknown", error.message)
        return ()

    def _remember(self, seen: tuple[Found, ...]) -> None:
        present = {found.device.id for found in seen}
        for found in seen:
            if not found.is_slice:
                gone = [
                    device_id
                    for device_id, known in self._known.items()
                    if known.device.parent == found.device.id and device_id not in present
                ]
                for device_id in gone:
                    del self._known[device_id]
            self._known[found.device.id] = found

    def _why_absent(self) -> tuple[DeviceState, str]:
        """What to say of a device that the driver has never listed."""
        problem = self.problem()
        if self._library is None:
            return "unknown", problem or "NVML is not initialised"
        if problem is None:
            return "lost", "NVML lists no device of this id"
        hidden = any(state == "unknown" for state, _ in self._unidentified.values())
        return "unknown" if hidden else "lost", f"NVML lists no device of this id; {problem}"

    def _lane(self, index: int) -> Lane:
        if index not in self._lanes:
            self._lanes[index] = Lane(f"GPU {index}")
        return self._lanes[index]


def _unknown(device_id: str, read_at: str, error: str) -> DeviceReading:
    return DeviceReading(device=device_id, source="nvml", read_at=read_at, state="unknown", error=error)
