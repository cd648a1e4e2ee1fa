"""Stamps proposals and settles their outcome: a shell around the log that never guesses.

An unanswered append is settled by reading the subject back and looking for one's own event id. Where it is not there
and the subject has not moved on, the same message is sent again: the same id on the same expected sequence can be
stored at most once, however many copies are in the air.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

import msgspec

from gpukeeper.events.codec import encode, event_id_of
from gpukeeper.events.errors import LogUnavailable
from gpukeeper.events.log import Appended, Log, Outcome, Record, Refused, Unanswered
from gpukeeper.events.proposal import Proposal


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """Where ids and times come from."""

    source: str
    new_id: Callable[[], str]
    now: Callable[[], str]


class Recorder:
    """Appends decisions.

    Args:
        log: the adapter.
        stamp: source, ids and clock.
        in_flight_max: appends under way at once.
        settle_s: how long an unanswered append is chased before it is given back as ``Unanswered``. Must stay below
            the stream's duplicate window: it is what makes sending again safe where nothing is expected.
        retry_s: pause between two looks while the log does not answer.
    """

    def __init__(
        self,
        log: Log,
        stamp: Stamp,
        *,
        in_flight_max: int = 64,
        settle_s: float = 30.0,
        retry_s: float = 0.25,
    ) -> None:
        self.log = log
        self._stamp = stamp
        self._places = asyncio.Semaphore(in_flight_max)
        self._settle_s = settle_s
        self._retry_s = retry_s

    def stamped(self, proposal: Proposal) -> Record:
        """The message for ``proposal``, with a fresh id."""
        event_id = self._stamp.new_id()
        body = encode(
            proposal.fact,
            event_id=event_id,
            source=self._stamp.source,
            subject=proposal.aggregate,
            time=self._stamp.now(),
            correlationid=proposal.correlationid,
            causationid=proposal.causationid,
            actor=proposal.actor,
            epoch=proposal.epoch,
        )
        return Record(subject=proposal.subject, body=body, event_id=event_id, expected=proposal.expected)

    async def record(self, proposal: Proposal) -> Outcome:
        """Append and settle. ``Unanswered`` only when the log stayed away for the whole of ``settle_s``."""
        return await self.settle(self.stamped(proposal))

    async def settle(self, record: Record) -> Outcome:
        """Append ``record`` and find out what became of it."""
        async with self._places:
            outcome = await self.log.append(record)
            if isinstance(outcome, Appended) or (isinstance(outcome, Refused) and outcome.code in _FINAL):
                return outcome
            return await self._chase(record, outcome)

    async def _chase(self, record: Record, outcome: Outcome) -> Outcome:
        """Read back, send again, until it is known.

        A ``stale`` refusal is read back too: a single server checks the sequence before it looks for duplicates, so
        the second copy of a stored message is refused. Once an attempt went unanswered, a later refusal says nothing
        about that attempt: only what stands on the subject does.
        """
        give_up_at = asyncio.get_running_loop().time() + self._settle_s
        in_the_air = isinstance(outcome, Unanswered)
        while True:
            found = await self._read_back(record)
            if isinstance(found, Appended):
                return found
            if found == "moved_on":
                return Refused("stale", "the subject moved on")
            if not in_the_air and isinstance(outcome, Refused) and outcome.code == "stale" and found == "unmoved":
                # The leader that refused knows more than the one that answered the read: re-read, re-decide.
                return outcome
            if asyncio.get_running_loop().time() >= give_up_at:
                return Unanswered(f"no answer within {self._settle_s} s") if in_the_air else outcome
            await asyncio.sleep(self._retry_s)
            outcome = await self.log.append(record)
            if isinstance(outcome, Appended):
                return outcome
            if isinstance(outcome, Unanswered):
                in_the_air = True
            elif outcome.code in _FINAL and not in_the_air:
                return outcome

    async def _read_back(self, record: Record) -> Appended | Literal["moved_on", "unmoved", "unreadable"]:
        try:
            if record.expected is None:
                # Without a condition nothing can be concluded from the newest message; the server's own memory of
                # message ids makes sending again safe.
                last = await self.log.last(record.subject)
                same = last is not None and event_id_of(last.body) == record.event_id
                return Appended(last.seq) if last is not None and same else "unmoved"
            later = await self.log.read(record.subject, after=record.expected)
        except LogUnavailable:
            return "unreadable"
        for stored in later:
            if event_id_of(stored.body) == record.event_id:
                return Appended(stored.seq)
        return "moved_on" if later else "unmoved"


_FINAL = frozenset({"full", "too_large", "denied"})
