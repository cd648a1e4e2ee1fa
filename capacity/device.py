"""A device as decisions about memory see it. Pure."""

from __future__ import annotations

import msgspec

from gpukeeper.events.readings import DeviceKind


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
