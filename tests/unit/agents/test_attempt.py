"""One attempt over its whole life, on a log in memory, with a fake Ollama at the other end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec
import pytest_asyncio

from gpukeeper.agents.attempt import Attempt, Stop
from gpukeeper.agents.config import RuntimeConfig
from gpukeeper.agents.runtimes.llamacpp import LlamaCpp
from gpukeeper.agents.runtimes.ollama import Ollama
from gpukeeper.events.device import Released
from gpukeeper.events.job import Admitted, Cancelled, Preempted, Started, Succeeded, Waiting
from support.llamacpp_fake import FakeLlamaCpp
from support.ollama import FakeOllama
from support.rig import CARD, Rig, reached, rig


@pytest_asyncio.fixture
async def fake() -> AsyncGenerator[FakeOllama]:
    async with FakeOllama() as server:
        yield server


@pytest_asyncio.fixture
async def ollama(fake: FakeOllama) -> AsyncGenerator[Ollama]:
    provider = Ollama(RuntimeConfig(name="ollama", provider="ollama", url=fake.url))
    yield provider
    await provider.close()


@pytest_asyncio.fixture
async def host() -> AsyncGenerator[Rig]:
    async with rig() as made:
        yield made


async def begun(host: Rig, ollama: Ollama) -> tuple[Attempt, asyncio.Task[None]]:
    """An attempt to which the runtime has given the first token, and the task that runs it."""
    attempt = await host.attempt(ollama)
    task = asyncio.create_task(attempt.run())
    await host.until(Started)
    await reached(lambda: attempt.tokens, "the first token")
    return attempt, task


def ends(host: Rig) -> list[object]:
    """What was decided about the job after its admission, but for the steps of a run."""
    return [fact for fact in host.facts if isinstance(fact, Cancelled | Preempted | Waiting | Succeeded)]


async def test_a_job_runs_and_its_slot_is_given_back(host: Rig, ollama: Ollama) -> None:
    attempt = await host.attempt(ollama)

    await attempt.run()

    assert [type(fact) for fact in ends(host)] == [Succeeded]
    assert host.of(Released)[0].epoch == attempt.epoch


# --- a wish for the end that meets a hand-back


async def test_a_wish_for_the_end_that_a_hand_back_meets_ends_the_job(
    host: Rig, fake: FakeOllama, ollama: Ollama
) -> None:
    """The wish was answered already: a job that went back to the queue would run in spite of it."""
    host.room.watch_after_s = 60.0
    fake.hold = asyncio.Event()
    attempt, task = await begun(host, ollama)
    await host.cancel()
    attempt.stop(Stop.PREEMPT)
    await task

    (end,) = ends(host)
    assert isinstance(end, Cancelled)
    assert (end.actor, end.reason, end.command_seq, end.epoch) == ("mo", "enough", 77, attempt.epoch)


async def test_a_wish_for_the_end_that_comes_while_a_stop_is_being_proven_ends_the_job(
    host: Rig, fake: FakeOllama, ollama: Ollama
) -> None:
    host.room.stop_proof_limit_s = 0.3
    fake.hold = asyncio.Event()
    attempt, task = await begun(host, ollama)
    attempt.stop(Stop.PREEMPT)
    await reached(lambda: attempt.phase == "stopping", "it is being proven to have stopped")
    await host.cancel()
    await task

    assert [type(fact) for fact in ends(host)] == [Cancelled]


async def test_a_wish_for_the_end_ends_a_job_that_was_still_loading_too(
    host: Rig, fake: FakeOllama, ollama: Ollama
) -> None:
    host.room.watch_after_s = 60.0
    fake.hold_load = asyncio.Event()
    attempt = await host.attempt(ollama)
    task = asyncio.create_task(attempt.run())
    await host.until(Admitted)
    await host.cancel()
    attempt.stop(Stop.PREEMPT)
    await task

    assert [type(fact) for fact in ends(host)] == [Cancelled]
    assert fake.payload_calls == 0


# --- proving that a run has stopped


async def test_attempts_that_are_stopped_together_do_not_wait_for_each_other() -> None:
    """A runtime that is idle is idle for each of them."""
    shared = msgspec.structs.replace(CARD, kind="cpu", slots=2)
    config = RuntimeConfig(name="llama", provider="llamacpp", url="")
    async with FakeLlamaCpp(model="m:8b") as server, rig(shared) as host:
        server.hold = asyncio.Event()
        host.room.stop_proof_limit_s = 3600
        provider = LlamaCpp(msgspec.structs.replace(config, url=server.url))
        attempts = [await host.attempt(provider, job, need={"vram_mb": 1}) for job in ("a", "b")]
        tasks = [asyncio.create_task(attempt.run()) for attempt in attempts]
        await reached(lambda: all(attempt.tokens for attempt in attempts), "both run")
        for attempt in attempts:
            attempt.stop(Stop.PREEMPT)
        async with asyncio.timeout(20):
            await asyncio.gather(*tasks)

        assert sorted(fact.job for fact in host.of(Preempted)) == ["a", "b"]
        await provider.close()
