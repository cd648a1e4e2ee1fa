"""Facts about one job, on the job's own subject."""

from __future__ import annotations

from typing import ClassVar, Literal

from gpukeeper.events.device import Considered
from gpukeeper.events.fact import Fact, Record
from gpukeeper.events.readings import ClaimBeat, DeviceReading, RuntimeReading
from gpukeeper.events.reasons import Reason
from gpukeeper.events.spec import OnCapacity, Place, Problem
from gpukeeper.events.work import JobResult, ObjectRef, Task

ClockName = Literal["queue", "load", "first_byte", "idle", "run"]


class Clock(Record, frozen=True, kw_only=True):
    """One deadline of a job: how long, and where that was configured."""

    limit_s: float
    #: In words; empty for the built-in default.
    source: str = ""

    @property
    def set_by(self) -> str:
        """Where it was configured, in words."""
        return self.source or "the built-in default"


class Clocks(Record, frozen=True, kw_only=True):
    """The deadlines a job lives under, settled when it was accepted."""

    queue: Clock
    load: Clock
    first_byte: Clock
    idle: Clock
    run: Clock


class Accepted(Fact, frozen=True, kw_only=True):
    """The submission is a job now. Its body stays where it is: ``submission_seq`` refers to it."""

    TYPE: ClassVar[str] = "gpuq.job.accepted.v1"

    job: str
    submission_seq: int
    producer: str
    digest: str
    kind: str
    task: Task
    model: str
    runtime: str | None = None
    host: str | None = None
    device: str | None = None
    origin: str | None = None
    place: Place = "any"
    priority: int = 0
    vram_mb: int | None = None
    #: How many GPUs of one host it takes at once; ``vram_mb`` is for each.
    gpus: int = 1
    clocks: Clocks
    on_capacity: OnCapacity = "wait"
    #: Why it cannot begin at once, where it cannot.
    waiting: Reason | None = None
    detail: str = ""


class Rejected(Fact, frozen=True, kw_only=True):
    """The submission is refused for good. Its handle is derived from its place in the log."""

    TYPE: ClassVar[str] = "gpuq.job.rejected.v1"

    job: str
    submission_seq: int
    producer: str
    reason: Reason
    problems: tuple[Problem, ...]
    #: The id that the producer asked for, where one could be read.
    requested_id: str | None = None


class Resubmitted(Fact, frozen=True, kw_only=True):
    """The same id with the same body came again: still one job. A note."""

    TYPE: ClassVar[str] = "gpuq.job.resubmitted.v1"

    job: str
    submission_seq: int
    producer: str


class Waiting(Fact, frozen=True, kw_only=True):
    """The job waits, for another reason than before (or again, after an attempt that never started)."""

    TYPE: ClassVar[str] = "gpuq.job.waiting.v1"

    job: str
    reason: Reason
    detail: str = ""
    #: The claim that ended without having started the job, where that is why it waits.
    epoch: int | None = None


class Admitted(Fact, frozen=True, kw_only=True):
    """The sole right to execute the job, with the evidence it was given on."""

    TYPE: ClassVar[str] = "gpuq.job.admitted.v1"

    job: str
    host: str
    device: str
    slot: int
    epoch: int
    attempt: int
    route_seq: int
    runtime: str
    instance_id: str
    resident: bool
    #: Further devices that it holds, each under a claim of its own.
    more_devices: tuple[str, ...] = ()
    need_mb: int | None = None
    need_source: str = ""
    reserved_mb: int = 0
    headroom_mb: int = 0
    usable_mb: int | None = None
    reading: DeviceReading | None = None
    residency: RuntimeReading | None = None
    #: Who holds memory there, and who of them would be asked to let go, where that was looked at.
    considered: tuple[Considered, ...] = ()
    detail: str = ""


class Denied(Fact, frozen=True, kw_only=True):
    """The live readings did not allow it: the job goes back to the queue."""

    TYPE: ClassVar[str] = "gpuq.job.denied.v1"

    job: str
    host: str
    device: str
    slot: int
    epoch: int
    attempt: int
    route_seq: int
    runtime: str
    reason: Reason
    detail: str
    need_mb: int | None = None
    need_source: str = ""
    reserved_mb: int = 0
    headroom_mb: int = 0
    usable_mb: int | None = None
    reading: DeviceReading | None = None
    residency: RuntimeReading | None = None
    considered: tuple[Considered, ...] = ()


class Placement(Fact, frozen=True, kw_only=True):
    """What the runtime and the device say about where the model sits; both sources, side by side."""

    job: str
    epoch: int
    runtime: str
    model: str
    intended: Literal["gpu", "cpu"]
    size_bytes: int | None = None
    vram_bytes: int | None = None
    ratio: float | None = None
    device_before_mb: int | None = None
    device_after_mb: int | None = None
    sources: str = ""
    load_s: float | None = None
    detail: str = ""


class PlacementVerified(Placement, frozen=True, kw_only=True):
    """The model sits where the job intends: it may start."""

    TYPE: ClassVar[str] = "gpuq.job.placement_verified.v1"


class PlacementFailed(Placement, frozen=True, kw_only=True):
    """The model does not sit where the job intends, or nobody can tell: it does not start."""

    TYPE: ClassVar[str] = "gpuq.job.placement_failed.v1"

    reason: Reason


class Started(Fact, frozen=True, kw_only=True):
    """From here on the runtime may have seen the job: what follows a crash is `lost`, never a second run."""

    TYPE: ClassVar[str] = "gpuq.job.started.v1"

    job: str
    epoch: int
    attempt: int


class Progress(Fact, frozen=True, kw_only=True):
    """How far a long job is, at a bounded rate. A note."""

    TYPE: ClassVar[str] = "gpuq.job.progress.v1"

    job: str
    epoch: int
    tokens: int
    elapsed_s: float


class CancelRequested(Fact, frozen=True, kw_only=True):
    """Somebody wants the job ended; its slot stays taken until the runtime has stopped."""

    TYPE: ClassVar[str] = "gpuq.job.cancel_requested.v1"

    job: str
    command_seq: int
    actor: str
    reason: str = ""


class Timings(Record, frozen=True, kw_only=True):
    """Seconds spent, by the agent's monotonic clock."""

    load_s: float | None = None
    first_byte_s: float | None = None
    run_s: float | None = None


class Succeeded(Fact, frozen=True, kw_only=True):
    """The runtime answered. The result is here, or in the object store when it is large."""

    TYPE: ClassVar[str] = "gpuq.job.succeeded.v1"

    job: str
    epoch: int
    attempt: int
    result: JobResult | None = None
    result_ref: ObjectRef | None = None
    timings: Timings = Timings()


class Failed(Fact, frozen=True, kw_only=True):
    """The attempt ended in an error. Nothing is retried."""

    TYPE: ClassVar[str] = "gpuq.job.failed.v1"

    job: str
    reason: Reason
    detail: str
    epoch: int | None = None
    attempt: int | None = None
    #: HTTP status of the runtime, where there was one.
    status: int | None = None
    #: What the runtime had generated by then.
    partial: str | None = None
    timings: Timings = Timings()
    last_beat: ClaimBeat | None = None


class Cancelled(Fact, frozen=True, kw_only=True):
    """Ended on somebody's word."""

    TYPE: ClassVar[str] = "gpuq.job.cancelled.v1"

    job: str
    actor: str
    reason: str = ""
    command_seq: int | None = None
    epoch: int | None = None
    #: What the runtime had generated by then.
    partial: str | None = None


class Preempted(Fact, frozen=True, kw_only=True):
    """The run was stopped on purpose and the job is back in the queue, marked."""

    TYPE: ClassVar[str] = "gpuq.job.preempted.v1"

    job: str
    epoch: int
    reason: Reason
    detail: str = ""


class Expired(Fact, frozen=True, kw_only=True):
    """A clock of the job ran out."""

    TYPE: ClassVar[str] = "gpuq.job.expired.v1"

    job: str
    clock: ClockName
    limit_s: float
    #: Where the limit was configured.
    source: str
    elapsed_s: float
    detail: str = ""
    epoch: int | None = None
    partial: str | None = None


class Unroutable(Fact, frozen=True, kw_only=True):
    """The job asked for a clear answer instead of a wait, and nothing could take it."""

    TYPE: ClassVar[str] = "gpuq.job.unroutable.v1"

    job: str
    reason: Reason
    detail: str = ""


class Lost(Fact, frozen=True, kw_only=True):
    """The claim lapsed while the job ran: nobody knows how it ended, and it is not run again."""

    TYPE: ClassVar[str] = "gpuq.job.lost.v1"

    job: str
    epoch: int
    host: str
    device: str
    reason: Reason
    detail: str
    #: The last sign of life of the claim, and how old it was.
    last_beat: ClaimBeat | None = None
    last_beat_at: str | None = None
    silent_s: float | None = None


class LateResult(Fact, frozen=True, kw_only=True):
    """An attempt answered after its job had ended. Shown, never applied."""

    TYPE: ClassVar[str] = "gpuq.job.late_result.v1"

    job: str
    epoch: int
    outcome: Literal["succeeded", "failed", "cancelled", "expired"]
    detail: str = ""
    result: JobResult | None = None
    result_ref: ObjectRef | None = None


def is_note(fact: Fact) -> bool:
    """Whether ``fact`` changes nothing about who may do what, so that an agent may append past it.

    A `waiting` that names no claim is one: it says why the job waits, and a route may have been decided beside it.
    """
    if isinstance(fact, Waiting):
        return fact.epoch is None
    return isinstance(fact, Resubmitted | Progress | LateResult)


#: Facts that end a job. Exactly one of them stands on each job's subject.
ENDS = (Rejected, Succeeded, Failed, Cancelled, Expired, Unroutable, Lost)
