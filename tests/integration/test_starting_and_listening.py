"""The services of a process, started and stopped while the log gives them trouble."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from gpukeeper.agents.config import AgentConfig, DeviceConfig
from gpukeeper.agents.service import AgentService
from gpukeeper.events import device, subjects
from gpukeeper.events.clock import new_id, now_rfc3339
from gpukeeper.events.codec import decode
from gpukeeper.events.connection import Connection, connect
from gpukeeper.events.jetstream import JetStreamLog
from gpukeeper.events.log import Appended, Follower, OnStored, Stored
from gpukeeper.events.proposal import Proposal
from gpukeeper.events.recorder import Recorder, Stamp
from gpukeeper.events.streams import ensure_site
from gpukeeper.projections.hostview import HostView
from gpukeeper.scheduler.config import SchedulerConfig
from gpukeeper.scheduler.service import SchedulerService
from support.nats import NatsServer
from support.wait import until_answered

pytestmark = pytest.mark.processes

WITHIN_S = 20.0
CONFIG = AgentConfig(
    host="h1",
    site="main",
    devices=(DeviceConfig(id="g0", source="static", kind="cpu", total_mb=1_000),),
    find_devices=False,
    find_runtimes=False,
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    own = NatsServer(tmp_path)
    try:
        own.start()
        yield own
    finally:
        own.stop()


@pytest.fixture
async def own(server: NatsServer) -> AsyncIterator[Connection]:
    connection = await connect(server.settings(), name="tests")
    await ensure_site(connection)
    yield connection
    await connection.close()


@pytest.mark.parametrize("part", ["scheduler", "agent"])
async def test_a_part_that_waits_for_the_log_at_its_start_stops_when_it_is_told_to(
    server: NatsServer, own: Connection, part: str
) -> None:
    service = SchedulerService(own, SchedulerConfig()) if part == "scheduler" else AgentService(own, CONFIG)
    stop = asyncio.Event()
    server.freeze()
    running = asyncio.create_task(service.run(stop))
    # An agent asks for a second whether another one is there.
    await asyncio.wait({running}, timeout=1.5)
    assert not running.done()

    stop.set()

    await asyncio.wait_for(running, 2)
    server.resume()


class LateLog(JetStreamLog):
    """A log whose events are handed on only when somebody waits for one of them."""

    async def follow(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, on_stored: OnStored, *, after: int, subjects: Sequence[str] = (), newest_only: bool = False
    ) -> Follower:
        held: list[Stored] = []
        follower = await super().follow(held.append, after=after, subjects=subjects, newest_only=newest_only)
        return LateFollower(follower, held, on_stored)


class LateFollower:
    def __init__(self, follower: Follower, held: list[Stored], on_stored: OnStored) -> None:
        self._follower = follower
        self._held = held
        self._on_stored = on_stored
        self.broken = follower.broken
        self.seen = 0

    async def wait_seen(self, seq: int, timeout_s: float) -> None:
        await self._follower.wait_seen(seq, timeout_s)
        for stored in self._held:
            self._on_stored(stored)
            self.seen = stored.seq
        self._held.clear()

    async def stop(self) -> None:
        await self._follower.stop()


async def test_a_claim_that_was_in_the_air_when_its_agent_was_replaced_is_ended_too(connection: Connection) -> None:
    """Else it would hold its slot until it lapses."""
    await ensure_site(connection)
    log = JetStreamLog(connection)
    recorder = Recorder(log, Stamp(source="/tests", new_id=new_id, now=now_rfc3339))
    device_subject = subjects.device("h1", "g0")

    class Follows(AgentService):
        async def _follow(self) -> tuple[HostView, Follower]:
            followed = await super()._follow()
            claim = device.Claimed(
                host="h1", device="g0", job="a", attempt=1, slot=0, route_seq=1, boot_id="b", instance_id="before"
            )
            outcome = await recorder.record(Proposal(subject=device_subject, fact=claim, expected=0, aggregate="h1/g0"))
            assert isinstance(outcome, Appended)
            return followed

    agent = Follows(connection, CONFIG)
    agent._log = LateLog(connection)  # pyright: ignore[reportPrivateUsage]
    stop = asyncio.Event()
    running = asyncio.create_task(agent.run(stop))

    async def lapsed() -> device.ClaimLapsed | None:
        facts = [decode(stored).data for stored in await log.read(device_subject)]
        return next((fact for fact in facts if isinstance(fact, device.ClaimLapsed)), None)

    ended = await until_answered(lapsed, "the claim is ended", within_s=WITHIN_S)
    assert (ended.job, ended.epoch) == ("a", 1)
    stop.set()
    await running
