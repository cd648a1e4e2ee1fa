"""The log in memory: a product for tests and simulation. It round-trips bytes and keeps the server's quirks.

``check_order`` says whether the sequence is checked before duplicates are looked for, as a single server does
(``"sequence_first"``), or after, as a cluster does (``"duplicates_first"``).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from gpukeeper.events.errors import LogUnavailable, WaitTimedOut
from gpukeeper.events.log import Appended, OnStored, Outcome, Record, Refused, Stored, Unanswered
from gpukeeper.events.subjects import matches

#: What happens to one append: nothing special, stored but unanswered, lost and unanswered, or refused.
Fault = Literal["stored_unanswered", "lost_unanswered", "unavailable"]


class MemoryLog:
    """All messages in one list; sequence = place + 1."""

    def __init__(
        self,
        *,
        now_ns: Callable[[], int],
        check_order: Literal["sequence_first", "duplicates_first"] = "sequence_first",
        duplicate_window_ns: int = 120_000_000_000,
        message_bytes_max: int = 1_048_576,
    ) -> None:
        self._messages: list[Stored] = []
        #: Messages that have aged out, from the first on.
        self._gone = 0
        self._last_of: dict[str, int] = {}
        self._ids: dict[str, tuple[int, int]] = {}
        self._followers: list[MemoryFollower] = []
        self._now_ns = now_ns
        self._check_order = check_order
        self._duplicate_window_ns = duplicate_window_ns
        self._message_bytes_max = message_bytes_max
        #: Faults for the next appends, in order.
        self.faults: deque[Fault | None] = deque()
        #: While True, reads raise :class:`LogUnavailable`.
        self.unreadable = False

    async def append(self, record: Record) -> Outcome:
        fault = self.faults.popleft() if self.faults else None
        if fault == "unavailable":
            return Refused("unavailable", "no server")
        if fault == "lost_unanswered":
            return Unanswered("lost")
        outcome = self._append(record)
        return Unanswered("stored") if fault == "stored_unanswered" else outcome

    def _append(self, record: Record) -> Outcome:
        if len(record.body) > self._message_bytes_max:
            return Refused("too_large", f"{len(record.body)} bytes, at most {self._message_bytes_max}")
        stale = record.expected is not None and record.expected != self._last_of.get(record.subject, 0)
        if stale and self._check_order == "sequence_first":
            return Refused("stale", "wrong last sequence")
        now_ns = self._now_ns()
        known = self._ids.get(record.event_id)
        if known is not None and now_ns - known[1] <= self._duplicate_window_ns:
            return Appended(known[0])
        if stale:
            return Refused("stale", "wrong last sequence")
        stored = Stored(len(self._messages) + 1, now_ns, record.subject, record.body)
        self._messages.append(stored)
        self._last_of[record.subject] = stored.seq
        self._ids[record.event_id] = (stored.seq, now_ns)
        for follower in tuple(self._followers):
            follower.offer(stored)
        return Appended(stored.seq)

    def age_out(self, seq: int) -> None:
        """Let every message up to ``seq`` age out. Sequences go on from where they were."""
        self._gone = max(self._gone, min(seq, len(self._messages)))
        self._last_of = {subject: last for subject, last in self._last_of.items() if last > self._gone}

    def _after(self, seq: int) -> Sequence[Stored]:
        return self._messages[max(seq, self._gone) :]

    def _require_readable(self) -> None:
        if self.unreadable:
            raise LogUnavailable("the log does not answer")

    async def last(self, subject: str) -> Stored | None:
        self._require_readable()
        if "*" in subject or ">" in subject:
            return next((m for m in reversed(self._after(0)) if matches(subject, m.subject)), None)
        seq = self._last_of.get(subject)
        return self._messages[seq - 1] if seq else None

    async def get(self, seq: int) -> Stored | None:
        self._require_readable()
        return self._messages[seq - 1] if self._gone < seq <= len(self._messages) else None

    async def read(self, subject: str, *, after: int = 0) -> Sequence[Stored]:
        self._require_readable()
        return [m for m in self._after(after) if m.subject == subject]

    async def last_seq(self) -> int:
        self._require_readable()
        return len(self._messages)

    async def follow(
        self, on_stored: OnStored, *, after: int, subjects: Sequence[str] = (), newest_only: bool = False
    ) -> MemoryFollower:
        self._require_readable()
        follower = MemoryFollower(on_stored, after, tuple(subjects), self._followers.remove)
        self._followers.append(follower)
        for stored in self._after(after):
            if not newest_only or after or self._last_of[stored.subject] == stored.seq:
                follower.offer(stored)
        return follower


class MemoryFollower:
    """A running read of a :class:`MemoryLog`."""

    def __init__(
        self,
        on_stored: OnStored,
        after: int,
        subjects: tuple[str, ...],
        forget: Callable[[MemoryFollower], None],
    ) -> None:
        self._on_stored = on_stored
        self._subjects = subjects
        self._seen = after
        self._changed = asyncio.Event()
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._forget: Callable[[MemoryFollower], None] | None = forget

    @property
    def seen(self) -> int:
        return self._seen

    def offer(self, stored: Stored) -> None:
        if self._forget is None or stored.seq <= self._seen:
            return
        if self._subjects and not any(matches(pattern, stored.subject) for pattern in self._subjects):
            return
        try:
            self._on_stored(stored)
        except BaseException as error:
            # The follower is broken, not the append that it hears of.
            self._drop()
            self.broken.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        self._seen = stored.seq
        self._changed.set()

    async def wait_seen(self, seq: int, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while self._seen < seq:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise WaitTimedOut(f"sequence {seq} was not seen within {timeout_s} s", seq=seq, seen=self._seen) from None

    async def stop(self) -> None:
        self._drop()
        if not self.broken.done():
            self.broken.cancel()

    def _drop(self) -> None:
        forget, self._forget = self._forget, None
        if forget is not None:
            forget(self)
