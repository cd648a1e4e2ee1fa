"""What an agent measured: devices, runtimes, and the heartbeat that carries both.

Unknown is a value: a figure that could not be read is ``None``, never 0.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from gpukeeper.events.fact import Fact, Record

DeviceKind = Literal["gpu", "cpu"]
DeviceState = Literal["healthy", "lost", "blocked", "unknown"]
Activity = Literal["busy", "idle", "unknown"]


#: What a runtime can be asked to give back: nothing, one model at a time, or all that it holds.
Releases = Literal["none", "model", "all"]


class ProcessUse(Record, frozen=True, kw_only=True):
    """Memory that one process holds on a device. ``used_mb`` is None where the driver does not tell."""

    pid: int
    used_mb: int | None = None
    #: The container that the process runs in, by name or id, where that is known.
    container: str | None = None


class DeviceReading(Record, frozen=True, kw_only=True):
    """One measurement of one device, in MB of 2^20 bytes."""

    device: str
    source: Literal["nvml", "amdgpu", "meminfo", "static", "none"]
    read_at: str
    state: DeviceState = "healthy"
    total_mb: int | None = None
    used_mb: int | None = None
    free_mb: int | None = None
    #: None where the use by process could not be read, which is not the same as nobody using it.
    processes: tuple[ProcessUse, ...] | None = None
    #: Memory is shared with the host (an integrated part): ``free_mb`` is what the host has available.
    unified: bool = False
    #: How much of the last sampling period some kernel ran, where the driver tells.
    utilization_percent: int | None = None
    error: str | None = None


class ResidentModel(Record, frozen=True, kw_only=True):
    """A model that a runtime says it holds. Sizes in bytes, as the runtime reports them."""

    model: str
    size_bytes: int | None = None
    vram_bytes: int | None = None
    context_length: int | None = None
    expires_at: str | None = None
    #: Kept until somebody unloads it.
    pinned: bool = False
    #: On its way out: it still holds memory and takes no work.
    stopping: bool = False
    #: On its way in: it holds memory already and takes no work yet.
    loading: bool = False


class Holding(Record, frozen=True, kw_only=True):
    """What one runtime holds on one device."""

    device: str
    #: None where nobody can tell how much.
    mb: int | None = None
    #: Who says so: the driver's count of its processes, or the runtime's own figures where it has one device only.
    source: Literal["process", "runtime"] = "process"


class RuntimeReading(Record, frozen=True, kw_only=True):
    """One look at one runtime. ``None`` lists mean that the runtime did not say."""

    runtime: str
    read_at: str
    healthy: bool
    activity: Activity = "unknown"
    idle_since: str | None = None
    resident: tuple[ResidentModel, ...] | None = None
    #: What it holds, device by device; None where that is not known.
    holdings: tuple[Holding, ...] | None = None
    #: Every model the runtime could load.
    models: tuple[str, ...] | None = None
    error: str | None = None


class ClaimBeat(Record, frozen=True, kw_only=True):
    """What a heartbeat says about one claim."""

    job: str
    device: str
    slot: int
    epoch: int
    attempt: int = 1
    phase: str = "claimed"
    tokens: int = 0
    last_progress_at: str | None = None


class Heartbeat(Fact, frozen=True, kw_only=True):
    """An agent is alive, and this is what it sees. Not part of the log: heartbeats age out."""

    TYPE: ClassVar[str] = "gpuq.host.heartbeat.v1"

    host: str
    boot_id: str
    instance_id: str
    sent_at: str
    #: When the next one is due, in seconds.
    interval_s: float
    claims: tuple[ClaimBeat, ...] = ()
    devices: tuple[DeviceReading, ...] = ()
    runtimes: tuple[RuntimeReading, ...] = ()
    stopping: bool = False
