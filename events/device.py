"""Facts about one device, the claims on its slots and the memory that is taken back on it.

The device's agent writes them; the scheduler writes lapses, and what operators asked for.
"""

from __future__ import annotations

from typing import ClassVar

from gpukeeper.events.fact import Fact, Record
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


class Considered(Record, frozen=True, kw_only=True):
    """One owner of memory that was looked at: whether it would be asked to let go, or why not."""

    runtime: str
    #: None where the runtime can only let go of everything.
    model: str | None = None
    #: What it holds on this device; None where nobody can tell.
    held_mb: int | None = None
    #: Why it stays; None where it would be, or was, asked to let go.
    kept: Reason | None = None
    detail: str = ""


class ReclaimWanted(Fact, frozen=True, kw_only=True):
    """An operator asked to have memory freed; the agent decides by its own rules whether that is safe."""

    TYPE: ClassVar[str] = "gpuq.device.reclaim_wanted.v1"

    host: str
    device: str
    command_seq: int
    actor: str
    reason: str = ""
    #: Only this runtime, or only this model of it; any owner otherwise.
    runtime: str | None = None
    model: str | None = None
    #: How much is wanted; all that can be had where it is None.
    vram_mb: int | None = None


class ReclaimRequested(Fact, frozen=True, kw_only=True):
    """The agent is about to ask an owner to let go. The sequence of this fact is the generation of the release."""

    TYPE: ClassVar[str] = "gpuq.device.reclaim_requested.v1"

    host: str
    device: str
    runtime: str
    model: str | None = None
    #: What should become free; None where nobody can tell.
    promised_mb: int | None = None
    free_mb: int | None = None
    idle_s: float | None = None
    #: The job that needs it, or the wish of an operator.
    job: str | None = None
    need_mb: int | None = None
    wanted_seq: int | None = None
    considered: tuple[Considered, ...] = ()


class ReclaimRefused(Fact, frozen=True, kw_only=True):
    """Nothing that may be taken back would be enough: every owner stays, and why."""

    TYPE: ClassVar[str] = "gpuq.device.reclaim_refused.v1"

    host: str
    device: str
    reason: Reason
    detail: str
    job: str | None = None
    need_mb: int | None = None
    wanted_seq: int | None = None
    considered: tuple[Considered, ...] = ()


class Reclaimed(Fact, frozen=True, kw_only=True):
    """The device shows that memory became free: what was promised, and what was measured."""

    TYPE: ClassVar[str] = "gpuq.device.reclaimed.v1"

    host: str
    device: str
    generation: int
    runtime: str
    model: str | None = None
    promised_mb: int | None = None
    #: By how much the free memory rose.
    measured_mb: int
    free_mb: int
    #: From the request until the reading no longer moved.
    settle_s: float
    job: str | None = None
    wanted_seq: int | None = None
    #: Another release, or another answer, for the same wish follows.
    more: bool = False


class ReclaimFailed(Fact, frozen=True, kw_only=True):
    """The owner did not let go, or the device does not show it."""

    TYPE: ClassVar[str] = "gpuq.device.reclaim_failed.v1"

    host: str
    device: str
    generation: int
    runtime: str
    model: str | None = None
    reason: Reason
    detail: str
    free_mb: int | None = None
    waited_s: float = 0.0
    job: str | None = None
    wanted_seq: int | None = None
    #: Another release, or another answer, for the same wish follows.
    more: bool = False


class HandedOff(Fact, frozen=True, kw_only=True):
    """Enough is free now, by measurement: the job that asked goes on to load."""

    TYPE: ClassVar[str] = "gpuq.device.handed_off.v1"

    host: str
    device: str
    job: str
    epoch: int
    need_mb: int
    free_mb: int
    #: The releases that led to it.
    generations: tuple[int, ...] = ()


class Drained(Fact, frozen=True, kw_only=True):
    """An operator took the device out of service: what runs goes on, nothing new begins."""

    TYPE: ClassVar[str] = "gpuq.device.drained.v1"

    host: str
    device: str
    command_seq: int
    actor: str
    reason: str = ""


class Resumed(Fact, frozen=True, kw_only=True):
    """An operator put the device back into service."""

    TYPE: ClassVar[str] = "gpuq.device.resumed.v1"

    host: str
    device: str
    command_seq: int
    actor: str
    reason: str = ""
