"""Follows a site's log as any reader does, so that a test waits for facts and not for time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from gpukeeper.events import subjects
from gpukeeper.events.codec import Event, decode
from gpukeeper.events.connection import Connection
from gpukeeper.events.errors import LogUnavailable
from gpukeeper.events.fact import Fact
from gpukeeper.events.jetstream import JetStreamLog
from gpukeeper.events.job import ENDS, Accepted, Rejected, Resubmitted, is_note
from gpukeeper.events.log import Stored
from gpukeeper.projections.runner import SiteProjection
from gpukeeper.projections.site import Site
from support.wait import until_answered

#: Far more than anything here takes: it only matters for a test that fails.
WITHIN_S = 60.0

F = TypeVar("F", bound=Fact)
T = TypeVar("T")

Answer = Accepted | Rejected | Resubmitted


class Watch:
    """Every event of a site so far, and the state folded from them."""

    def __init__(self, connection: Connection) -> None:
        self.events: list[Event] = []
        self.by_subject: dict[str, list[Event]] = {}
        #: What was answered to each submission, by its sequence.
        self.answers: dict[int, Answer] = {}
        #: How many answers each submission has got.
        self.answered: Counter[int] = Counter()
        #: How many events of each type there are.
        self.count: Counter[str] = Counter()
        self._log = JetStreamLog(connection)
        self._projection = SiteProjection(self._log, on_event=self._on_event)
        self._waits: list[tuple[Callable[[], object], asyncio.Future[None]]] = []

    @property
    def site(self) -> Site:
        return self._projection.site

    async def start(self) -> None:
        await self._projection.start()

    async def stop(self) -> None:
        await self._projection.stop()

    async def until(self, look: Callable[[], T | None], what: str, *, within_s: float = WITHIN_S) -> T:
        """Look after each event until something true is found, and return that.

        Raises:
            AssertionError: it was not found in time; with the last events.
        """
        if not look():
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waits.append((look, future))
            try:
                async with asyncio.timeout(within_s):
                    await future
            except TimeoutError:
                raise AssertionError(f"not within {within_s:g} s: {what}; the last events:\n{self.last()}") from None
            finally:
                self._waits.remove((look, future))
        found = look()
        assert found, f"{what}: was so, and is not any more"
        return found

    def _on_event(self, event: Event) -> None:
        self.events.append(event)
        self.by_subject.setdefault(event.stored.subject, []).append(event)
        if isinstance(event.data, Answer):
            self.answers.setdefault(event.data.submission_seq, event.data)
            self.answered[event.data.submission_seq] += 1
        self.count[event.data.TYPE if isinstance(event.data, Fact) else type(event.data).__name__] += 1
        for look, future in self._waits:
            if not future.done() and look():
                future.set_result(None)

    # --- what is known

    def all(self, kind: type[F]) -> list[F]:
        return [event.data for event in self.events if isinstance(event.data, kind)]

    def of_job(self, job: str, kind: type[F]) -> list[F]:
        """Facts of one kind on the job's own subject."""
        return [e.data for e in self.by_subject.get(subjects.job(job), []) if isinstance(e.data, kind)]

    def of_device(self, host: str, device: str, kind: type[F]) -> list[F]:
        return [e.data for e in self.by_subject.get(subjects.device(host, device), []) if isinstance(e.data, kind)]

    def history(self, job: str) -> list[str]:
        """The short names of everything on the job's subject: ``accepted``, ``admitted``, ..."""
        return [_name(event) for event in self.by_subject.get(subjects.job(job), [])]

    def ends(self, job: str) -> list[Fact]:
        return [e.data for e in self.by_subject.get(subjects.job(job), []) if isinstance(e.data, ENDS)]

    def after_end(self, job: str) -> list[str]:
        """What stands on the job's subject after its end and is no note."""
        events = self.by_subject.get(subjects.job(job), [])
        place = next((n for n, event in enumerate(events) if isinstance(event.data, ENDS)), len(events))
        later = events[place + 1 :]
        return [_name(e) for e in later if isinstance(e.data, Fact) and not is_note(e.data)]

    def ended(self) -> int:
        return sum(self.count[kind.TYPE] for kind in ENDS)

    # --- waiting for it

    async def answer(self, submission_seq: int, *, within_s: float = WITHIN_S) -> Answer:
        return await self.until(
            lambda: self.answers.get(submission_seq), f"an answer to submission {submission_seq}", within_s=within_s
        )

    async def fact(self, job: str, kind: type[F], *, times: int = 1, within_s: float = WITHIN_S) -> F:
        """The ``times``-th fact of this kind on the job's subject."""

        def look() -> F | None:
            found = self.of_job(job, kind)
            return found[times - 1] if len(found) >= times else None

        return await self.until(look, f"{kind.__name__} of {job} ({times} times)", within_s=within_s)

    async def end(self, job: str, *, within_s: float = WITHIN_S) -> Fact:
        """The fact that ends the job."""
        return (await self.until(lambda: self.ends(job), f"the end of {job}", within_s=within_s))[0]

    async def caught_up(self) -> None:
        """Wait until everything that is stored by now is folded; the server may just be coming back."""
        (last_seq,) = await until_answered(self._last_seq, "the log answers")
        await self._projection.wait_folded(last_seq)

    async def _last_seq(self) -> tuple[int] | None:
        try:
            return (await self._log.last_seq(),)
        except LogUnavailable:
            return None

    async def refold(self) -> Site:
        """The state folded anew from sequence 1, up to where this watch is."""
        fresh = Site(self.site.retention)
        until = self.site.seq

        def fold(stored: Stored) -> None:
            if stored.seq <= until:
                fresh.apply(decode(stored))

        follower = await self._log.follow(fold, after=0)
        try:
            await follower.wait_seen(until, WITHIN_S)
        finally:
            await follower.stop()
        return fresh

    def last(self, count: int = 40) -> str:
        lines = [f"  {e.seq} {e.stored.subject} {_name(e)} {str(e.data)[:240]}" for e in self.events[-count:]]
        return "\n".join(lines)


def _name(event: Event) -> str:
    return event.data.TYPE.split(".")[2] if isinstance(event.data, Fact) else type(event.data).__name__.lower()
