"""What only a real llama.cpp server can show: its slots, and that it stops when it is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest

from gpukeeper.agents.config import RuntimeConfig
from gpukeeper.agents.processes import listener_pid
from gpukeeper.agents.runtimes.llamacpp import LlamaCpp
from gpukeeper.agents.runtimes.port import Done, RuntimeFailure, Token
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import Work
from support.llamacpp_server import llama_server

LONG = Work(prompt="x", max_tokens=4000)


async def _drain(running: AsyncGenerator[Token | Done]) -> None:
    async for _ in running:
        pass


async def test_its_slot_is_busy_while_a_run_lasts_and_idle_soon_after_the_run_is_left(tmp_path: Path) -> None:
    async with llama_server(tmp_path, layers=8) as server:
        llama = LlamaCpp(RuntimeConfig(name="l", provider="llamacpp", url=server.url))

        before = await llama.look()
        async with aclosing(llama.run("tiny", "generate", LONG, on_cpu=False)) as running:
            assert isinstance(await anext(running), Token)
            during = await llama.look()
        async with asyncio.timeout(10):
            while (after := await llama.look()).activity != "idle":
                pass
        await llama.close()

    assert (before.activity, during.activity, after.activity) == ("idle", "busy", "idle")


async def test_its_process_is_found_by_its_port(tmp_path: Path) -> None:
    async with llama_server(tmp_path) as server:
        assert listener_pid(int(server.url.rsplit(":", 1)[1])) == server.pid


async def test_without_the_slots_endpoint_its_activity_is_unknown(tmp_path: Path) -> None:
    async with llama_server(tmp_path, extra=("--no-slots-endpoint",)) as server:
        llama = LlamaCpp(RuntimeConfig(name="l", provider="llamacpp", url=server.url))
        reading = await llama.look()
        await llama.close()

    assert reading.healthy
    assert reading.activity == "unknown"


async def test_a_prompt_longer_than_the_context_is_an_error_in_its_words(tmp_path: Path) -> None:
    async with llama_server(tmp_path, extra=("--context", "256")) as server:
        llama = LlamaCpp(RuntimeConfig(name="l", provider="llamacpp", url=server.url))
        with pytest.raises(RuntimeFailure) as caught:
            await anext(llama.run("tiny", "generate", Work(prompt="x" * 2000), on_cpu=False))
        await llama.close()

    assert caught.value.reason is Reason.RUNTIME_ERROR
    assert caught.value.status == 400
    assert "context size" in caught.value.detail


async def test_a_server_that_ends_in_mid_answer_cuts_the_run(tmp_path: Path) -> None:
    async with llama_server(tmp_path, layers=8) as server:
        llama = LlamaCpp(RuntimeConfig(name="l", provider="llamacpp", url=server.url))
        running = llama.run("tiny", "generate", LONG, on_cpu=False)
        assert isinstance(await anext(running), Token)

    with pytest.raises(RuntimeFailure) as caught:
        await _drain(running)
    await llama.close()

    assert caught.value.reason is Reason.RUNTIME_CUT


async def test_the_same_seed_says_the_same(tmp_path: Path) -> None:
    async with llama_server(tmp_path) as server:
        llama = LlamaCpp(RuntimeConfig(name="l", provider="llamacpp", url=server.url))
        texts: list[str | None] = []
        for _ in range(2):
            items = [
                item
                async for item in llama.run("tiny", "generate", Work(prompt="x", seed=5, max_tokens=30), on_cpu=False)
            ]
            assert isinstance(items[-1], Done)
            texts.append(items[-1].result.text)
        await llama.close()

    assert texts[0] == texts[1]
