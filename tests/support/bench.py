"""One agent's attempts on a bench: a log, objects, a card and a runtime in memory, under virtual time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import repeat
from typing import Any, TypeVar

from gpukeeper.agents.attempt import Attempt
from gpukeeper.agents.outputs import Outputs
from gpukeeper.agents.room import HostRoom
from gpukeeper.capacity.device import Device
from gpukeeper.events import subjects
from gpukeeper.events.codec import decode, encode
from gpukeeper.events.fact import Fact
from gpukeeper.events.job import ENDS, Accepted, Clocks
from gpukeeper.events.log import Appended, Outcome, Record
from gpukeeper.events.memory import Fault, MemoryLog
from gpukeeper.events.objects import MemoryObjects
from gpukeeper.events.recorder import Recorder, Stamp
from gpukeeper.events.route import Routed
from gpukeeper.projections.home import home_of
from gpukeeper.projections.hostview import HostView, PendingRoute
from gpukeeper.projections.site import Site
from support.history import CLOCKS
from support.scripted import Card, Cards, Runtime
from support.virtual_time import START_NS, now, now_ns

F = TypeVar("F", bound=Fact)


class WatchedLog(MemoryLog):
    """A log that lets a test do something just before, or just after, the nth append from now on."""

    def __init__(self, **options: Any) -> None:
        super().__init__(now_ns=now_ns, **options)
        self.appends = 0
        self.before: dict[int, Callable[[], Any]] = {}
        self.after: dict[int, Callable[[], Any]] = {}
        #: Subjects, in the order in which appends to them were tried.
        self.tried: list[str] = []

    async def append(self, record: Record) -> Outcome:
        self.appends += 1
        number = self.appends
        self.tried.append(record.subject)
        await _do(self.before.pop(number, None))
        # The wire takes its time, so that things can happen while an append is in the air.
        await asyncio.sleep(0.001)
        outcome = await super().append(record)
        await _do(self.after.pop(number, None))
        await asyncio.sleep(0.001)
        return outcome

    def go_away(self, seconds: float, *, first: Fault = "unavailable") -> None:
        """Take and answer nothing for a while. ``first`` is what becomes of the append that comes first."""
        self.faults.append(first)
        self.faults.extend(repeat("unavailable", 100_000))
        self.unreadable = True
        asyncio.get_running_loop().call_later(seconds, self.come_back)

    def come_back(self) -> None:
        self.faults.clear()
        self.unreadable = False

    async def put(self, record: Record) -> int:
        """Append as somebody else, unwatched."""
        outcome = await super().append(record)
        assert isinstance(outcome, Appended), outcome
        return outcome.seq


async def _do(deed: Callable[[], Any] | None) -> None:
    if deed is not None:
        found = deed()
        if asyncio.iscoroutine(found):
            await found


class Bench:
    """Make it inside a running loop."""

    def __init__(
        self,
        *,
        slots: int = 1,
        kind: str = "gpu",
        log: WatchedLog | None = None,
        **device: Any,
    ) -> None:
        self.log = log or WatchedLog()
        self.objects = MemoryObjects()
        self.published: list[tuple[str, bytes]] = []
        self.device = Device(id="g0", kind=kind, name="card", slots=slots, **device)  # type: ignore[arg-type]
        self.card = Card(self.device)
        self.runtime = Runtime(self.card)
        self._ids = 0
        stamp = Stamp(source="/tests/agent/h1", new_id=lambda: self._new_id("a"), now=lambda: "2025-06-15T12:00:00Z")
        self.recorder = Recorder(self.log, stamp)
        self.view = HostView("h1")
        self.room = HostRoom(
            host="h1",
            boot_id="boot",
            instance_id="h1-1",
            log=self.log,
            recorder=self.recorder,
            payloads=self.objects,
            inventory=Cards([self.card]),
            outputs=Outputs(self._publish),
            view=self.view,
            now=now,
        )
        self.room.open_slots([self.device])

    def _new_id(self, prefix: str) -> str:
        self._ids += 1
        return f"{prefix}-{self._ids}"

    async def _publish(self, subject: str, body: bytes) -> None:
        self.published.append((subject, body))

    @property
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    # --- what others write

    async def put(self, fact: Fact) -> int:
        """Somebody else's fact, where it belongs."""
        subject = home_of(fact) or subjects.command("op")
        event_id = self._new_id("x")
        body = encode(fact, event_id=event_id, source="/tests", subject="x", time="2025-06-15T12:00:00Z")
        return await self.log.put(Record(subject=subject, body=body, event_id=event_id))

    async def submit(self, *, raw: bytes | None = None, **fields: Any) -> int:
        body = json.dumps({"model": "m", "prompt": "p"} | fields).encode() if raw is None else raw
        return await self.log.put(Record(subject="gpuq.submit.cli", body=body, event_id=self._new_id("s")))

    async def send(
        self, job_id: str = "a", *, clocks: Clocks = CLOCKS, attempt: int = 1, raw: bytes | None = None, **fields: Any
    ) -> PendingRoute:
        """Submitted, accepted and routed here. Returns the route."""
        submission = await self.submit(raw=raw, id=job_id, **fields)
        accepted = Accepted(
            job=job_id,
            submission_seq=submission,
            producer="cli",
            digest="d",
            kind="inference",
            task="generate",
            model="m",
            clocks=clocks,
        )
        job_seq = await self.put(accepted)
        return await self.route(job_id, submission, job_seq, clocks=clocks, attempt=attempt)

    async def route(
        self, job_id: str, submission: int, job_seq: int, *, clocks: Clocks = CLOCKS, attempt: int = 1
    ) -> PendingRoute:
        routed = Routed(
            job=job_id,
            host="h1",
            device="g0",
            runtime="ollama",
            submission_seq=submission,
            job_seq=job_seq,
            attempt=attempt,
            clocks=clocks,
        )
        seq = await self.put(routed)
        return PendingRoute(
            seq=seq,
            job=job_id,
            device="g0",
            runtime="ollama",
            submission_seq=submission,
            job_seq=job_seq,
            attempt=attempt,
            clocks=clocks,
        )

    # --- attempts

    def attempt(self, route: PendingRoute, **options: Any) -> Attempt:
        slot = self.room.take_slot("g0")
        assert slot is not None, "no free slot"
        return Attempt(self.room, route, slot, self.runtime, **options)

    async def run(self, **sent: Any) -> Attempt:
        """One attempt at one job, from its route to its end."""
        attempt = self.attempt(await self.send(**sent))
        await attempt.run()
        return attempt

    # --- what the log says

    async def facts(self, subject: str) -> list[Fact]:
        found = [decode(stored).data for stored in await self.log.read(subject)]
        return [fact for fact in found if isinstance(fact, Fact)]

    async def job_facts(self, job_id: str = "a") -> list[Fact]:
        return await self.facts(subjects.job(job_id))

    async def told(self, job_id: str = "a") -> list[str]:
        """The facts on the job's subject after its acceptance, by their names."""
        return [type(fact).__name__ for fact in (await self.job_facts(job_id))[1:]]

    async def device_told(self) -> list[str]:
        return [type(fact).__name__ for fact in await self.facts(subjects.device("h1", "g0"))]

    async def runtime_told(self) -> list[str]:
        return [type(fact).__name__ for fact in await self.facts(subjects.runtime("h1", "ollama"))]

    async def one(self, kind: type[F], job_id: str = "a") -> F:
        """The only fact of its kind on the job's subject."""
        (found,) = [fact for fact in await self.job_facts(job_id) if isinstance(fact, kind)]
        return found

    async def at_s(self, kind: type[Fact]) -> float:
        """When the only fact of its kind was stored, by the loop's clock."""
        (seq,) = [s for s in range(1, await self.log.last_seq() + 1) if isinstance(await self._fact_at(s), kind)]
        stored = await self.log.get(seq)
        assert stored is not None
        return (stored.stored_ns - START_NS) / 1e9

    async def _fact_at(self, seq: int) -> object:
        stored = await self.log.get(seq)
        assert stored is not None
        return decode(stored).data

    async def site(self) -> Site:
        site = Site()
        for seq in range(1, await self.log.last_seq() + 1):
            stored = await self.log.get(seq)
            assert stored is not None
            site.apply(decode(stored))
        return site

    async def ends(self, job_id: str = "a") -> list[str]:
        return [type(fact).__name__ for fact in await self.job_facts(job_id) if isinstance(fact, ENDS)]
