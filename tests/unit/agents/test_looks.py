from __future__ import annotations

import asyncio

import pytest

from gpukeeper.agents.looks import FreshLooks
from gpukeeper.events.readings import RuntimeReading
from support.bench import Bench
from support.scripted import Runtime
from support.virtual_time import in_virtual_time


class Timed(Runtime):
    """Says in its readings when each look began."""

    failing = False

    async def residency(self) -> RuntimeReading:
        began = asyncio.get_running_loop().time()
        self.looks += 1
        await asyncio.sleep(1.0)
        if self.failing:
            raise ValueError("a provider that breaks its word")
        return RuntimeReading(runtime="ollama", read_at=str(began), healthy=True)


def timed() -> tuple[Timed, FreshLooks]:
    runtime = Timed(Bench().card)
    return runtime, FreshLooks(runtime)


async def ask(looks: FreshLooks, after_s: float) -> tuple[float, float]:
    """Ask after a while. Returns when it asked, and when the look that answered began."""
    await asyncio.sleep(after_s)
    asked = asyncio.get_running_loop().time()
    return asked, float((await looks.residency()).read_at)


@in_virtual_time
async def test_every_answer_is_from_a_look_that_began_after_the_question() -> None:
    runtime, looks = timed()

    answers = await asyncio.gather(*(ask(looks, n * 0.3) for n in range(20)))

    assert all(began >= asked for asked, began in answers)
    assert all(began - asked <= 1.001 for asked, began in answers)
    assert runtime.looks < 20


@in_virtual_time
async def test_who_asks_at_once_shares_one_look_and_who_asks_meanwhile_shares_the_next() -> None:
    runtime, looks = timed()
    await asyncio.gather(*(looks.residency() for _ in range(8)))
    assert runtime.looks == 1

    first = asyncio.create_task(looks.residency())
    await asyncio.sleep(0.5)
    await asyncio.gather(first, *(looks.residency() for _ in range(8)))
    assert runtime.looks == 3


@in_virtual_time
async def test_a_look_goes_on_for_the_others_when_one_who_asked_gives_up() -> None:
    runtime, looks = timed()
    impatient = asyncio.create_task(looks.residency())
    patient = asyncio.create_task(looks.residency())
    await asyncio.sleep(0.5)
    impatient.cancel()

    assert (await patient).healthy
    assert runtime.looks == 1


@in_virtual_time
async def test_a_look_that_fails_is_told_to_all_who_asked_and_the_next_one_goes_on() -> None:
    runtime, looks = timed()
    runtime.failing = True
    first = [asyncio.create_task(looks.residency()) for _ in range(2)]
    await asyncio.sleep(0.5)
    later = asyncio.create_task(looks.residency())
    await asyncio.sleep(0.6)
    runtime.failing = False

    for task in first:
        with pytest.raises(ValueError, match="breaks its word"):
            await task
    assert (await later).healthy


@in_virtual_time
async def test_a_look_that_fails_when_nobody_waits_any_more_is_no_error() -> None:
    runtime, looks = timed()
    runtime.failing = True
    task = asyncio.create_task(looks.residency())
    await asyncio.sleep(0.5)
    task.cancel()
    await asyncio.sleep(2)
    runtime.failing = False

    assert (await looks.residency()).healthy
