"""What is particular to a ComfyUI: its queue, its history, what it holds, and taking a prompt back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest
import pytest_asyncio

from gpukeeper.agents.config import RuntimeConfig
from gpukeeper.agents.placement import judge
from gpukeeper.agents.runtimes import comfyui
from gpukeeper.agents.runtimes.comfyui import ComfyUI
from gpukeeper.agents.runtimes.http import RuntimeHttp
from gpukeeper.agents.runtimes.port import Done, RuntimeFailure, Token
from gpukeeper.events.readings import DeviceReading, RuntimeReading
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import JobResult, Work
from support.comfyui_fake import FakeComfyUI
from support.fake_http import Fault

GB = 1_000_000_000


def graph(text: str = "a cat", node: str = "SaveImage") -> Work:
    return Work(workflow={"9": {"class_type": node, "inputs": {"text": text}}})


@pytest_asyncio.fixture
async def fake() -> AsyncGenerator[FakeComfyUI]:
    async with FakeComfyUI() as server:
        yield server


@pytest_asyncio.fixture
async def comfy(fake: FakeComfyUI) -> AsyncGenerator[ComfyUI]:
    config = RuntimeConfig(name="pictures", provider="comfyui", url=fake.url)
    provider = ComfyUI(config, look_timeout_s=0.5, poll_s=0.001)
    yield provider
    await provider.close()


async def result_of(comfy: ComfyUI, work: Work) -> JobResult:
    items = [item async for item in comfy.run("comfyui", "workflow", work, on_cpu=False)]
    assert isinstance(items[-1], Done)
    assert all(item == Token("") for item in items[:-1])
    return items[-1].result


async def failure_of(comfy: ComfyUI, work: Work) -> RuntimeFailure:
    with pytest.raises(RuntimeFailure) as caught:
        await result_of(comfy, work)
    return caught.value


async def until(look: Any) -> None:
    async with asyncio.timeout(10):
        while not look():
            await asyncio.sleep(0)


# --- looks


async def test_activity_is_its_queue_and_nothing_else(fake: FakeComfyUI, comfy: ComfyUI) -> None:
    assert (await comfy.look()).activity == "idle"
    fake.hold = asyncio.Event()
    running = asyncio.create_task(result_of(comfy, graph()))
    await until(lambda: fake.executions)

    assert (await comfy.look()).activity == "busy"
    assert (await comfy.signs("comfyui")).activity == "busy"
    fake.hold.set()
    await running
    assert (await comfy.look()).activity == "idle"


async def test_a_prompt_that_only_waits_is_activity(fake: FakeComfyUI, comfy: ComfyUI) -> None:
    waiting = '{"queue_running":[],"queue_pending":[[1,"p",{},{},[]]]}'
    fake.faults["/queue"] = Fault("status", status=200, body=waiting)

    assert (await comfy.look()).activity == "busy"


async def test_c29_open_connections_are_no_activity(fake: FakeComfyUI, comfy: ComfyUI) -> None:
    """C29, llama-swap#1001: a browser's tab holds a socket while both queues are empty."""
    reader, writer = await asyncio.open_connection("127.0.0.1", fake.port)
    writer.write(b"GET /ws HTTP/1.1\r\nUpgrade: websocket\r\n\r\n")

    assert (await comfy.look()).activity == "idle"
    writer.close()
    await writer.wait_closed()
    assert reader is not None


@pytest.mark.parametrize("body", ["{}", "[]", '{"queue_running":[]}', '{"queue_running":3,"queue_pending":[]}'])
async def test_a_queue_of_another_shape_is_unknown_and_never_idle(fake: FakeComfyUI, comfy: ComfyUI, body: str) -> None:
    fake.faults["/queue"] = Fault("status", status=200, body=body)

    reading = await comfy.look()

    assert (reading.healthy, reading.activity) == (False, "unknown")


async def test_it_holds_what_torch_has_given_out_and_lists_both_its_names(fake: FakeComfyUI, comfy: ComfyUI) -> None:
    fake.held = 7 * GB

    reading = await comfy.residency()

    assert reading.resident is not None
    (row,) = reading.resident
    assert (row.size_bytes, row.vram_bytes) == (7 * GB, 7 * GB)
    assert reading.models == ("pictures", "comfyui")
    assert comfy.find(reading, "pictures") == comfy.find(reading, "comfyui") == row
    assert comfy.find(reading, "flux") is None


@pytest.mark.parametrize(
    "devices",
    [
        [],
        [{"type": "cuda", "torch_vram_total": "7", "torch_vram_free": 0}],
        [{"type": "cuda", "torch_vram_total": 5, "torch_vram_free": 6}],
        [{"type": "cuda", "torch_vram_total": 5, "torch_vram_free": -1}],
        [{"type": "cuda"}],
    ],
)
async def test_figures_that_are_missing_or_impossible_leave_what_it_holds_unknown(
    fake: FakeComfyUI, comfy: ComfyUI, devices: list[Any]
) -> None:
    fake.stats = {"system": {}, "devices": devices, "error": "no torch"}

    for reading in (await comfy.look(), await comfy.residency()):
        assert (reading.healthy, reading.resident) == (True, None)
        assert "/system_stats" in (reading.error or "")


@pytest.mark.parametrize("path", ["/queue", "/system_stats"])
@pytest.mark.parametrize("kind", ["status", "html", "truncated", "empty", "stall", "drop"])
async def test_c14_what_cannot_be_read_is_unknown(fake: FakeComfyUI, comfy: ComfyUI, path: str, kind: Any) -> None:
    fake.held = GB
    fake.faults[path] = Fault(kind)

    reading = await comfy.look()

    if path == "/queue":
        assert (reading.healthy, reading.activity) == (False, "unknown")
    else:
        assert reading.resident is None
    assert path in (reading.error or "")


# --- placement


def judged(comfy: ComfyUI, reading: RuntimeReading, *, used_mb: int, was_resident: bool) -> Any:
    card = DeviceReading(device="g", source="nvml", read_at="", total_mb=24_000, used_mb=used_mb, free_mb=0)
    return judge(
        intended="gpu",
        model="comfyui",
        resident=comfy.find(reading, "comfyui"),
        reports_vram=comfy.reports_vram,
        before=(card,),
        after=(card,),
        was_resident=was_resident,
        min_ratio=0.99,
    )


async def test_one_that_holds_nothing_is_not_resident_until_it_was_loaded_and_then_passes(comfy: ComfyUI) -> None:
    before = await comfy.residency()
    await comfy.load("comfyui", on_cpu=False)
    after = await comfy.residency()

    assert before.resident == ()
    assert judged(comfy, after, used_mb=400, was_resident=False).passed


async def test_a_load_stands_for_one_run_only(comfy: ComfyUI, fake: FakeComfyUI) -> None:
    fake.run_bytes = 0
    await comfy.load("comfyui", on_cpu=False)
    await result_of(comfy, graph())

    assert (await comfy.residency()).resident == ()


async def test_one_that_computes_on_the_cpu_is_found_out(fake: FakeComfyUI, comfy: ComfyUI) -> None:
    fake.device_type = "cpu"
    await comfy.load("comfyui", on_cpu=False)

    verdict = judged(comfy, await comfy.residency(), used_mb=400, was_resident=False)

    assert verdict.reason is Reason.CPU_FALLBACK


async def test_what_it_says_it_holds_must_show_on_the_device(fake: FakeComfyUI, comfy: ComfyUI) -> None:
    fake.held = 7 * GB
    reading = await comfy.residency()

    assert judged(comfy, reading, used_mb=3, was_resident=True).reason is Reason.PLACEMENT_DISPUTED
    assert judged(comfy, reading, used_mb=7_000, was_resident=True).passed


async def test_a_release_frees_all_and_is_asked_for_as_comfyui_wants_it(fake: FakeComfyUI, comfy: ComfyUI) -> None:
    fake.held = 7 * GB

    await comfy.release(None)

    assert fake.bodies == [("/free", {"unload_models": True, "free_memory": True})]
    assert (await comfy.residency()).resident == ()


async def test_a_release_that_is_refused_says_so(fake: FakeComfyUI, comfy: ComfyUI) -> None:
    fake.faults["/free"] = Fault("status", status=500, body="no")

    with pytest.raises(RuntimeFailure) as caught:
        await comfy.release(None)

    assert caught.value.reason is Reason.RELEASE_FAILED


# --- runs


@pytest.mark.parametrize("old", [False, True])
async def test_the_outputs_of_the_history_are_the_result(fake: FakeComfyUI, comfy: ComfyUI, old: bool) -> None:
    fake.old = old

    result = await result_of(comfy, graph("a cat"))

    assert result.output == {"9": {"images": [{"filename": "a cat.png", "type": "output"}]}}
    assert fake.executions == 1


async def test_a_graph_that_is_refused_fails_with_the_details_and_nothing_is_taken_back(
    fake: FakeComfyUI, comfy: ComfyUI
) -> None:
    failure = await failure_of(comfy, graph(node="NoSuchNode"))

    assert (failure.reason, failure.status) == (Reason.RUNTIME_ERROR, 400)
    assert "NoSuchNode does not exist.: Node ID '#9'" in failure.detail
    assert fake.requests["/queue"] == 0


async def test_an_error_of_a_node_is_told_in_its_words(fake: FakeComfyUI, comfy: ComfyUI) -> None:
    fake.node_error = "Allocation on device 0\nwould exceed"

    failure = await failure_of(comfy, graph())

    assert failure.reason is Reason.RUNTIME_ERROR
    assert "node 9 (KSampler): OutOfMemoryError: Allocation on device 0 would exceed" in failure.detail


async def test_a_run_that_somebody_interrupts_is_a_failure(fake: FakeComfyUI, comfy: ComfyUI) -> None:
    fake.hold = asyncio.Event()
    running = asyncio.create_task(failure_of(comfy, graph()))
    await until(lambda: fake.executions)
    other = RuntimeHttp(fake.url)
    await other.tell("/interrupt", {})
    await other.close()

    failure = await running
    assert failure.reason is Reason.RUNTIME_ERROR
    assert "interrupted at the runtime" in failure.detail


@pytest.mark.parametrize(
    "entry",
    [
        '{"outputs":{},"status":{"status_str":"error","completed":false,"messages":[]}}',
        '{"outputs":{},"status":{"status_str":"odd","messages":[3,[],["x"]]}}',
        '{"outputs":{}}',
    ],
)
async def test_an_end_that_does_not_say_success_is_none(fake: FakeComfyUI, comfy: ComfyUI, entry: str) -> None:
    fake.faults["/prompt"] = Fault("status", status=200, body='{"prompt_id":"p"}')
    fake.faults["/history/p"] = Fault("status", status=200, body=f'{{"p":{entry}}}')

    assert (await failure_of(comfy, graph())).reason is Reason.RUNTIME_ERROR


async def test_c27_a_prompt_in_neither_list_is_lost_and_never_done(fake: FakeComfyUI, comfy: ComfyUI) -> None:
    fake.hold = asyncio.Event()
    running = asyncio.create_task(failure_of(comfy, graph()))
    await until(lambda: fake.executions)
    fake.forget()

    failure = await running
    assert failure.reason is Reason.RUN_LOST
    assert fake.executions == 1


async def test_c27_a_prompt_that_was_taken_and_never_seen_is_lost_too(fake: FakeComfyUI, comfy: ComfyUI) -> None:
    fake.faults["/prompt"] = Fault("status", status=200, body='{"prompt_id":"p"}')

    assert (await failure_of(comfy, graph())).reason is Reason.RUN_LOST


async def test_c48_looks_that_fail_are_no_end_and_one_that_answers_counts_anew(
    fake: FakeComfyUI, comfy: ComfyUI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comfyui, "FAILED_LOOKS_MAX", 30)
    fake.hold = asyncio.Event()
    running = asyncio.create_task(result_of(comfy, graph()))
    await until(lambda: fake.executions)
    for _ in range(2):
        fake.failing_looks = 25
        await until(lambda: not fake.failing_looks)
        answered = fake.requests["/queue"]
        await until(lambda seen=answered: fake.requests["/queue"] > seen + 1)
    fake.hold.set()

    assert (await running).output
    assert (fake.failed_looks, fake.executions) == (50, 1)


async def test_looks_that_never_answer_again_end_the_wait_with_what_was_seen_last(
    fake: FakeComfyUI, comfy: ComfyUI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comfyui, "FAILED_LOOKS_MAX", 30)
    fake.hold = asyncio.Event()
    running = asyncio.create_task(failure_of(comfy, graph()))
    await until(lambda: fake.executions)
    fake.failing_looks = 1_000

    failure = await running
    assert failure.reason is Reason.RUNTIME_UNREACHABLE
    assert "when last seen" in failure.detail
    assert fake.failed_looks == 31


# --- taking back


async def begin(comfy: ComfyUI, work: Work) -> AsyncGenerator[Token | Done]:
    """A run that has been taken and seen."""
    running = comfy.run("comfyui", "workflow", work, on_cpu=False)
    assert await anext(running) == Token("")
    return running


@pytest.mark.parametrize("old", [False, True])
async def test_a_running_prompt_that_is_left_is_interrupted(fake: FakeComfyUI, comfy: ComfyUI, old: bool) -> None:
    fake.old, fake.hold = old, asyncio.Event()

    await (await begin(comfy, graph())).aclose()

    assert (fake.interrupts, fake.deleted) == (1, 0)
    await until(lambda: not fake._running)  # pyright: ignore[reportPrivateUsage]


async def test_a_waiting_prompt_that_is_left_is_deleted_and_the_running_one_goes_on(
    fake: FakeComfyUI, comfy: ComfyUI
) -> None:
    fake.hold = asyncio.Event()
    first = await begin(comfy, graph("first"))
    second = await begin(comfy, graph("second"))

    await second.aclose()

    assert (fake.interrupts, fake.deleted, fake.executions) == (0, 1, 1)
    fake.hold.set()
    async with aclosing(first):
        *_, done = [item async for item in first]
    assert isinstance(done, Done)
    assert "first.png" in str(done.result.output)


async def test_a_run_that_has_ended_interrupts_nobody(fake: FakeComfyUI, comfy: ComfyUI) -> None:
    async with aclosing(comfy.run("comfyui", "workflow", graph(), on_cpu=False)) as running:
        async for item in running:
            if isinstance(item, Done):
                break

    assert (fake.interrupts, fake.deleted) == (0, 0)


@pytest.mark.parametrize("old", [False, True])
async def test_a_prompt_whose_acceptance_was_never_heard_is_taken_back(
    fake: FakeComfyUI, comfy: ComfyUI, old: bool
) -> None:
    fake.old, fake.hold = old, asyncio.Event()
    fake.faults["/prompt"] = Fault("truncated")

    failure = await failure_of(comfy, graph())

    assert failure.reason is Reason.RUNTIME_CUT
    assert (fake.executions, fake.interrupts) == (1, 1)


async def test_a_prompt_that_cannot_be_taken_back_ends_the_run_all_the_same(fake: FakeComfyUI, comfy: ComfyUI) -> None:
    fake.hold = asyncio.Event()
    running = await begin(comfy, graph())
    fake.faults["/interrupt"] = Fault("status", status=500)

    await running.aclose()

    assert fake.requests["/interrupt"] == 1
    assert (await comfy.signs("comfyui")).activity == "busy"
