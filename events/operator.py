"""Commands of operators: facts about what somebody asked for, each with an actor and a reason."""

from __future__ import annotations

from typing import ClassVar

from gpukeeper.events.fact import Fact
from gpukeeper.events.runtime import Act


class Cancel(Fact, frozen=True, kw_only=True):
    """End this job, whatever its state."""

    TYPE: ClassVar[str] = "gpuq.operator.cancel.v1"

    job: str
    reason: str = ""


class Reclaim(Fact, frozen=True, kw_only=True):
    """Free memory on a device, as far as that is safe."""

    TYPE: ClassVar[str] = "gpuq.operator.reclaim.v1"

    host: str
    device: str
    runtime: str | None = None
    model: str | None = None
    vram_mb: int | None = None
    reason: str = ""


class Pin(Fact, frozen=True, kw_only=True):
    """Keep a model, or all that a runtime holds, until it is unpinned."""

    TYPE: ClassVar[str] = "gpuq.operator.pin.v1"

    host: str
    runtime: str
    model: str | None = None
    reason: str = ""


class Unpin(Fact, frozen=True, kw_only=True):
    """Take a pin away."""

    TYPE: ClassVar[str] = "gpuq.operator.unpin.v1"

    host: str
    runtime: str
    model: str | None = None
    reason: str = ""


class Drain(Fact, frozen=True, kw_only=True):
    """Take a device out of service: what runs goes on, nothing new begins."""

    TYPE: ClassVar[str] = "gpuq.operator.drain.v1"

    host: str
    device: str
    reason: str = ""


class Resume(Fact, frozen=True, kw_only=True):
    """Put a device back into service."""

    TYPE: ClassVar[str] = "gpuq.operator.resume.v1"

    host: str
    device: str
    reason: str = ""


class RuntimeAct(Fact, frozen=True, kw_only=True):
    """Begin, stop or restart a runtime that runs in a container."""

    TYPE: ClassVar[str] = "gpuq.operator.runtime_act.v1"

    host: str
    runtime: str
    act: Act
    reason: str = ""
