"""The grace of 300 s with the providers' own looks at servers, on a clock that the test moves (C29, C31, C32)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from gpukeeper.agents.config import RuntimeConfig
from gpukeeper.agents.memory.tenancy import Tenancy
from gpukeeper.agents.runtimes.comfyui import ComfyUI
from gpukeeper.agents.runtimes.port import Provider
from gpukeeper.agents.runtimes.vllm import Vllm
from gpukeeper.capacity.owners import owners_on
from gpukeeper.capacity.reclaim import plan
from gpukeeper.events.instants import utc_text
from gpukeeper.events.reasons import Reason
from support.comfyui_fake import FakeComfyUI
from support.moments import Moments
from support.vllm_fake import FakeVllm

GRACE_S = 300.0
LOOK_EVERY_S = 5.0
GRAPH: dict[str, Any] = {"1": {"class_type": "KSampler", "inputs": {"seed": 1}}}


class Watched:
    """One server, looked at by its provider every five seconds of a moved clock."""

    def __init__(self, provider: Provider) -> None:
        self.clock = Moments()
        self.provider = provider
        self.tenancy = Tenancy(now=self.clock)
        self.tenancy.register(provider, grace_s=GRACE_S, gap_max_s=3 * LOOK_EVERY_S)

    async def look(self) -> None:
        self.tenancy.looked(replace(await self.provider.look(), read_at=utc_text(self.clock())))

    async def for_s(self, seconds: float) -> None:
        """Let so much time pass, with looks from its first moment to its last."""
        await self.look()
        while seconds > 0:
            self.clock.pass_s(min(LOOK_EVERY_S, seconds))
            seconds -= LOOK_EVERY_S
            await self.look()

    def kept(self) -> Reason | None:
        """Why it stays; None where it may be asked to let go."""
        (considered,) = plan(None, owners_on("g0", self.tenancy.tenants(("g0",), {}))).considered
        return considered.kept


@pytest.fixture
async def comfyui() -> AsyncIterator[tuple[FakeComfyUI, Watched]]:
    async with FakeComfyUI() as fake:
        fake.held = 4_000_000_000
        provider = ComfyUI(RuntimeConfig(name="comfyui", provider="comfyui", url=fake.url, devices=("g0",)))
        yield fake, Watched(provider)
        await provider.close()


@pytest.fixture
async def vllm() -> AsyncIterator[tuple[FakeVllm, Watched]]:
    async with FakeVllm() as fake:
        config = RuntimeConfig(name="vllm", provider="vllm", url=fake.url, devices=("g0",), holds_mb=8_000)
        provider = Vllm(config)
        yield fake, Watched(provider)
        await provider.close()


@pytest.mark.parametrize(("seconds", "kept"), [(299, Reason.IN_GRACE), (301, None)])
async def test_c29_a_comfyui_with_an_open_socket_and_empty_queues_may_go_after_its_grace(
    comfyui: tuple[FakeComfyUI, Watched], seconds: float, kept: Reason | None
) -> None:
    fake, watched = comfyui
    _, writer = await asyncio.open_connection("127.0.0.1", fake.port)
    writer.write(b"GET /ws HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
    await watched.for_s(seconds)
    held_open = fake.sockets
    writer.close()
    await writer.wait_closed()

    assert held_open == 1
    assert watched.kept() == kept


@pytest.mark.parametrize(("seconds", "kept"), [(299, Reason.IN_GRACE), (301, None)])
async def test_c29_a_prompt_in_the_queue_is_work_and_the_grace_begins_when_it_has_ended(
    comfyui: tuple[FakeComfyUI, Watched], seconds: float, kept: Reason | None
) -> None:
    fake, watched = comfyui
    await watched.for_s(250)
    fake.hold = asyncio.Event()
    for _ in range(2):
        fake.queue_prompt(GRAPH)
    await watched.for_s(400)
    while_it_ran = watched.kept()
    fake.hold.set()
    while fake.busy:
        await asyncio.sleep(0)
    await watched.for_s(seconds)

    assert while_it_ran == Reason.OWNER_BUSY
    assert watched.kept() == kept


@pytest.mark.parametrize(("seconds", "kept"), [(299, Reason.IN_GRACE), (301, None)])
async def test_c31_requests_that_wait_are_work_however_long_none_runs(
    vllm: tuple[FakeVllm, Watched], seconds: float, kept: Reason | None
) -> None:
    fake, watched = vllm
    fake.engines = [[0.0, 0.0], [0.0, 6.0]]
    await watched.for_s(1_000)
    while_they_wait = watched.kept()
    fake.engines = [[0.0, 0.0], [0.0, 0.0]]
    await watched.for_s(seconds)

    assert while_they_wait == Reason.OWNER_BUSY
    assert watched.kept() == kept


@pytest.mark.parametrize("text", ["", 'vllm:num_requests_running{engine="0"} 0.0\n'], ids=["nothing", "one of two"])
async def test_c32_a_single_look_without_the_figures_begins_the_grace_anew(
    vllm: tuple[FakeVllm, Watched], text: str
) -> None:
    fake, watched = vllm
    await watched.for_s(301)
    before = watched.kept()
    fake.metrics_text = text
    await watched.look()
    without = watched.kept()
    fake.metrics_text = None
    watched.clock.pass_s(LOOK_EVERY_S)
    await watched.for_s(299)

    assert before is None
    assert without == Reason.ACTIVITY_UNKNOWN
    assert watched.kept() == Reason.IN_GRACE
