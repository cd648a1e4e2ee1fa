"""Facts about one registered runtime of a host."""

from __future__ import annotations

from typing import ClassVar, Literal

from gpukeeper.events.fact import Fact
from gpukeeper.events.readings import Releases
from gpukeeper.events.reasons import Reason

#: What an operator may do to a runtime that runs in a container.
Act = Literal["begin", "stop", "restart"]


class Registered(Fact, frozen=True, kw_only=True):
    """The runtime is in the host's registry, with these settings."""

    TYPE: ClassVar[str] = "gpuq.runtime.registered.v1"

    host: str
    runtime: str
    provider: str
    url: str
    devices: tuple[str, ...]
    loads_models: bool
    releases: Releases = "none"
    #: How long it must have been idle without a break before it may be asked to let go.
    idle_grace_s: float = 300.0
    container: str | None = None
    #: Models that it may fetch when they are missing, as shell patterns; none where it cannot fetch.
    pull: tuple[str, ...] = ()


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
    device: str | None = None
    #: What the load took on the device, as measured; None where that could not be.
    vram_mb: int | None = None
    #: Options that belong to the loaded model (such as its context length), in one canonical text.
    load_options: str = ""


class ModelUnloaded(Fact, frozen=True, kw_only=True):
    """The agent had the runtime let go of a model, or of all that it held."""

    TYPE: ClassVar[str] = "gpuq.runtime.model_unloaded.v1"

    host: str
    runtime: str
    model: str | None = None
    why: Literal["reclaim", "policy", "operator"]
    job: str | None = None
    generation: int | None = None


class Pinned(Fact, frozen=True, kw_only=True):
    """The model (or whatever the runtime holds) stays until it is unpinned: no reclaim, no unload."""

    TYPE: ClassVar[str] = "gpuq.runtime.pinned.v1"

    host: str
    runtime: str
    model: str | None = None
    actor: str
    reason: str = ""
    command_seq: int | None = None
    job: str | None = None


class Unpinned(Fact, frozen=True, kw_only=True):
    """The pin is gone."""

    TYPE: ClassVar[str] = "gpuq.runtime.unpinned.v1"

    host: str
    runtime: str
    model: str | None = None
    actor: str
    reason: str = ""
    command_seq: int | None = None


class ActWanted(Fact, frozen=True, kw_only=True):
    """An operator asked to begin, stop or restart the runtime's container."""

    TYPE: ClassVar[str] = "gpuq.runtime.act_wanted.v1"

    host: str
    runtime: str
    act: Act
    command_seq: int
    actor: str
    reason: str = ""


class Acted(Fact, frozen=True, kw_only=True):
    """What became of it."""

    TYPE: ClassVar[str] = "gpuq.runtime.acted.v1"

    host: str
    runtime: str
    act: Act
    wanted_seq: int
    done: bool
    reason: Reason | None = None
    detail: str = ""


class ProvisionStarted(Fact, frozen=True, kw_only=True):
    """A model that is missing is being fetched, once for all jobs that wait for it."""

    TYPE: ClassVar[str] = "gpuq.runtime.provision_started.v1"

    host: str
    runtime: str
    model: str
    job: str


class ProvisionProgress(Fact, frozen=True, kw_only=True):
    """How far a fetch is, at a bounded rate."""

    TYPE: ClassVar[str] = "gpuq.runtime.provision_progress.v1"

    host: str
    runtime: str
    model: str
    job: str
    status: str
    completed_bytes: int | None = None
    total_bytes: int | None = None


class Provisioned(Fact, frozen=True, kw_only=True):
    """The model is there now."""

    TYPE: ClassVar[str] = "gpuq.runtime.provisioned.v1"

    host: str
    runtime: str
    model: str
    job: str
    took_s: float


class ProvisionFailed(Fact, frozen=True, kw_only=True):
    """The model could not be fetched; the runtime's own words are kept."""

    TYPE: ClassVar[str] = "gpuq.runtime.provision_failed.v1"

    host: str
    runtime: str
    model: str
    job: str
    reason: Reason
    detail: str


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
