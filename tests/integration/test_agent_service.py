"""An agent over a real log, in this process, on a host whose GPUs change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from gpukeeper.agents.config import AgentConfig
from gpukeeper.agents.service import AgentService
from gpukeeper.events.connection import Connection
from gpukeeper.events.device import Appeared
from gpukeeper.events.host import Joined, Left
from gpukeeper.events.streams import SiteStreams, ensure_site
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
