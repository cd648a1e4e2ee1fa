"""A llama.cpp server without a model of its own: loads, evictions, what it holds, and how it fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from gpukeeper.agents.config import RuntimeConfig
from gpukeeper.agents.runtimes.llamacpp import LlamaCpp
from gpukeeper.agents.runtimes.port import Done, RuntimeFailure
from gpukeeper.events.readings import RuntimeReading
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import JobResult, Work
from support.fake_http import Fault
from support.llamacpp_fake import FakeLlamaCpp
from support.llamacpp_router import FakeLlamaRouter
from support.rig import reached

GB = 10**9
BIG, SMALL = "ggml-org/big-GGUF:Q4_K_M", "small"


@pytest_asyncio.fixture
async def fake() -> AsyncGenerator[FakeLlamaRouter]:
    async with FakeLlamaRouter({BIG: 100 * GB, SMALL: 29 * GB}, aliases={SMALL: ("little",)}) as server:
        yield server


@pytest_asyncio.fixture
async def llama(fake: FakeLlamaRouter) -> AsyncGenerator[LlamaCpp]:
    async with registered(fake.url) as provider:
        yield provider


@asynccontextmanager
async def registered(url: str, **settings: Any) -> AsyncGenerator[LlamaCpp]:
    provider = LlamaCpp(RuntimeConfig(name="l", provider="llamacpp", url=url, **settings), look_timeout_s=2.0)
    try:
        yield provider
    finally:
        await provider.close()


async def run(llama: LlamaCpp, model: str = SMALL, *, prompt: str = "x") -> JobResult:
    items = [item async for item in llama.run(model, "generate", Work(prompt=prompt), on_cpu=False)]
    assert isinstance(items[-1], Done)
    return items[-1].result


async def failure_of(work: Any) -> RuntimeFailure:
    with pytest.raises(RuntimeFailure) as caught:
        await work
    return caught.value


def held(reading: RuntimeReading) -> dict[str, str]:
    """What is resident, and how."""
    words = {(False, False): "loaded", (True, False): "loading", (False, True): "stopping"}
    return {row.model: words[row.loading, row.stopping] for row in reading.resident or ()}


# --- what it is


async def test_a_router_shows_itself_at_the_first_look(fake: FakeLlamaRouter, llama: LlamaCpp) -> None:
    before = (llama.loads_models, llama.releases)
    reading = await llama.look()

    assert before == (False, "none")
    assert (llama.loads_models, llama.releases, llama.pulls) == (True, "model", False)
    assert reading.models == (BIG, SMALL, "little")
    assert (reading.healthy, reading.resident, reading.activity) == (True, (), "idle")


async def test_a_plain_server_stays_one() -> None:
    async with FakeLlamaCpp() as fake, registered(fake.url) as llama:
        await llama.look()

        assert (llama.loads_models, llama.releases) == (False, "none")
        assert fake.requests["/models/load"] == 0


async def test_a_server_that_was_started_anew_as_a_router_is_one() -> None:
    async with FakeLlamaCpp() as plain:
        port = plain.port
        llama = LlamaCpp(RuntimeConfig(name="l", provider="llamacpp", url=plain.url), look_timeout_s=2.0)
        await llama.look()
    router = FakeLlamaRouter({SMALL: GB})
    router.wanted_port = port
    async with router:
        await llama.look()
        await llama.close()

    assert llama.loads_models


@pytest.mark.parametrize("status", ["7", '"loaded"', "null", "{}", '{"value":7}', '{"value":""}', "[]"])
async def test_a_status_that_is_none_makes_no_router(status: str) -> None:
    async with FakeLlamaCpp() as fake, registered(fake.url) as llama:
        fake.faults["/v1/models"] = Fault("status", status=200, body=f'{{"data":[{{"id":"m","status":{status}}}]}}')

        reading = await llama.look()

        assert (reading.healthy, llama.loads_models) == (True, False)


# --- what it holds


async def test_what_is_resident_is_what_is_loaded_or_on_its_way(fake: FakeLlamaRouter, llama: LlamaCpp) -> None:
    fake.children[BIG].state = "loaded"
    fake.children[SMALL].state = "loading"

    look, residency = await llama.look(), await llama.residency()

    assert held(look) == held(residency) == {BIG: "loaded", SMALL: "loading"}
    row = llama.find(look, BIG)
    assert row is not None
    assert (row.size_bytes, row.vram_bytes, row.pinned) == (100 * GB, None, False)


async def test_what_is_still_loading_takes_no_work_and_the_router_is_busy(
    fake: FakeLlamaRouter, llama: LlamaCpp
) -> None:
    fake.children[SMALL].state = "loading"

    reading = await llama.look()

    assert llama.find(reading, SMALL) is None
    assert reading.activity == "busy"


async def test_a_model_that_sleeps_holds_nothing_and_is_not_woken_by_a_look(
    fake: FakeLlamaRouter, llama: LlamaCpp
) -> None:
    fake.children[SMALL].state = "sleeping"

    reading = await llama.look()

    assert (held(reading), reading.activity) == ({}, "idle")
    assert fake.children[SMALL].state == "sleeping"


async def test_a_state_of_a_newer_server_holds_memory_and_takes_no_work(fake: FakeLlamaRouter, llama: LlamaCpp) -> None:
    fake.children[SMALL].state = "unloading"

    assert held(await llama.look()) == {SMALL: "stopping"}


async def test_a_look_loads_nothing(fake: FakeLlamaRouter, llama: LlamaCpp) -> None:
    await llama.look()
    await llama.signs(SMALL)
    await llama.residency()

    assert fake.loads == 0


async def test_a_model_that_went_between_list_and_slots_is_not_loaded_by_the_question(
    fake: FakeLlamaRouter, llama: LlamaCpp
) -> None:
    stale = '{"data":[{"id":"small","status":{"value":"loaded"}}]}'
    fake.faults["/v1/models"] = Fault("status", status=200, body=stale)

    assert (await llama.look()).activity == "unknown"
    assert fake.loads == 0


# --- activity


async def test_the_router_is_busy_while_a_slot_of_any_model_works(fake: FakeLlamaRouter, llama: LlamaCpp) -> None:
    await llama.load(BIG, on_cpu=False)
    await llama.load(SMALL, on_cpu=False)
    fake.hold = asyncio.Event()
    running = asyncio.create_task(run(llama))
    await reached(lambda: fake.children[SMALL].server.in_flight, "the run is under way")
    during = (await llama.look()).activity
    signs = [await llama.signs(SMALL), await llama.signs(BIG)]
    fake.hold.set()
    await running

    assert during == "busy"
    assert [(one.activity, one.resident) for one in signs] == [("busy", True), ("idle", True)]
    assert (await llama.look()).activity == "idle"


async def test_a_router_whose_slots_do_not_tell_may_work(fake: FakeLlamaRouter, llama: LlamaCpp) -> None:
    await llama.load(SMALL, on_cpu=False)
    fake.faults["/slots"] = Fault("status", status=501)

    assert (await llama.look()).activity == "unknown"
    assert (await llama.signs(SMALL)).activity == "unknown"


async def test_signs_of_a_model_that_is_gone_say_so(fake: FakeLlamaRouter, llama: LlamaCpp) -> None:
    await llama.look()
    gone = await llama.signs(SMALL)
    fake.faults["/v1/models"] = Fault("drop")
    unknown = await llama.signs(SMALL)

    assert (gone.activity, gone.resident) == ("idle", False)
    assert (unknown.activity, unknown.resident) == ("unknown", None)


# --- loading


@pytest.mark.parametrize("name", [SMALL, "little", "small:latest", "small.gguf"])
async def test_a_model_is_loaded_found_and_run_under_each_of_its_names(
    fake: FakeLlamaRouter, llama: LlamaCpp, name: str
) -> None:
    await llama.load(name, on_cpu=False)

    assert llama.find(await llama.residency(), name) is not None
    assert (await run(llama, name)).text
    assert fake.loads == 1
    assert [body["model"] for _, body in fake.bodies] == [SMALL, SMALL]


async def test_a_load_waits_until_the_model_is_there(fake: FakeLlamaRouter, llama: LlamaCpp) -> None:
    fake.hold_load = asyncio.Event()
    loading = asyncio.create_task(llama.load(SMALL, on_cpu=False))
    await reached(lambda: fake.children[SMALL].state == "loading" and fake.requests["/v1/models"] > 2, "it loads")
    during = loading.done()
    fake.hold_load.set()
    await loading

    assert not during
    assert fake.children[SMALL].state == "loaded"


async def test_c10_a_load_that_is_left_goes_on_and_the_next_one_joins_it(
    fake: FakeLlamaRouter, llama: LlamaCpp
) -> None:
    fake.hold_load = asyncio.Event()
    first = asyncio.create_task(llama.load(SMALL, on_cpu=False))
    await reached(lambda: fake.loads == 1, "it loads")
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    second = asyncio.create_task(llama.load(SMALL, on_cpu=False))
    await reached(lambda: fake.requests["/v1/models"] > 3, "the second one waits")
    fake.hold_load.set()
    await second

    assert fake.loads == 1


async def test_a_model_that_sleeps_is_loaded_anew(fake: FakeLlamaRouter, llama: LlamaCpp) -> None:
    fake.children[SMALL].state = "sleeping"

    await llama.load(SMALL, on_cpu=False)

    assert (fake.unloads, fake.loads, fake.children[SMALL].state) == (1, 1, "loaded")


async def test_c37_a_load_that_does_not_fit_fails_with_the_exit_code_until_the_other_is_released(
    fake: FakeLlamaRouter, llama: LlamaCpp
) -> None:
    fake.memory = 110 * GB
    await llama.load(BIG, on_cpu=False)
    failures = [await failure_of(llama.load(SMALL, on_cpu=False)) for _ in range(2)]

    await llama.release(BIG)
    await llama.load(SMALL, on_cpu=False)

    assert [one.reason for one in failures] == [Reason.LOAD_FAILED] * 2
    assert "its process ended with 1" in failures[0].detail
    assert (fake.unloads, fake.evictions) == (1, 0)
    assert held(await llama.residency()) == {SMALL: "loaded"}


async def test_a_load_above_the_limit_of_models_fails_with_the_routers_words(
    fake: FakeLlamaRouter, llama: LlamaCpp
) -> None:
    fake.models_max, fake.stays = 1, True
    await llama.load(BIG, on_cpu=False)

    failure = await failure_of(llama.load(SMALL, on_cpu=False))

    assert failure.reason is Reason.LOAD_FAILED
    assert "model limit reached" in failure.detail


async def test_a_load_that_somebody_undoes_has_failed(fake: FakeLlamaRouter, llama: LlamaCpp) -> None:
    fake.hold_load = asyncio.Event()
    loading = asyncio.create_task(llama.load(SMALL, on_cpu=False))
    await reached(lambda: fake.children[SMALL].state == "loading", "it loads")
    fake.children[SMALL].state = "unloaded"

    failure = await failure_of(loading)

    assert failure.reason is Reason.LOAD_FAILED
    assert "it is unloaded again" in failure.detail


async def test_c35_a_model_that_was_evicted_before_its_request_is_an_error_and_never_loaded_again(
    fake: FakeLlamaRouter, llama: LlamaCpp
) -> None:
    """``--models-max 1``: whoever loads takes the place of what was loaded before. Only a pin of ours prevents that."""
    fake.models_max = 1
    await llama.load(BIG, on_cpu=False)
    await llama.load(SMALL, on_cpu=False)

    failure = await failure_of(run(llama, BIG))

    assert failure.reason is Reason.RUNTIME_ERROR
    assert "not loaded" in failure.detail
    assert (fake.loads, fake.evictions) == (2, 1)
    assert (await run(llama, SMALL)).text


@pytest.mark.parametrize("task", ["chat", "embed"])
async def test_no_kind_of_work_loads_a_model(fake: FakeLlamaRouter, llama: LlamaCpp, task: Any) -> None:
    work = Work(input="x") if task == "embed" else Work(messages=[])

    async def go() -> None:
        async for _ in llama.run(SMALL, task, work, on_cpu=False):
            pass

    assert "not loaded" in (await failure_of(go())).detail
    assert fake.loads == 0


# --- releasing


async def test_a_release_is_accepted_before_the_model_is_gone(fake: FakeLlamaRouter, llama: LlamaCpp) -> None:
    fake.hold_unload = asyncio.Event()
    await llama.load(SMALL, on_cpu=False)

    await llama.release("little")
    during = held(await llama.residency())
    fake.hold_unload.set()
    await reached(lambda: fake.children[SMALL].state == "unloaded", "it is gone")

    assert during == {SMALL: "loaded"}
    assert held(await llama.residency()) == {}


async def test_c57_an_accepted_release_may_change_nothing(fake: FakeLlamaRouter, llama: LlamaCpp) -> None:
    fake.stays = True
    await llama.load(SMALL, on_cpu=False)

    await llama.release(SMALL)

    assert held(await llama.residency()) == {SMALL: "loaded"}


@pytest.mark.parametrize("model", ["nobody/has-this", SMALL])
async def test_a_release_that_is_refused_keeps_the_words(fake: FakeLlamaRouter, llama: LlamaCpp, model: str) -> None:
    if model == SMALL:
        fake.faults["/models/unload"] = Fault("status", status=500)

    failure = await failure_of(llama.release(model))

    assert failure.reason is Reason.RELEASE_FAILED
    assert ("boom" if model == SMALL else "not found") in failure.detail


async def test_a_release_of_everything_or_one_that_is_forbidden_is_never_asked(fake: FakeLlamaRouter) -> None:
    async with registered(fake.url, release="none") as forbidden, registered(fake.url) as llama:
        await forbidden.load(SMALL, on_cpu=False)
        failures = [await failure_of(forbidden.release(SMALL)), await failure_of(llama.release(None))]

        assert [one.reason for one in failures] == [Reason.NOT_RELEASABLE] * 2
        assert forbidden.releases == "none"
        assert fake.unloads == 0
