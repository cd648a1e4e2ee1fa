"""What every source of device readings offers."""

from __future__ import annotations

from typing import Protocol

from gpukeeper.capacity.device import Device
from gpukeeper.events.readings import DeviceReading


class DeviceSource(Protocol):
    """Finds devices and reads them. Time-limited; one device's failure never hides another's reading."""

    async def find(self) -> tuple[Device, ...]:
        """The devices of this source now. Never raises for a missing driver: no devices then."""
        ...

    async def read(self, device: Device) -> DeviceReading:
        """Measure one device. Never raises: what failed is ``state`` lost or unknown with ``error``."""
        ...

    def problem(self) -> str | None:
        """Why this source finds nothing (no driver, a wrong version), in words, for `gpuq doctor`."""
        ...

    async def close(self) -> None:
        """Give up the driver and the thread. May be called twice."""
        ...
