"""One attempt on a log in memory: everything of an agent's host but the process, its NATS and its dispatcher."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from gpukeeper.agents.attempt import Attempt
from gpukeeper.agents.config import AgentConfig, DeviceConfig
from gpukeeper.agents.devices.inventory import Inventory
from gpukeeper.agents.outputs import Outputs
from gpukeeper.agents.room import HostRoom
from gpukeeper.agents.runtimes.port import Provider
from gpukeeper.events import job as facts
from gpukeeper.events import subjects
from gpukeeper.events.clock import new_id, now, now_rfc3339
from gpukeeper.events.codec import decode, encode
from gpukeeper.events.fact import Fact
from gpukeeper.events.log import Appended, Record, Stored
from gpukeeper.events.memory import MemoryLog
from gpukeeper.events.objects import MemoryObjects
from gpukeeper.events.recorder import Recorder, Stamp
from gpukeeper.events.route import Routed
from gpukeeper.projections.hostview import HostView
from support.history import CLOCKS

HOST = "h1"
#: Far more than any step takes: it only matters for a test that fails.
_WITHIN_S = 20.0
CARD = DeviceConfig(id="gpu0", source="static", kind="gpu", total_mb=24_000)

AnyFact = TypeVar("AnyFact", bound=Fact)


async def _unheard(subject: str, body: bytes) -> None:
    """Nobody watches the outputs."""


class Rig:
    """A host's room over a log in memory, and the history that its attempts write there."""

    def __init__(self, devices: Sequence[DeviceConfig] = (CARD,)) -> None:
        self.log = MemoryLog(now_ns=time.time_ns)
        self.recorder = Recorder(self.log, Stamp(source="/tests", new_id=new_id, now=now_rfc3339))
        self.config = AgentConfig(host=HOST, devices=tuple(devices), find_devices=False, find_runtimes=False)
        self.inventory = Inventory(self.config, now=now)
        self.view = HostView(HOST)
        self.facts: list[Fact] = []
        self._changed = asyncio.Event()
        self.room = HostRoom(
            host=HOST,
            boot_id="boot",
            instance_id="one",
            log=self.log,
            recorder=self.recorder,
            payloads=MemoryObjects(),
            inventory=self.inventory,
            outputs=Outputs(_unheard),
            view=self.view,
        )
        self.room.watch_after_s = 0.0
        self.room.stop_proof_limit_s = 0.0

    def on_stored(self, stored: Stored) -> None:
        event = decode(stored)
        self.view.apply(event)
        if isinstance(event.data, Fact):
            self.facts.append(event.data)
            self._changed.set()

    async def append(self, fact: Fact, subject: str) -> int:
        """Somebody else's fact."""
        event_id = new_id()
        body = encode(fact, event_id=event_id, source="/tests", subject="tests", time=now_rfc3339())
        outcome = await self.log.append(Record(subject=subject, body=body, event_id=event_id))
        assert isinstance(outcome, Appended)
        return outcome.seq

    async def attempt(self, provider: Provider, job: str = "a", *, device: str = "gpu0", **spec: Any) -> Attempt:
        """A job that was sent here, and the attempt at it, which is still to be run."""
        body = json.dumps({"id": job, "model": "m:8b", "prompt": "the job", **spec}).encode()
        outcome = await self.log.append(Record(subject="gpuq.submit.tests", body=body, event_id=new_id()))
        assert isinstance(outcome, Appended)
        accepted = facts.Accepted(
            job=job,
            submission_seq=outcome.seq,
            producer="tests",
            digest="d",
            kind="inference",
            task="generate",
            model="m:8b",
            clocks=CLOCKS,
        )
        job_seq = await self.append(accepted, subjects.job(job))
        routed = Routed(
            job=job,
            host=HOST,
            device=device,
            runtime=provider.config.name,
            submission_seq=outcome.seq,
            job_seq=job_seq,
            attempt=1,
            clocks=CLOCKS,
        )
        await self.append(routed, subjects.route(HOST, job))
        slot = self.room.take_slot(device)
        assert slot is not None, "no slot is free"
        return Attempt(self.room, self.view.routes[job], slot, provider)

    async def cancel(self, job: str = "a") -> None:
        """The scheduler passes on a wish for the job's end."""
        wish = facts.CancelRequested(job=job, command_seq=77, actor="mo", reason="enough")
        await self.append(wish, subjects.job(job))

    def of(self, kind: type[AnyFact]) -> list[AnyFact]:
        return [fact for fact in self.facts if isinstance(fact, kind)]

    async def until(self, kind: type[AnyFact], *, times: int = 1) -> AnyFact:
        """The ``times``-th fact of that kind, once it is stored."""
        async with asyncio.timeout(_WITHIN_S):
            while len(found := self.of(kind)) < times:
                self._changed.clear()
                await self._changed.wait()
        return found[times - 1]


async def reached(look: Callable[[], object], what: str) -> None:
    """Let the loop turn until ``look`` finds something true.

    Raises:
        AssertionError: it never did; names ``what`` was looked for.
    """
    give_up_at = time.monotonic() + _WITHIN_S
    while not look():
        assert time.monotonic() < give_up_at, f"never: {what}"
        await asyncio.sleep(0)


@asynccontextmanager
async def rig(*devices: DeviceConfig) -> AsyncGenerator[Rig]:
    """A host with these devices, or one declared GPU; its slots are open."""
    made = Rig(devices or (CARD,))
    follower = await made.log.follow(made.on_stored, after=0)
    try:
        made.room.open_slots(await made.inventory.find())
        yield made
    finally:
        await follower.stop()
        await made.inventory.close()
