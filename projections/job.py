"""One job as its events left it, and the state it is in.

::

    waiting <-> routed -> admitted -> placed -> running -> succeeded | failed | cancelled | expired | lost
       ^          |           |                    |
       +----------+-----------+--------------------+      denied, withdrawn, lapsed before start, preempted
    waiting -> cancelled | expired | unroutable           (and `rejected`: never a job at all)
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from gpukeeper.events.job import Clocks


class Phase(StrEnum):
    """Where a job is. Each says who moves it on, and what a crash does."""

    #: In the queue. The scheduler moves it on. A crash changes nothing.
    WAITING = "waiting"
    #: Sent to a device. Its agent moves it on; the scheduler withdraws the route when that host is lost.
    ROUTED = "routed"
    #: One claim has the sole right to execute it; not started. A lapse puts it back into the queue.
    ADMITTED = "admitted"
    #: Its model sits where it should; not started. A lapse puts it back into the queue.
    PLACED = "placed"
    #: The runtime may have seen it. A lapse ends it as lost.
    RUNNING = "running"
    #: Ends: final.
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    UNROUTABLE = "unroutable"
    LOST = "lost"
    REJECTED = "rejected"


ENDED = frozenset(
    {
        Phase.SUCCEEDED,
        Phase.FAILED,
        Phase.CANCELLED,
        Phase.EXPIRED,
        Phase.UNROUTABLE,
        Phase.LOST,
        Phase.REJECTED,
    }
)
ACTIVE = frozenset({Phase.ADMITTED, Phase.PLACED, Phase.RUNNING})


class Route(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a job was sent. ``seq`` is the sequence of the `routed` fact."""

    seq: int
    host: str
    device: str
    runtime: str
    #: The job's own sequence that it was decided on.
    job_seq: int = 0
    #: Further devices, where the job takes more than one.
    more_devices: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        """All of its devices, in the order in which they are claimed."""
        return (self.device, *self.more_devices)


class RouteSeq(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The last sequence of one job's route subject on one host."""

    host: str
    seq: int


class CancelWish(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Somebody wants the job ended."""

    actor: str
    reason: str
    command_seq: int


class Denial(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An agent's live readings did not allow the job."""

    host: str
    device: str
    at_ns: int
    count: int


class Job(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Everything that decisions need to know of one job; its body and result stay in the log."""

    id: str
    submission_seq: int
    producer: str
    digest: str
    kind: str
    task: str
    model: str
    phase: Phase
    #: Last sequence of the job's own subject: what the next append to it rests on.
    seq: int
    #: When it came to its phase, by the server's clock.
    since_ns: int
    submitted_ns: int
    accepted_seq: int
    accepted_ns: int
    clocks: Clocks | None = None
    runtime: str | None = None
    host: str | None = None
    device: str | None = None
    origin: str | None = None
    place: str = "any"
    priority: int = 0
    vram_mb: int | None = None
    on_capacity: str = "wait"
    reason: str = ""
    detail: str = ""
    attempt: int = 0
    route: Route | None = None
    #: The claim that has the right to execute it.
    epoch: int = 0
    slot: int = 0
    instance_id: str = ""
    tokens: int = 0
    preemptions: int = 0
    #: Since when its queue clock runs: its acceptance, or its return after it had started.
    queued_ns: int = 0
    cancel: CancelWish | None = None
    denials: tuple[Denial, ...] = ()
    #: Last sequence of each route subject of this job, by host: what the next route there rests on.
    route_seqs: tuple[RouteSeq, ...] = ()
    #: Attempts that ended by a lapse before they had started.
    lapses: int = 0
    #: How many GPUs of one host it takes at once.
    gpus: int = 1

    def route_seq(self, host: str) -> int:
        for known in self.route_seqs:
            if known.host == host:
                return known.seq
        return 0

    @property
    def ended(self) -> bool:
        return self.phase in ENDED
