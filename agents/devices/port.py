"""What every source of device readings offers."""

from __future__ import annotations

from typing import Protocol

import msgspec

from gpukeeper.events.readings import DeviceKind, DeviceReading


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One device of this host, as found or declared."""

    id: str
    kind: DeviceKind
    name: str
    slots: int = 1
    headroom_mb: int = 0
    #: Capacity, where it is known without a reading or limited by the configuration.
    limit_mb: int | None = None
    #: The part that this is a slice of (MIG), for display.
    parent: str | None = None
    #: The driver's index at the time it was found: for display, never identity.
    index: int | None = None
    #: Set where the device may not be scheduled at all, in words (a MIG parent, a card without memory figures).
    unschedulable: str | None = None


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
