"""What is particular to a vLLM server: metrics, sleep, names."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio

from gpukeeper.agents.config import RuntimeConfig
from gpukeeper.agents.runtimes.port import Done, RuntimeFailure
from gpukeeper.agents.runtimes.vllm import MB, Vllm
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import JobResult, Work
from support.fake_http import Fault
from support.vllm_fake import FakeVllm

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"


@pytest_asyncio.fixture
async def fake() -> AsyncGenerator[FakeVllm]:
    async with FakeVllm(names=("tiny", "alias")) as server:
        yield server


@pytest_asyncio.fixture
async def vllm(fake: FakeVllm) -> AsyncGenerator[Vllm]:
    provider = made(fake)
    yield provider
    await provider.close()


def made(fake: FakeVllm, **settings: Any) -> Vllm:
    said: dict[str, Any] = {"holds_mb": 9_000, **settings}
    return Vllm(RuntimeConfig(name="v", provider="vllm", url=fake.url, **said), look_timeout_s=0.5)


async def result_of(vllm: Vllm, work: Work, task: Any = "generate", model: str = "tiny") -> JobResult:
    items = [item async for item in vllm.run(model, task, work, on_cpu=False)]
    assert isinstance(items[-1], Done)
    return items[-1].result


# --- activity


@pytest.mark.parametrize(
    ("engines", "activity"),
    [
        ([[0, 0]], "idle"),
        ([[1, 0]], "busy"),
        ([[0, 6]], "busy"),
        ([[0, 0], [1, 0]], "busy"),
        ([[0, 0], [0, 1]], "busy"),
        ([[0, 0], [0, 0]], "idle"),
    ],
)
async def test_c31_c32_running_and_waiting_of_every_engine_are_work(
    fake: FakeVllm, vllm: Vllm, engines: list[list[float]], activity: str
) -> None:
    fake.engines = engines

    reading = await vllm.look()

    assert (reading.healthy, reading.activity) == (True, activity)
    assert (await vllm.signs("tiny")).activity == activity


@pytest.mark.parametrize(
    ("metrics", "activity"),
    [
        (f"{RUNNING} 0\n", "unknown"),
        (f"{WAITING} 0\n", "unknown"),
        (f"{RUNNING} 0\n{WAITING} NaN\n", "unknown"),
        (f"{RUNNING} x\n{WAITING} 0\n", "unknown"),
        (f"{RUNNING} NaN\n{WAITING} 2\n", "busy"),
        ("", "unknown"),
    ],
)
async def test_c32_a_figure_that_is_missing_or_no_number_is_never_idle(
    fake: FakeVllm, vllm: Vllm, metrics: str, activity: str
) -> None:
    fake.metrics_text = metrics

    assert (await vllm.look()).activity == activity


@pytest.mark.parametrize("kind", ["status", "html", "empty", "stall", "drop"])
async def test_metrics_that_cannot_be_had_leave_the_server_healthy_and_its_activity_unknown(
    fake: FakeVllm, vllm: Vllm, kind: Any
) -> None:
    fake.faults["/metrics"] = Fault(kind)

    reading = await vllm.look()

    assert (reading.healthy, reading.activity) == (True, "unknown")
    assert reading.resident


# --- residency and sleep


async def test_awake_it_holds_what_the_registry_says_and_asleep_nothing(fake: FakeVllm, vllm: Vllm) -> None:
    awake = await vllm.look()
    await vllm.release(None)
    asleep = await vllm.look()

    assert awake.resident is not None
    (row,) = awake.resident
    assert (row.model, row.size_bytes, row.vram_bytes) == ("tiny", 9_000 * MB, 9_000 * MB)
    assert vllm.find(awake, "alias") == vllm.find(awake, "tiny:latest") == row
    assert (asleep.healthy, asleep.resident, asleep.models) == (True, (), awake.models)
    assert fake.sleeps == [1]


@pytest.mark.parametrize(
    ("release", "level", "wakes"),
    [("auto", 1, [""]), ("sleep1", 1, [""]), ("sleep2", 2, ["weights", "kv_cache"])],
)
async def test_after_each_level_of_sleep_a_load_brings_the_model_back_whole(
    fake: FakeVllm, release: str, level: int, wakes: list[str]
) -> None:
    vllm = made(fake, release=release)
    await vllm.release(None)
    assert fake.sleep_level == level
    await vllm.load("tiny", on_cpu=False)
    result = await result_of(vllm, Work(prompt="x", max_tokens=2))
    await vllm.close()

    assert (fake.wakes, fake.sleep_level) == (wakes, 0)
    assert result.text == "the patient"


async def test_a_server_that_is_awake_is_not_woken(fake: FakeVllm, vllm: Vllm) -> None:
    await vllm.load("tiny", on_cpu=False)

    assert fake.wakes == []


async def test_a_server_without_sleep_mode_is_always_awake_and_says_so_when_it_should_let_go(
    fake: FakeVllm, vllm: Vllm
) -> None:
    fake.can_sleep = False

    assert (await vllm.look()).resident
    with pytest.raises(RuntimeFailure) as caught:
        await vllm.release(None)
    assert caught.value.reason is Reason.RELEASE_FAILED
    assert "--enable-sleep-mode" in caught.value.detail


@pytest.mark.parametrize("kind", ["status", "html", "truncated", "stall", "drop"])
async def test_c14_not_knowing_whether_it_sleeps_is_not_knowing_what_it_holds(
    fake: FakeVllm, vllm: Vllm, kind: Any
) -> None:
    fake.faults["/is_sleeping"] = Fault(kind)

    reading = await vllm.residency()

    assert (reading.healthy, reading.resident) == (True, None)
    assert "/is_sleeping" in (reading.error or "")


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
@pytest.mark.parametrize("kind", ["status", "stall", "drop"])
async def test_c14_what_cannot_be_read_is_unknown(fake: FakeVllm, vllm: Vllm, path: str, kind: Any) -> None:
    fake.faults[path] = Fault(kind)

    reading = await vllm.look()

    assert (reading.healthy, reading.resident, reading.models) == (False, None, None)
    assert path in (reading.error or "")


@pytest.mark.parametrize("path", ["/wake_up", "/collective_rpc"])
async def test_a_wake_that_fails_is_a_load_that_failed(fake: FakeVllm, path: str) -> None:
    vllm = made(fake, release="sleep2")
    await vllm.release(None)
    fake.faults[path] = Fault("status", body='{"error":"CUDA out of memory"}')
    with pytest.raises(RuntimeFailure) as caught:
        await vllm.load("tiny", on_cpu=False)
    await vllm.close()

    assert caught.value.reason is Reason.LOAD_FAILED
    assert "CUDA out of memory" in caught.value.detail


async def test_without_a_figure_of_the_registry_size_and_vram_are_unknown(fake: FakeVllm) -> None:
    vllm = made(fake, holds_mb=None)
    reading = await vllm.residency()
    await vllm.close()

    assert reading.resident is not None
    (row,) = reading.resident
    assert (row.size_bytes, row.vram_bytes) == (None, None)
    assert not vllm.reports_vram


# --- work


async def test_an_adapter_is_served_and_does_not_hold_a_second_time(fake: FakeVllm, vllm: Vllm) -> None:
    fake.adapters = ("poet",)
    reading = await vllm.residency()

    assert len(reading.resident or ()) == 1
    assert vllm.find(reading, "poet") is not None
    assert (await result_of(vllm, Work(prompt="x", max_tokens=1), model="poet")).text == "the"


async def test_another_spelling_of_a_name_is_asked_in_its_own(fake: FakeVllm, vllm: Vllm) -> None:
    await vllm.residency()

    await result_of(vllm, Work(prompt="x", max_tokens=1), model="tiny:latest")

    assert fake.bodies[0][1]["model"] == "tiny"


async def test_an_answer_by_another_model_is_no_answer(fake: FakeVllm, vllm: Vllm) -> None:
    body = 'data: {"model":"other","choices":[{"index":0,"text":"hi","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    fake.faults["/v1/completions"] = Fault("status", status=200, body=body)

    with pytest.raises(RuntimeFailure) as caught:
        await result_of(vllm, Work(prompt="x"))

    assert caught.value.reason is Reason.RUNTIME_BAD_REPLY
    assert "asked tiny, answered by other" in caught.value.detail


async def test_a_completion_without_a_limit_is_not_cut_after_sixteen_tokens(vllm: Vllm) -> None:
    result = await result_of(vllm, Work(prompt="x"))

    assert (result.completion_tokens, result.finish_reason) == (21, "stop")


@pytest.mark.parametrize("task", ["generate", "chat"])
async def test_an_error_in_mid_stream_is_no_result(fake: FakeVllm, vllm: Vllm, task: Any) -> None:
    fake.stream_error = "EngineCore encountered an issue"
    work = Work(prompt="x") if task == "generate" else Work(messages=[])

    with pytest.raises(RuntimeFailure) as caught:
        await result_of(vllm, work, task)

    assert caught.value.reason is Reason.RUNTIME_ERROR
    assert "EngineCore" in caught.value.detail


@pytest.mark.parametrize("task", ["generate", "chat"])
@pytest.mark.parametrize("kind", ["cut", "truncated"])
async def test_a_stream_that_is_cut_is_no_result(fake: FakeVllm, vllm: Vllm, task: Any, kind: Any) -> None:
    fake.faults["/v1/completions"] = fake.faults["/v1/chat/completions"] = Fault(kind)
    work = Work(prompt="x") if task == "generate" else Work(messages=[])

    with pytest.raises(RuntimeFailure) as caught:
        await result_of(vllm, work, task)

    assert caught.value.reason is Reason.RUNTIME_CUT


async def test_settings_have_their_openai_names_and_beat_options(fake: FakeVllm, vllm: Vllm) -> None:
    work = Work(prompt="x", max_tokens=3, temperature=0.1, top_k=7, options={"max_tokens": 99, "min_p": 0.2})

    await result_of(vllm, work)

    assert fake.bodies[0][1] == {
        "model": "tiny",
        "prompt": "x",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 3,
        "temperature": 0.1,
        "top_k": 7,
        "min_p": 0.2,
    }


async def test_a_model_that_makes_no_embeddings_says_so(fake: FakeVllm, vllm: Vllm) -> None:
    fake.embeds = False

    with pytest.raises(RuntimeFailure, match="does not support Embeddings") as caught:
        await result_of(vllm, Work(input="x"), "embed")

    assert (caught.value.reason, caught.value.status) == (Reason.RUNTIME_ERROR, 400)
