"""What is particular to a Hugging Face style server: discharge, streaming where it has it, its parameters."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio

from gpukeeper.agents.config import RuntimeConfig
from gpukeeper.agents.runtimes.huggingface import MB, HuggingFace
from gpukeeper.agents.runtimes.port import Done, RuntimeFailure, Token
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import JobResult, Work
from support.fake_http import Fault
from support.huggingface_fake import FakeHuggingFace

MODEL = "org/tiny"


@pytest_asyncio.fixture
async def fake() -> AsyncGenerator[FakeHuggingFace]:
    async with FakeHuggingFace(model=MODEL) as server:
        yield server


@pytest_asyncio.fixture
async def server(fake: FakeHuggingFace) -> AsyncGenerator[HuggingFace]:
    config = RuntimeConfig(name="h", provider="huggingface", url=fake.url, holds_mb=3_000)
    provider = HuggingFace(config, look_timeout_s=0.5)
    yield provider
    await provider.close()


async def run(server: HuggingFace, work: Work) -> tuple[list[str], JobResult]:
    items = [item async for item in server.run(MODEL, "generate", work, on_cpu=False)]
    assert isinstance(items[-1], Done)
    return [item.text for item in items if isinstance(item, Token)], items[-1].result


async def test_it_holds_what_the_registry_says_and_its_activity_is_unknown(server: HuggingFace) -> None:
    reading = await server.look()

    assert reading.resident is not None
    (row,) = reading.resident
    assert (row.model, row.size_bytes, row.vram_bytes) == (MODEL, 3_000 * MB, 3_000 * MB)
    assert reading.activity == "unknown"


async def test_one_that_says_it_computes_on_the_cpu_has_nothing_in_vram(
    fake: FakeHuggingFace, server: HuggingFace
) -> None:
    fake.device_type = "cpu"

    reading = await server.look()

    assert reading.resident is not None
    assert (reading.resident[0].size_bytes, reading.resident[0].vram_bytes) == (3_000 * MB, 0)


@pytest.mark.parametrize("tells", [False, True])
async def test_a_discharge_is_undone_by_a_load_of_one_token(
    fake: FakeHuggingFace, server: HuggingFace, tells: bool
) -> None:
    fake.tells_loaded = tells
    await server.release(None)
    released = await server.residency()
    await server.load(MODEL, on_cpu=False)
    loaded = await server.residency()
    await server.load(MODEL, on_cpu=False)

    assert released.resident == ()
    assert loaded.resident
    assert (fake.discharges, fake.loads, fake.generations) == (1, 1, 1)
    assert fake.bodies[-1][1]["parameters"] == {"max_new_tokens": 1}


async def test_what_it_says_of_itself_beats_what_was_asked_of_it(fake: FakeHuggingFace, server: HuggingFace) -> None:
    """Somebody else's discharge, and a discharge that did nothing."""
    fake.tells_loaded, fake.loaded = True, False
    assert (await server.residency()).resident == ()
    assert (await server.signs(MODEL)).resident is False
    await server.release(None)
    fake.loaded = True

    assert (await server.residency()).resident
    assert (await server.signs(MODEL)).resident is True


async def test_a_run_after_a_discharge_counts_as_a_load(fake: FakeHuggingFace, server: HuggingFace) -> None:
    await server.release(None)
    await run(server, Work(prompt="x"))

    assert (await server.residency()).resident


async def test_a_load_that_fails_says_why_and_leaves_it_discharged(fake: FakeHuggingFace, server: HuggingFace) -> None:
    await server.release(None)
    fake.load_error = "CUDA out of memory"

    with pytest.raises(RuntimeFailure) as caught:
        await server.load(MODEL, on_cpu=False)

    assert caught.value.reason is Reason.LOAD_FAILED
    assert "CUDA out of memory" in caught.value.detail
    assert (await server.residency()).resident == ()


async def test_a_server_that_has_no_discharge_says_so(fake: FakeHuggingFace, server: HuggingFace) -> None:
    fake.faults["/discharge"] = Fault("status", status=404, body="")

    with pytest.raises(RuntimeFailure) as caught:
        await server.release(None)

    assert caught.value.reason is Reason.RELEASE_FAILED
    assert (await server.residency()).resident


@pytest.mark.parametrize("in_list", [False, True])
async def test_a_server_without_streaming_is_asked_once_whether_it_streams(
    fake: FakeHuggingFace, server: HuggingFace, in_list: bool
) -> None:
    fake.streams, fake.in_list = False, in_list

    first = await run(server, Work(prompt="x", max_tokens=2))
    second = await run(server, Work(prompt="x", max_tokens=2))

    assert first == second
    assert first[0] == [first[1].text] == ["the patient"]
    assert (fake.requests["/generate_stream"], fake.requests["/generate"], fake.generations) == (1, 2, 2)


async def test_an_error_in_mid_stream_is_no_result(fake: FakeHuggingFace, server: HuggingFace) -> None:
    fake.stream_error = "Request failed during generation"

    with pytest.raises(RuntimeFailure) as caught:
        await run(server, Work(prompt="x"))

    assert caught.value.reason is Reason.RUNTIME_ERROR
    assert fake.generations == 1


@pytest.mark.parametrize("kind", ["cut", "truncated"])
async def test_a_stream_that_is_cut_is_no_result_and_not_asked_again(
    fake: FakeHuggingFace, server: HuggingFace, kind: Any
) -> None:
    fake.faults["/generate_stream"] = Fault(kind)

    with pytest.raises(RuntimeFailure) as caught:
        await run(server, Work(prompt="x"))

    assert caught.value.reason is Reason.RUNTIME_CUT
    assert fake.generations == 1


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("[]", Reason.RUNTIME_BAD_REPLY),
        ('[{"generated_text":"a"},{"generated_text":"b"}]', Reason.RUNTIME_BAD_REPLY),
        ('{"text":"a"}', Reason.RUNTIME_BAD_REPLY),
        ("", Reason.RUNTIME_EMPTY_REPLY),
    ],
)
async def test_an_answer_of_another_shape_is_no_result(
    fake: FakeHuggingFace, server: HuggingFace, body: str, reason: Reason
) -> None:
    fake.streams = False
    fake.faults["/generate"] = Fault("status", status=200, body=body)

    with pytest.raises(RuntimeFailure) as caught:
        await run(server, Work(prompt="x"))

    assert caught.value.reason is reason


@pytest.mark.parametrize("path", ["/health", "/info"])
@pytest.mark.parametrize("kind", ["status", "stall", "drop"])
async def test_c14_what_cannot_be_read_is_unknown(
    fake: FakeHuggingFace, server: HuggingFace, path: str, kind: Any
) -> None:
    fake.faults[path] = Fault(kind)

    reading = await server.look()

    assert (reading.healthy, reading.resident, reading.models) == (False, None, None)
    assert path in (reading.error or "")


@pytest.mark.parametrize(
    ("temperature", "said"), [(0.0, {"do_sample": False}), (0.5, {"do_sample": True, "temperature": 0.5})]
)
async def test_settings_have_their_names_and_beat_options(
    fake: FakeHuggingFace, server: HuggingFace, temperature: float, said: dict[str, Any]
) -> None:
    work = Work(prompt="x", max_tokens=3, temperature=temperature, seed=4, stop=["."], options={"max_new_tokens": 9})

    await run(server, work)

    assert fake.bodies[0][1] == {
        "inputs": "x",
        "parameters": {"details": True, "max_new_tokens": 3, "seed": 4, "stop": ["."], **said},
    }
