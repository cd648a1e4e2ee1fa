"""An agent of a :mod:`support.world`, as its service runs it, and as much of a scheduler as sends it jobs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from msgspec.structs import replace

from gpukeeper.agents.attempt import Attempt, Stop
from gpukeeper.agents.config import AgentConfig
from gpukeeper.agents.containers.port import ContainerState
from gpukeeper.agents.containers.steward import Steward
from gpukeeper.agents.memory.takeover import close_releases
from gpukeeper.agents.memory.wishes import Wishes
from gpukeeper.agents.outputs import Outputs
from gpukeeper.agents.room import HostRoom
from gpukeeper.agents.surveyor import Surveyor
from gpukeeper.events import job as job_facts
from gpukeeper.events import subjects
from gpukeeper.events.codec import Event, decode, encode
from gpukeeper.events.device import ClaimLapsed
from gpukeeper.events.fact import Fact
from gpukeeper.events.host import Joined
from gpukeeper.events.log import Appended, Outcome, Record, Stored
from gpukeeper.events.memory import MemoryLog
from gpukeeper.events.objects import MemoryObjects
from gpukeeper.events.reasons import Reason
from gpukeeper.events.recorder import Recorder, Stamp
from gpukeeper.events.route import Routed
from gpukeeper.projections.home import home_of
from gpukeeper.projections.hostview import HostView
from gpukeeper.projections.job import Phase
from gpukeeper.projections.site import Site
from gpukeeper.scheduler.reap import decide_orphans
from support.history import clocks
from support.scripted_engine import ScriptedEngine
from support.virtual_time import now_ns
from support.world import WorldCard, WorldInventory, WorldRuntime

HOST = "h1"
HEARTBEAT_S = 5.0
#: What was sent to a host and is taken by nobody for so long is tried again.
_ROUTE_AGAIN_S = 4.0


class WireLog(MemoryLog):
    """An append takes its time both ways. Of an agent that is gone nothing arrives any more."""

    def __init__(self) -> None:
        super().__init__(now_ns=now_ns)


class _Wire:
    """One agent's way to the log."""

    def __init__(self, log: WireLog) -> None:
        self._log = log
        self.cut = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def append(self, record: Record) -> Outcome:
        await asyncio.sleep(0.001)
        if self.cut:
            await asyncio.Event().wait()
        outcome = await self._log.append(record)
        await asyncio.sleep(0.001)
        return outcome


class _Containers(ScriptedEngine):
    """Each runtime runs in a container, by whose id the cards tell its processes."""

    async def inspect(self, name: str) -> ContainerState:
        return replace(await super().inspect(name), id=name)


async def _unheard(subject: str, body: bytes) -> None:
    """Nobody watches the outputs."""


class Agent:
    """One life of the agent: what ``AgentService`` does, over a log in memory."""

    def __init__(self, host: Host, number: int) -> None:
        self.host = host
        self.wire = _Wire(host.log)
        self.instance_id = f"{HOST}-{number}"
        self.view = HostView(HOST)
        stamp = Stamp(source="/tests/agent", new_id=host.new_id, now=lambda: "2025-06-15T12:00:00Z")
        recorder = Recorder(self.wire, stamp)  # type: ignore[arg-type]
        self.room = HostRoom(
            host=HOST,
            boot_id="boot",
            instance_id=self.instance_id,
            log=self.wire,  # type: ignore[arg-type]
            recorder=recorder,
            payloads=MemoryObjects(),
            inventory=host.inventory,
            outputs=Outputs(_unheard),
            view=self.view,
            now=host.moment,
        )
        self.attempts: dict[int, Attempt] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self._claimed: set[int] = set()
        config = AgentConfig(
            host=HOST, heartbeat_s=HEARTBEAT_S, runtimes=tuple(runtime.config for runtime in host.runtimes)
        )
        steward = self.room.observer.steward = Steward(config, _Containers())
        self._wishes = Wishes(self.room, steward)
        self._joined_seq = 0
        self._beats = MemoryLog(now_ns=now_ns)
        self.surveyor = Surveyor(
            self.room,
            config,
            self._beats,
            {runtime.name: runtime for runtime in host.runtimes},
            lambda: [beat for attempt in self.attempts.values() for beat in attempt.beats()],
            self._on_lost,
        )
        self._survey: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.follower = await self.host.log.follow(self._on_stored, after=0, subjects=subjects.followed_by_agent(HOST))
        await self.surveyor.announce()
        joined = Joined(
            host=HOST,
            boot_id="boot",
            instance_id=self.instance_id,
            version="1",
            pid=1,
            devices=tuple(card.device.id for card in self.host.cards),
            runtimes=tuple(runtime.name for runtime in self.host.runtimes),
        )
        self._joined_seq = await self.host.put(joined)
        for device_id, claims in tuple(self.view.claims.items()):
            for claim in tuple(claims.values()):
                lapsed = ClaimLapsed(
                    host=HOST,
                    device=device_id,
                    epoch=claim.epoch,
                    job=claim.job,
                    reason=Reason.CLAIM_LAPSED,
                    detail="a new agent speaks for the host",
                )
                await self.room.device_subject(device_id).append(lapsed, job=claim.job, epoch=claim.epoch)
        await close_releases(self.room, self._joined_seq)
        self.room.open_slots(card.device for card in self.host.cards)
        self._survey = asyncio.create_task(self.surveyor.run())
        self._on_change()

    def _on_stored(self, stored: Stored) -> None:
        self.view.apply(decode(stored))
        self._on_change()

    def _on_change(self) -> None:
        for attempt in self.attempts.values():
            claims = self.view.claims.get(attempt.slot.device.id, {})
            if (
                attempt.epoch
                and attempt.epoch <= self.view.seq
                and attempt.epoch not in claims
                and not attempt.released
            ):
                attempt.stop(Stop.FENCED)
        if self._survey is None:
            return
        self._wishes.take_up()
        self._claimed &= {route.seq for route in self.view.routes.values()}
        for route in tuple(self.view.routes.values()):
            if route.seq in self.attempts or route.seq in self._claimed or not self.room.may_claim(route.device):
                continue
            slot = self.room.take_slot(route.device)
            if slot is not None:
                self._begin(Attempt(self.room, route, slot, self.host.runtime(route.runtime)))

    def _begin(self, attempt: Attempt) -> None:
        self.attempts[attempt.route.seq] = attempt
        task = asyncio.create_task(attempt.run(), name=f"attempt {attempt.route.job}")
        self.tasks.add(task)

        def over(task: asyncio.Task[None]) -> None:
            self.tasks.discard(task)
            del self.attempts[attempt.route.seq]
            self.room.give_slot(attempt.slot)
            if attempt.epoch:
                self._claimed.add(attempt.route.seq)
            if not task.cancelled() and (error := task.exception()) is not None:
                self.host.broken.append(f"an attempt at {attempt.route.job} broke: {error!r}")
            if not self.wire.cut:
                self._on_change()

        task.add_done_callback(over)

    def _on_lost(self, device_id: str, why: str) -> None:
        for attempt in self.attempts.values():
            if attempt.slot.device.id == device_id and attempt.epoch:
                attempt.stop(Stop.DEVICE_LOST, why)

    async def kill(self) -> None:
        """Its process ends at once: nothing that it still does reaches anybody."""
        self.wire.cut = True
        await self.follower.stop()
        doomed = [task for task in asyncio.all_tasks() if task not in self.host.own_tasks]
        while doomed:
            for task in doomed:
                task.cancel()
            await asyncio.wait(doomed, timeout=0.01)
            doomed = [task for task in asyncio.all_tasks() if task not in self.host.own_tasks]

    async def stop(self) -> None:
        """It is told to stop: it hands back what it has, in order."""
        for attempt in tuple(self.attempts.values()):
            attempt.stop(Stop.PREEMPT)
        if self.tasks:
            await asyncio.wait(self.tasks)
        await self._wishes.close()
        if self._survey is not None:
            self._survey.cancel()
            await asyncio.gather(self._survey, return_exceptions=True)
        await self.follower.stop()


class Host:
    """The world's machine: its log, its cards, its runtimes, its agent, and who sends jobs there."""

    def __init__(self, cards: list[WorldCard], runtimes: list[WorldRuntime], moment: Callable[[], Any]) -> None:
        self.log = WireLog()
        self.cards = cards
        self.runtimes = runtimes
        self.moment = moment
        self.inventory = WorldInventory(cards)
        self.site = Site()
        #: Rules that were broken, in words.
        self.broken: list[str] = []
        #: What is not the agent's: it goes on when that ends.
        self.own_tasks: set[asyncio.Task[Any]] = set()
        self.events: list[Event] = []
        self.jobs: dict[str, tuple[str, str]] = {}
        self.paused = False
        self._tried_s: dict[str, float] = {}
        self._ids = 0
        self._lives = 0
        self.agent: Agent

    def runtime(self, name: str) -> WorldRuntime:
        return next(runtime for runtime in self.runtimes if runtime.name == name)

    def new_id(self) -> str:
        self._ids += 1
        return f"id-{self._ids}"

    def own(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.own_tasks.add(task)
        return task

    async def begin(self) -> None:
        current = asyncio.current_task()
        assert current is not None
        self.own_tasks.add(current)
        await self.log.follow(self._on_stored, after=0)
        await self.new_agent()

    async def new_agent(self) -> None:
        self._lives += 1
        for runtime in self.runtimes:
            # Evidence of one life is none in the next.
            runtime.given.clear()
        self.agent = Agent(self, self._lives)
        await self.agent.start()

    def _on_stored(self, stored: Stored) -> None:
        event = decode(stored)
        self.events.append(event)
        self.site.apply(event)

    # --- what others write

    async def put(self, fact: Fact, *, subject: str | None = None, expected: int | None = None) -> int:
        home = subject or home_of(fact)
        assert home is not None
        event_id = self.new_id()
        body = encode(fact, event_id=event_id, source="/tests", subject="x", time="2025-06-15T12:00:00Z")
        outcome = await self.log.append(Record(subject=home, body=body, event_id=event_id, expected=expected))
        return outcome.seq if isinstance(outcome, Appended) else 0

    async def submit(self, device: str, runtime: str, model: str, *, vram_mb: int | None, residency: str | None) -> str:
        job = f"job-{len(self.jobs)}"
        spec: dict[str, Any] = {"id": job, "model": model, "prompt": "p"}
        if vram_mb is not None:
            spec["need"] = {"vram_mb": vram_mb}
        if residency is not None:
            spec["residency"] = residency
        raw = json.dumps(spec).encode()
        outcome = await self.log.append(Record(subject="gpuq.submit.cli", body=raw, event_id=self.new_id()))
        assert isinstance(outcome, Appended)
        self.jobs[job] = (device, runtime)
        accepted = job_facts.Accepted(
            job=job,
            submission_seq=outcome.seq,
            producer="cli",
            digest="d",
            kind="inference",
            task="generate",
            model=model,
            clocks=clocks(load=60, queue=100_000),
        )
        await self.put(accepted)
        return job

    async def cancel(self, job: str) -> None:
        known = self.site.jobs[job]
        if known.ended or known.phase is Phase.WAITING:
            return
        wish = job_facts.CancelRequested(job=job, command_seq=1, actor="mo")
        await self.put(wish, expected=known.seq)

    async def schedule(self) -> None:
        """Send what waits to where it belongs, and say what becomes of jobs whose claims are gone."""
        for proposal in decide_orphans(self.site):
            await self.put(proposal.fact, expected=proposal.expected)
        now_s = asyncio.get_running_loop().time()
        for job, (device, runtime) in self.jobs.items():
            known = self.site.jobs[job]
            waited_s = now_s - self._tried_s.get(job, -_ROUTE_AGAIN_S)
            if self.paused or known.phase is not Phase.WAITING or waited_s < _ROUTE_AGAIN_S:
                continue
            if self.site.free_slots(self.site.devices[f"{HOST}/{device}"]) <= 0:
                continue
            self._tried_s[job] = now_s
            routed = Routed(
                job=job,
                host=HOST,
                device=device,
                runtime=runtime,
                submission_seq=known.submission_seq,
                job_seq=known.seq,
                attempt=known.attempt + 1,
                clocks=known.clocks or clocks(),
            )
            await self.put(routed)
