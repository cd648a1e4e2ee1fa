"""The port to the shared log: what every adapter promises.

- An append names the last sequence of its *literal* subject that it was decided on (0 = none yet), or None for
  subjects that only grow (submissions, commands, heartbeats).
- The outcome of an append has three values. ``Unanswered`` is neither stored nor refused: :mod:`.recorder` settles it.
- Readers see what was stored, in the order of sequences, each at least once; a reader skips what it has seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One message to append."""

    subject: str
    body: bytes
    #: Identity of the event, used by the server to drop a repeated publish while it remembers.
    event_id: str
    #: The subject's last sequence this rests on; 0 = the subject is empty; None = no condition.
    expected: int | None = None


class Stored(msgspec.Struct, frozen=True):
    """One message of the log."""

    seq: int
    #: When the server stored it, in nanoseconds since the epoch: the only clock that folds use.
    stored_ns: int
    subject: str
    body: bytes


class Appended(msgspec.Struct, frozen=True):
    """The message is in the log."""

    seq: int


class Refused(msgspec.Struct, frozen=True):
    """The message is not in the log and this attempt will not put it there.

    ``stale``: the subject moved on. ``in_flight``: another write to the subject is in the air.
    ``full``: the log takes no more. ``too_large``: the message is. ``unavailable``: no server took it.
    ``denied``: these credentials may not.
    """

    code: Literal["stale", "in_flight", "full", "too_large", "unavailable", "denied"]
    detail: str = ""


class Unanswered(msgspec.Struct, frozen=True):
    """Nobody said whether the message is in the log. It may still arrive there later."""

    detail: str = ""


Outcome = Appended | Refused | Unanswered

OnStored = Callable[[Stored], None]


class Follower(Protocol):
    """A running read of the log."""

    #: Carries the error when the follower can never go on: its owner should end. Cancelled by :meth:`stop`.
    broken: asyncio.Future[None]

    @property
    def seen(self) -> int:
        """The last sequence that was handed on. What the callback folds is folded up to here."""
        ...

    async def wait_seen(self, seq: int, timeout_s: float) -> None:
        """Wait until ``seq``, of a followed subject, was handed on.

        Raises:
            WaitTimedOut: it was not within ``timeout_s``.
        """
        ...

    async def stop(self) -> None:
        """Hand on nothing more. May be called twice."""
        ...


class Log(Protocol):
    """The shared log."""

    async def append(self, record: Record) -> Outcome:
        """Append once; no retry. See :class:`~gpukeeper.events.recorder.Recorder` for the settled form."""
        ...

    async def last(self, subject: str) -> Stored | None:
        """The newest message of a literal subject (or under a pattern), read from the leader.

        Raises:
            LogUnavailable: the log did not answer.
        """
        ...

    async def get(self, seq: int) -> Stored | None:
        """The message at ``seq``, or None where there is none (any more).

        Raises:
            LogUnavailable: the log did not answer.
        """
        ...

    async def read(self, subject: str, *, after: int = 0) -> Sequence[Stored]:
        """Every message of a literal subject with a sequence above ``after``, as of now.

        Raises:
            LogUnavailable: the log did not answer.
        """
        ...

    async def last_seq(self) -> int:
        """The sequence of the newest message of the whole log, 0 when it is empty.

        Raises:
            LogUnavailable: the log did not answer.
        """
        ...

    async def follow(
        self, on_stored: OnStored, *, after: int, subjects: Sequence[str] = (), newest_only: bool = False
    ) -> Follower:
        """Hand every message above ``after`` to ``on_stored``, history first, then live, in order, once each.

        ``subjects`` narrows it (patterns, none of which may overlap); empty means the whole log. With
        ``newest_only`` (and ``after`` 0) the history is the newest message of each subject.
        ``on_stored`` must not block and must not raise: an exception ends the process that cannot fold.
        """
        ...
