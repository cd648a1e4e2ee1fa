"""Appending to subjects that this agent owns, and to jobs that it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from gpukeeper.events import subjects
from gpukeeper.events.codec import decode
from gpukeeper.events.errors import GpukeeperError, LogUnavailable
from gpukeeper.events.fact import Fact
from gpukeeper.events.job import CancelRequested, is_note
from gpukeeper.events.log import Appended, Refused
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
    """Ask again while the log is away.

    Who waits here holds a claim: when that takes too long it lapses, and the attempt learns from its next append that
    it was superseded. That is the bound.
    """
    while True:
        try:
            return await ask()
        except LogUnavailable as error:
            _log.warning("log_away", error=error.message)
            await asyncio.sleep(_PAUSE_S)


async def _stored(recorder: Recorder, proposal: Proposal) -> int | None:
    """Append until it is known what became of it: the sequence, or None where the subject had moved on.

    The message stays the same however often it is sent, so a copy that arrives late is recognised as ours.

    Raises:
        NotRecorded: the log refuses it for good.
    """
    record = recorder.stamped(proposal)
    while True:
        outcome = await recorder.settle(record)
        if isinstance(outcome, Appended):
            return outcome.seq
        code = outcome.code if isinstance(outcome, Refused) else "unanswered"
        if code == "stale":
            return None
        if code in ("too_large", "denied"):
            detail = f"{proposal.fact.TYPE} on {proposal.subject}: {outcome.detail}"
            raise NotRecorded(detail, subject=proposal.subject, outcome=code)
        # An absent log comes back, and nothing can be decided before it does.
        _log.warning("log_takes_nothing", subject=proposal.subject, type=proposal.fact.TYPE, outcome=code)
        await asyncio.sleep(_PAUSE_S)


class OwnSubject:
    """A subject that, lapses aside, only this agent writes: one append at a time, each resting on the one before."""

    def __init__(self, recorder: Recorder, subject: str, aggregate: str, seq: int) -> None:
        self._recorder = recorder
        self._subject = subject
        self._aggregate = aggregate
        self._lock = asyncio.Lock()
        self.seq = seq

    async def append(self, fact: Fact, *, job: str | None = None, epoch: int | None = None) -> int:
        """Append, whatever others appended in between. Returns the sequence.

        Only for facts that stay true whatever came between (a release, a change of health).

        Raises:
            NotRecorded: the log refuses it for good, or others write here all the time.
        """
        async with self._lock:
            for _ in range(_TRIES_MAX):
                seq = await self._once(fact, job, epoch)
                if seq is not None:
                    return seq
            raise NotRecorded(f"{self._subject} moved on {_TRIES_MAX} times in a row", subject=self._subject)

    async def append_once(self, fact: Fact, *, job: str | None = None, epoch: int | None = None) -> int | None:
        """Append only on what is known of the subject; None when it had moved on, which is known then."""
        async with self._lock:
            return await self._once(fact, job, epoch)

    async def _once(self, fact: Fact, job: str | None, epoch: int | None) -> int | None:
        proposal = Proposal(
            subject=self._subject,
            fact=fact,
            expected=self.seq,
            aggregate=self._aggregate,
            correlationid=job,
            epoch=epoch,
        )
        seq = await _stored(self._recorder, proposal)
        if seq is None:
            last = await patiently(lambda: self._recorder.log.last(self._subject))
            self.seq = 0 if last is None else last.seq
        else:
            self.seq = seq
        return seq


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
            NotRecorded: the log refuses it for good, or others write here all the time.
        """
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
                seq = await _stored(self._recorder, proposal)
                if seq is not None:
                    self.seq = seq
                    return seq
                await self._step_over_notes()
                if heed_cancel and self.cancel is not None:
                    raise CancelWanted(self.cancel)
            raise NotRecorded(f"{self._subject} moved on {_TRIES_MAX} times in a row", subject=self._subject)

    async def append_late(self, fact: Fact, *, epoch: int) -> None:
        """Append a note to a job that has moved on; given up after a few tries, as the note changes nothing."""
        for _ in range(_TRIES_MAX):
            last = await patiently(lambda: self._recorder.log.last(self._subject))
            self.seq = 0 if last is None else last.seq
            try:
                await self.append(fact, epoch=epoch, heed_cancel=False)
            except Superseded:
                continue
            return

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
