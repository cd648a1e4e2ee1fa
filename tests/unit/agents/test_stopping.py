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
from gpukeeper.events.job import Admitted, Cancelled, Failed, Preempted, Started, Succeeded, Waiting
from gpukeeper.events.reasons import Reason
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


async def soon(task: asyncio.Task[None]) -> None:
    """Wait for the end of an attempt, and much less than its limit."""
    async with asyncio.timeout(20):
        await task


async def looked_at(attempt: Attempt) -> None:
    """Wait until the attempt has seen what the runtime shows while it works."""
    await reached(lambda: attempt.looked_during_run, "a look during the run")


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


async def test_a_stopped_run_gives_its_slot_back_once_its_end_shows_and_not_after_a_fixed_time(
    host: Rig, fake: FakeOllama, ollama: Ollama
) -> None:
    host.room.stop_proof_limit_s = 3600
    fake.hold = asyncio.Event()
    attempt, task = await begun(host, ollama)
    await looked_at(attempt)
    attempt.stop(Stop.PREEMPT)
    await soon(task)

    assert [type(fact) for fact in ends(host)] == [Preempted]


async def test_c9_a_cancelled_job_keeps_its_slot_while_the_runtime_works_on(
    host: Rig, fake: FakeOllama, ollama: Ollama
) -> None:
    """C9, ollama#11889: the client is gone, and the runtime has not noticed."""
    host.room.stop_proof_limit_s = 3600
    fake.hold = asyncio.Event()
    fake.deaf = asyncio.Event()
    attempt, task = await begun(host, ollama)
    await looked_at(attempt)
    await host.cancel()
    await reached(lambda: attempt.phase == "stopping", "it is stopped")
    looks = fake.requests["/api/ps"]
    await reached(lambda: fake.requests["/api/ps"] >= looks + 3, "three looks at what it does")

    assert (fake.in_flight, ends(host), host.of(Released)) == (1, [], [])
    fake.deaf.set()
    await soon(task)
    assert [type(fact) for fact in ends(host)] == [Cancelled]
    assert fake.in_flight == 0
    assert len(host.of(Released)) == 1


async def test_c9_a_prompt_that_may_still_be_read_is_not_taken_for_stopped_though_the_request_has_ended(
    host: Rig, fake: FakeOllama, ollama: Ollama
) -> None:
    """C9: Ollama ends the request at once, and its runner goes on until its first token: no second run."""
    host.room.stop_proof_limit_s = 1.5
    fake.hold_prompt = asyncio.Event()
    attempt = await host.attempt(ollama)
    task = asyncio.create_task(attempt.run())
    await reached(lambda: fake.payload_calls, "the work was sent")
    attempt.stop(Stop.PREEMPT)
    await reached(lambda: not fake.loaded["m:8b"].requests, "Ollama has heard that its client left")
    await soon(task)

    (end,) = [fact for fact in host.facts if isinstance(fact, Failed | Preempted | Waiting)]
    assert isinstance(end, Failed)
    assert end.reason is Reason.AGENT_STOPPING
    assert "not proven to have stopped within 1.5 s" in end.detail
    assert fake.in_flight == 1


async def test_a_wish_for_the_end_goes_before_the_failure_of_a_run_that_was_not_proven_to_stop(
    host: Rig, fake: FakeOllama, ollama: Ollama
) -> None:
    fake.hold = asyncio.Event()
    attempt, task = await begun(host, ollama)
    attempt.stop(Stop.PREEMPT)
    await host.cancel()
    await soon(task)

    assert [type(fact) for fact in ends(host)] == [Cancelled]


async def test_a_load_that_was_given_up_gives_its_slot_back_once_the_model_is_gone(
    host: Rig, fake: FakeOllama, ollama: Ollama
) -> None:
    host.room.stop_proof_limit_s = 3600
    fake.hold_load = asyncio.Event()
    attempt = await host.attempt(ollama)
    task = asyncio.create_task(attempt.run())
    await reached(lambda: fake.load_calls, "the load was asked for")
    attempt.stop(Stop.PREEMPT)
    await soon(task)

    assert [type(fact) for fact in ends(host)] == [Waiting]
    assert fake.aborted == 1
