"""An agent over a real log, in this process, on a host whose GPUs change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from gpukeeper.agents.attempt import Attempt
from gpukeeper.agents.config import AgentConfig, DeviceConfig, RuntimeConfig
from gpukeeper.agents.service import AgentService
from gpukeeper.agents.writer import NotRecorded
from gpukeeper.events import subjects
from gpukeeper.events.codec import encode
from gpukeeper.events.connection import Connection
from gpukeeper.events.device import Appeared
from gpukeeper.events.host import Joined, Left
from gpukeeper.events.jetstream import JetStreamLog
from gpukeeper.events.log import Appended, Record
from gpukeeper.events.route import Routed
from gpukeeper.events.streams import SiteStreams, ensure_site
from support.history import CLOCKS
from support.nvml_stub import Gpu, NvmlStub
from support.waiting import until
from support.watch import Watch

pytest_plugins = ["support.nvml_fixture"]
pytestmark = pytest.mark.processes

A = "GPU-aaaaaaaa-0000-0000-0000-000000000001"
B = "GPU-bbbbbbbb-0000-0000-0000-000000000002"


@pytest.fixture
async def watch(connection: Connection) -> AsyncIterator[Watch]:
    await ensure_site(connection, SiteStreams())
    made = Watch(connection)
    await made.start()
    yield made
    await made.stop()


async def test_a_gpu_that_comes_up_later_is_announced_and_offered(
    connection: Connection, watch: Watch, nvml: NvmlStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpukeeper.agents.service._FIND_DEVICES_EVERY_S", 0.01)
    nvml.host(Gpu(uuid=A))
    agent = AgentService(connection, AgentConfig(host="box", find_runtimes=False))
    stop = asyncio.Event()
    running = asyncio.create_task(agent.run(stop))
    await watch.until(lambda: watch.all(Joined), "it joined")
    await until(lambda: agent.room.take_slot(A), "its slot is offered")
    nvml.host(Gpu(uuid=A), Gpu(uuid=B))
    await watch.until(lambda: len(watch.all(Joined)) == 2, "it joined with what it has found")
    await until(lambda: agent.room.take_slot(B), "the slot of the new one is offered")
    again = agent.room.take_slot(A)
    stop.set()
    await running
    await watch.until(lambda: watch.all(Left), "it said goodbye")

    assert [fact.devices for fact in watch.all(Joined)] == [(A,), (A, B)]
    assert {fact.device for fact in watch.all(Appeared)} == {A, B}
    assert again is None


async def test_a_route_whose_claim_the_log_refuses_for_good_is_not_tried_again_and_again_at_once(
    connection: Connection, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[str] = []

    async def refused(self: Attempt) -> bool:
        tries.append(self.route.job)
        raise NotRecorded("the log takes no claim")

    monkeypatch.setattr("gpukeeper.agents.attempt.Attempt._claim", refused)
    device = DeviceConfig(id="gpu0", source="static", kind="gpu", total_mb=1000)
    runtime = RuntimeConfig(name="ollama", provider="ollama", url="http://127.0.0.1:1")
    config = AgentConfig(host="box", devices=(device,), runtimes=(runtime,), find_devices=False)
    agent = AgentService(connection, config)
    stop = asyncio.Event()
    running = asyncio.create_task(agent.run(stop))
    await watch.until(lambda: watch.all(Joined), "it joined")
    await route(connection, "a")
    await until(lambda: tries, "it tried to claim")
    # What else is stored makes it look at its routes again.
    await route(connection, "b")
    await until(lambda: "b" in tries, "it tried the next one")
    stop.set()
    await running

    assert tries == ["a", "b"]


async def route(connection: Connection, job: str) -> None:
    """A scheduler sends a job here."""
    fact = Routed(
        job=job,
        host="box",
        device="gpu0",
        runtime="ollama",
        submission_seq=1,
        job_seq=1,
        attempt=1,
        clocks=CLOCKS,
    )
    event_id = f"route-{job}"
    body = encode(fact, event_id=event_id, source="/tests", subject=job, time="2025-10-19T14:00:00Z")
    outcome = await JetStreamLog(connection).append(
        Record(subject=subjects.route("box", job), body=body, event_id=event_id)
    )
    assert isinstance(outcome, Appended)
