"""Devices that nobody can measure: the configuration says what they hold, reservations say what is taken."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from gpukeeper.capacity.device import Device
from gpukeeper.events.instants import utc_text
from gpukeeper.events.readings import DeviceReading

NO_CAPACITY = "a static device without total_mb: its capacity is unknown, and unknown is never free"


class StaticSource:
    """The `static` devices that the configuration declares.

    A reading says nothing is used: use is counted by the reservations of the agent, which therefore stay in force as
    long as their claims do (see :class:`gpukeeper.capacity.admission.Ledger`).
    """

    def __init__(self, declared: tuple[Device, ...], *, now: Callable[[], datetime]) -> None:
        self._declared = declared
        self._now = now

    async def find(self) -> tuple[Device, ...]:
        """The declared devices."""
        return self._declared

    async def read(self, device: Device) -> DeviceReading:
        """The declared capacity, all of it free; ``unknown`` where none is declared."""
        total_mb = device.limit_mb
        if total_mb is None:
            return DeviceReading(
                device=device.id,
                source="static",
                read_at=utc_text(self._now()),
                state="unknown",
                error=NO_CAPACITY,
            )
        return DeviceReading(
            device=device.id,
            source="static",
            read_at=utc_text(self._now()),
            total_mb=total_mb,
            used_mb=0,
            free_mb=total_mb,
        )

    def problem(self) -> str | None:
        """Which devices declare no capacity, or None."""
        bare = [device.id for device in self._declared if device.limit_mb is None]
        return f"{', '.join(bare)}: {NO_CAPACITY}" if bare else None

    async def close(self) -> None:
        """Nothing to give up."""
