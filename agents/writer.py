"""Appending to subjects that this agent owns, and to jobs that it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import structlog

from gpukeeper.events import subjects
from gpukeeper.events.codec import decode
from gpukeeper.events.errors import GpukeeperError, LogUnavailable
from gpukeeper.events.fact import Fact
from gpukeeper.events.job import CancelRequested, is_note
from gpukeeper.events.log import Appended, Refused, Unanswered
from gpukeeper.events.proposal import Proposal
from gpukeeper.events.recorder import Recorder

_log = structlog.get_logger("gpukeeper.agent")

_TRIES_MAX = 16
_PAUSE_S = 1.0
_Answer = TypeVar("_Answer")


class Superseded(GpukeeperError):
    """The job moved on without this attempt: it has no right to go on."""

    code = "superseded"


class CancelWanted(GpukeeperError):
    """Somebody asked for the job's end."""

    code = "cancel_wanted"

    def __init__(self, wish: CancelRequested) -> None:
        super().__init__(f"cancelled by {wish.actor}", actor=wish.actor, reason=wish.reason)
        self.wish = wish


class NotRecorded(GpukeeperError):
    """The log refuses an event for good."""

    code = "not_recorded"


async def patiently(ask: Callable[[], Awaitable[_Answer]]) -> _Answer:
    """Ask again while the log is away: nothing can be decided before it is back."""
    while True:
        try:
            return await ask()
        except LogUnavailable as error:
            _log.warning("log_away", error=error.message)
            await asyncio.sleep(_PAUSE_S)


class OwnSubject:
    """A subject that, lapses aside, only this agent writes: one append at a time, each resting on the one before."""

    def __init__(self, recorder: Recorder, subject: str, aggregate: str, seq: int) -> None:
        self._recorder = recorder
        self._subject = subject
        self._aggregate = aggregate
        self._lock = asyncio.Lock()
        self.seq = seq
        #: Up to here others wrote, as far as was found when an append was refused.
        self.foreign_seq = 0

    async def append(self, fact: Fact, *, job: str | None = None, epoch: int | None = None) -> int:
        """Append, whatever others appended in between. Returns the sequence.

        Only for facts that stay true whatever came between (a release, a change of health).

        Raises:
            NotRecorded: the log refuses it for good.
        """
        seq = await _to_its_end(self._append(fact, job, epoch, tries_max=_TRIES_MAX))
        if seq is None:
            raise NotRecorded(f"{self._subject} moved on {_TRIES_MAX} times in a row", subject=self._subject)
        return seq

    async def append_once(
        self, fact: Fact, *, job: str | None = None, epoch: int | None = None, may: Callable[[], bool] = lambda: True
    ) -> int | None:
        """Append only on what is known of the subject, and if it ``may`` be when its turn has come.

        None when it may not, or when the subject had moved on, which is known then.
        """
        return await _to_its_end(self._append(fact, job, epoch, tries_max=1, may=may))

    async def _append(
        self,
        fact: Fact,
        job: str | None,
        epoch: int | None,
        *,
        tries_max: int,
        may: Callable[[], bool] = lambda: True,
    ) -> int | None:
        async with self._lock:
            for _ in range(tries_max):
                if not may():
                    return None
                proposal = Proposal(
                    subject=self._subject,
                    fact=fact,
                    expected=self.seq,
                    aggregate=self._aggregate,
                    correlationid=job,
                    epoch=epoch,
                )
                outcome = await _settled(self._recorder, proposal)
                if isinstance(outcome, Appended):
                    self.seq = outcome.seq
                    return outcome.seq
                last = await patiently(lambda: self._recorder.log.last(self._subject))
                self.seq = self.foreign_seq = 0 if last is None else last.seq
        return None


class HeldJob:
    """The subject of a job that this attempt holds: appends rest on the last thing it knows of the job."""

    def __init__(self, recorder: Recorder, job: str, seq: int) -> None:
        self._recorder = recorder
        self.job = job
        self.seq = seq
        self._subject = subjects.job(job)
        self._lock = asyncio.Lock()
        #: A wish for the job's end that was met on the way.
        self.cancel: CancelRequested | None = None

    async def append(self, fact: Fact, *, epoch: int, heed_cancel: bool = True) -> int:
        """Append; notes that came between are stepped over.

        Raises:
            Superseded: something else than notes came between.
            CancelWanted: a wish for the job's end came between (unless ``heed_cancel`` is off).
            NotRecorded: the log refuses it for good.
        """
        return await _to_its_end(self._append(fact, epoch=epoch, heed_cancel=heed_cancel))

    async def _append(self, fact: Fact, *, epoch: int, heed_cancel: bool) -> int:
        async with self._lock:
            for _ in range(_TRIES_MAX):
                proposal = Proposal(
                    subject=self._subject,
                    fact=fact,
                    expected=self.seq,
                    aggregate=self.job,
                    correlationid=self.job,
                    epoch=epoch,
                )
                outcome = await _settled(self._recorder, proposal)
                if isinstance(outcome, Appended):
                    self.seq = outcome.seq
                    return outcome.seq
                await self._step_over_notes()
                if heed_cancel and self.cancel is not None:
                    raise CancelWanted(self.cancel)
            raise NotRecorded(f"{self._subject} moved on {_TRIES_MAX} times in a row", subject=self._subject)

    async def append_late(self, fact: Fact, *, epoch: int) -> None:
        """Append a note to a job that has moved on. Best effort: the note changes nothing."""
        for _ in range(_TRIES_MAX):
            last = await patiently(lambda: self._recorder.log.last(self._subject))
            if last is None:
                break
            self.seq = last.seq
            try:
                await self.append(fact, epoch=epoch, heed_cancel=False)
            except Superseded:
                continue
            except NotRecorded as error:
                _log.warning("late_result_not_recorded", job=self.job, error=error.message)
            return
        _log.warning("late_result_not_recorded", job=self.job, error="the job moves on too fast, or has aged out")

    async def _step_over_notes(self) -> None:
        """Read what came since.

        Raises:
            Superseded: it is more than notes and a wish for the job's end.
        """
        for stored in await patiently(lambda: self._recorder.log.read(self._subject, after=self.seq)):
            fact = decode(stored).data
            if isinstance(fact, CancelRequested):
                self.cancel = fact
            elif not (isinstance(fact, Fact) and is_note(fact)):
                raise Superseded(f"{type(fact).__name__} came at sequence {stored.seq}", job=self.job)
            self.seq = stored.seq


async def _settled(recorder: Recorder, proposal: Proposal) -> Appended | Refused:
    """Append until it is known whether it is stored or the subject had moved on.

    It is one message throughout, with one id: an attempt that nobody answered may be in the log all the same, and is
    found there by that.

    Raises:
        NotRecorded: the log refuses it for good.
    """
    record = recorder.stamped(proposal)
    while True:
        outcome = await recorder.settle(record)
        if isinstance(outcome, Appended) or (isinstance(outcome, Refused) and outcome.code == "stale"):
            return outcome
        await _pause_or_raise(proposal, outcome)


async def _pause_or_raise(proposal: Proposal, outcome: Refused | Unanswered) -> None:
    """A log that is away or full may take it later, and nothing can be decided before; one that bans it never does."""
    code = outcome.code if isinstance(outcome, Refused) else "unanswered"
    tag = proposal.fact.TYPE
    if code in ("too_large", "denied"):
        raise NotRecorded(f"{tag} on {proposal.subject}: {outcome.detail}", subject=proposal.subject, outcome=code)
    _log.warning("log_takes_nothing", subject=proposal.subject, type=tag, outcome=code, detail=outcome.detail)
    await asyncio.sleep(_PAUSE_S)


_left_behind: set[asyncio.Task[Any]] = set()


async def _to_its_end(append: Coroutine[Any, Any, _Answer]) -> _Answer:
    """Wait for an append that goes on when its waiter is cancelled.

    What is in the air lands or does not, whoever waits. The next append waits for it, and so knows which.
    """
    task = asyncio.ensure_future(append)
    _left_behind.add(task)
    task.add_done_callback(_end_of)
    return await asyncio.shield(task)


def _end_of(task: asyncio.Task[Any]) -> None:
    _left_behind.discard(task)
    if not task.cancelled():
        # Taken note of here too, in case nobody waits any more: the next append meets the same thing.
        task.exception()
