"""Facts about where a job was sent, on a subject of the host it was sent to."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from gpukeeper.events.fact import Fact, Record
from gpukeeper.events.job import Clocks
from gpukeeper.events.reasons import Reason


class Candidate(Record, frozen=True, kw_only=True):
    """One device that was considered."""

    host: str
    device: str
    runtime: str
    score: float = 0.0
    #: Each term of the score, by name.
    terms: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    #: Why it could not begin now, where it could not.
    unavailable: str | None = None


class Routed(Fact, frozen=True, kw_only=True):
    """The job may be claimed on this device by this host's agent."""

    TYPE: ClassVar[str] = "gpuq.route.routed.v1"

    job: str
    host: str
    device: str
    runtime: str
    submission_seq: int
    #: The job's own sequence that this was decided on.
    job_seq: int
    #: Further devices of the host, where the job takes more than one: claimed after ``device``, in this order.
    more_devices: tuple[str, ...] = ()
    attempt: int
    #: The deadlines that the agent keeps.
    clocks: Clocks
    score: float = 0.0
    why: str = ""
    candidates: tuple[Candidate, ...] = ()


class Unrouted(Fact, frozen=True, kw_only=True):
    """The route is withdrawn: the job is queued again, or has ended."""

    TYPE: ClassVar[str] = "gpuq.route.unrouted.v1"

    job: str
    host: str
    route_seq: int
    reason: Reason
    detail: str = ""
