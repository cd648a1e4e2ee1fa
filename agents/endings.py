"""The facts that end an attempt, built from what it has come to. Pure."""

from __future__ import annotations

import msgspec

from gpukeeper.events import job as facts
from gpukeeper.events.fact import Fact
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import JobResult, ObjectRef


class SoFar(msgspec.Struct, frozen=True, kw_only=True):
    """What an attempt has come to."""

    job: str
    epoch: int
    attempt: int
    timings: facts.Timings
    #: The last of what was generated.
    partial: str | None


class ClockExpired(Exception):
    """A deadline of the job passed."""

    def __init__(self, name: facts.ClockName, clock: facts.Clock, elapsed_s: float) -> None:
        super().__init__(name)
        self.name: facts.ClockName = name
        self.clock = clock
        self.elapsed_s = elapsed_s


def succeeded(so_far: SoFar, result: JobResult | None, ref: ObjectRef | None) -> facts.Succeeded:
    return facts.Succeeded(
        job=so_far.job,
        epoch=so_far.epoch,
        attempt=so_far.attempt,
        result=result,
        result_ref=ref,
        timings=so_far.timings,
    )


def failed(so_far: SoFar, reason: Reason, detail: str, *, status: int | None = None) -> facts.Failed:
    return facts.Failed(
        job=so_far.job,
        reason=reason,
        detail=detail,
        epoch=so_far.epoch,
        attempt=so_far.attempt,
        status=status,
        partial=so_far.partial,
        timings=so_far.timings,
    )


def cancelled(so_far: SoFar, wish: facts.CancelRequested) -> facts.Cancelled:
    return facts.Cancelled(
        job=so_far.job,
        actor=wish.actor,
        reason=wish.reason,
        command_seq=wish.command_seq,
        epoch=so_far.epoch,
        partial=so_far.partial,
    )


def expired(so_far: SoFar, passed: ClockExpired) -> facts.Expired:
    return facts.Expired(
        job=so_far.job,
        clock=passed.name,
        limit_s=passed.clock.limit_s,
        source=passed.clock.set_by,
        elapsed_s=round(passed.elapsed_s, 3),
        epoch=so_far.epoch,
        partial=so_far.partial,
    )


_STOPPED = "the agent was stopped and its grace ended"


def handed_back(so_far: SoFar) -> facts.Waiting:
    """The agent stops and the runtime has not seen the job: back into the queue."""
    return facts.Waiting(job=so_far.job, reason=Reason.HANDED_BACK, detail=_STOPPED, epoch=so_far.epoch)


def given_back(so_far: SoFar, reason: Reason, detail: str) -> facts.Waiting:
    """There is no room after all, and the runtime has not seen the job: back into the queue."""
    return facts.Waiting(job=so_far.job, reason=reason, detail=detail, epoch=so_far.epoch)


def preempted(so_far: SoFar) -> facts.Preempted:
    """The agent stops and so did the run, surely: back into the queue, to be run again from the start."""
    return facts.Preempted(job=so_far.job, epoch=so_far.epoch, reason=Reason.AGENT_STOPPING, detail=_STOPPED)


def not_stopped(so_far: SoFar, limit_s: float) -> facts.Failed:
    """The agent stops and the run may go on: the job must not run beside it, and so not again."""
    detail = f"{_STOPPED}, and the runtime was not proven to have stopped within {limit_s:g} s: it is not run again"
    return failed(so_far, Reason.AGENT_STOPPING, detail)


def is_own_wish(end: Fact) -> bool:
    """Whether only the agent's own stop asks for this end, so that a wish for the job's end goes before it."""
    if isinstance(end, facts.Failed):
        return end.reason is Reason.AGENT_STOPPING
    return isinstance(end, facts.Preempted | facts.Waiting)


def fenced(so_far: SoFar) -> facts.LateResult:
    """The note of an attempt whose claim somebody else has ended while the runtime had the job."""
    got = "nothing had come" if so_far.partial is None else f"it had got as far as: {so_far.partial}"
    return facts.LateResult(
        job=so_far.job,
        epoch=so_far.epoch,
        outcome="cancelled",
        detail=f"the run was stopped, as its claim had been ended by somebody else; {got}",
    )


def late_result(end: Fact) -> facts.LateResult | None:
    """The note for an end that came after the job had moved on; None where there is nothing to tell."""
    match end:
        case facts.Succeeded():
            return facts.LateResult(
                job=end.job, epoch=end.epoch, outcome="succeeded", result=end.result, result_ref=end.result_ref
            )
        case facts.Failed(epoch=int(epoch)):
            return facts.LateResult(job=end.job, epoch=epoch, outcome="failed", detail=f"{end.reason}: {end.detail}")
        case facts.Cancelled(epoch=int(epoch)):
            return facts.LateResult(job=end.job, epoch=epoch, outcome="cancelled")
        case facts.Expired(epoch=int(epoch)):
            return facts.LateResult(job=end.job, epoch=epoch, outcome="expired", detail=f"{end.clock} clock")
        case _:
            return None
