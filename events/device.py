"""Facts about one device and the claims on its slots. The device's agent writes them; the reaper writes lapses."""

from __future__ import annotations

from typing import ClassVar

from gpukeeper.events.fact import Fact
from gpukeeper.events.readings import ClaimBeat, DeviceKind, DeviceReading, DeviceState
from gpukeeper.events.reasons import Reason


class Appeared(Fact, frozen=True, kw_only=True):
    """The agent found the device, or found it changed."""

    TYPE: ClassVar[str] = "gpuq.device.appeared.v1"

    host: str
    device: str
    kind: DeviceKind
    name: str
    slots: int
    #: Capacity in MB, or None where it is unknown.
    total_mb: int | None = None
    headroom_mb: int = 0
    #: Why it may not be scheduled, where it may not.
    unschedulable: str | None = None
    parent: str | None = None


class Changed(Fact, frozen=True, kw_only=True):
    """The state of the device is another one than before."""

    TYPE: ClassVar[str] = "gpuq.device.changed.v1"

    host: str
    device: str
    state: DeviceState
    detail: str = ""
    reading: DeviceReading | None = None


class Claimed(Fact, frozen=True, kw_only=True):
    """One slot is taken for one attempt of one job. The sequence of this fact is the claim's epoch."""

    TYPE: ClassVar[str] = "gpuq.device.claimed.v1"

    host: str
    device: str
    slot: int
    job: str
    attempt: int
    route_seq: int
    boot_id: str
    instance_id: str


class Released(Fact, frozen=True, kw_only=True):
    """The slot is free again."""

    TYPE: ClassVar[str] = "gpuq.device.released.v1"

    host: str
    device: str
    epoch: int
    job: str


class ClaimLapsed(Fact, frozen=True, kw_only=True):
    """The claim ended without its agent's word; the job's own end follows from it."""

    TYPE: ClassVar[str] = "gpuq.device.claim_lapsed.v1"

    host: str
    device: str
    epoch: int
    job: str
    reason: Reason
    #: Who ended it and on what evidence, in words.
    detail: str
    last_beat: ClaimBeat | None = None
    last_beat_at: str | None = None
    silent_s: float | None = None
