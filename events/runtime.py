"""Facts about one registered runtime of a host."""

from __future__ import annotations

from typing import ClassVar

from gpukeeper.events.fact import Fact
from gpukeeper.events.reasons import Reason


class Registered(Fact, frozen=True, kw_only=True):
    """The runtime is in the host's registry, with these settings."""

    TYPE: ClassVar[str] = "gpuq.runtime.registered.v1"

    host: str
    runtime: str
    provider: str
    url: str
    devices: tuple[str, ...]
    loads_models: bool


class HealthChanged(Fact, frozen=True, kw_only=True):
    """Health, catalogue or trust changed. ``models`` is None where the runtime did not say what it has.

    A suspicion ends with the first of these that names none.
    """

    TYPE: ClassVar[str] = "gpuq.runtime.health_changed.v1"

    host: str
    runtime: str
    healthy: bool
    models: tuple[str, ...] | None = None
    detail: str = ""
    #: Why no work goes there still, where a placement check failed and nothing has shown better since.
    suspect: str | None = None


class ModelLoaded(Fact, frozen=True, kw_only=True):
    """The agent had the runtime load a model for a job."""

    TYPE: ClassVar[str] = "gpuq.runtime.model_loaded.v1"

    host: str
    runtime: str
    model: str
    job: str
    epoch: int
    load_s: float


class Suspect(Fact, frozen=True, kw_only=True):
    """A model did not sit where it should: no work goes there until a ``health_changed`` names no suspicion."""

    TYPE: ClassVar[str] = "gpuq.runtime.suspect.v1"

    host: str
    runtime: str
    model: str
    job: str
    reason: Reason
    detail: str
    #: The device it should have been on.
    device: str = ""
