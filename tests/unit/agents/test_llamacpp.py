"""What is particular to a llama.cpp server, as the scripted one says it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from gpukeeper.agents.config import RuntimeConfig
from gpukeeper.agents.runtimes import openai_chat
from gpukeeper.agents.runtimes.llamacpp import LlamaCpp
from gpukeeper.agents.runtimes.port import Done, RuntimeFailure, Token
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import ChatMessage, JobResult, Work
from support.fake_http import Fault
from support.llamacpp_fake import FakeLlamaCpp


@pytest_asyncio.fixture
async def fake() -> AsyncGenerator[FakeLlamaCpp]:
    async with FakeLlamaCpp(model="tiny", size=318_720) as server:
        yield server


@pytest_asyncio.fixture
async def llama(fake: FakeLlamaCpp) -> AsyncGenerator[LlamaCpp]:
    provider = LlamaCpp(RuntimeConfig(name="l", provider="llamacpp", url=fake.url), look_timeout_s=0.5)
    yield provider
    await provider.close()


async def result_of(llama: LlamaCpp, work: Work, task: Any = "generate") -> JobResult:
    items = [item async for item in llama.run("tiny", task, work, on_cpu=False)]
    assert isinstance(items[-1], Done)
    return items[-1].result


async def test_its_one_model_is_resident_for_life_and_its_vram_is_not_told(llama: LlamaCpp) -> None:
    reading = await llama.look()

    assert reading.resident is not None
    (row,) = reading.resident
    assert (row.model, row.size_bytes, row.vram_bytes) == ("tiny", 318_720, None)
    assert row.pinned
    assert reading.models == ("tiny", "/models/tiny.gguf", "tiny.gguf")
    assert not llama.loads_models


async def test_the_file_name_finds_a_model_that_has_an_alias(fake: FakeLlamaCpp, llama: LlamaCpp) -> None:
    fake.faults["/props"] = Fault("status", status=200, body='{"model_path":"/models/Big-Q4.gguf"}')

    reading = await llama.look()

    assert llama.find(reading, "Big-Q4") == llama.find(reading, "Big-Q4.gguf") == llama.find(reading, "tiny")
    assert llama.find(reading, "Big") is None
    await llama.load("Big-Q4.gguf", on_cpu=False)


@pytest.mark.parametrize(
    ("body", "activity"),
    [
        ('[{"id":0,"is_processing":false},{"id":1,"is_processing":false}]', "idle"),
        ('[{"id":0,"is_processing":false},{"id":1,"is_processing":true}]', "busy"),
        ("[]", "unknown"),
        ('{"error":"x"}', "unknown"),
        ('[{"id":0,"is_processing":"yes"}]', "unknown"),
    ],
)
async def test_activity_is_what_the_slots_say(fake: FakeLlamaCpp, llama: LlamaCpp, body: str, activity: str) -> None:
    fake.faults["/slots"] = Fault("status", status=200, body=body)

    reading = await llama.look()

    assert reading.activity == activity
    assert reading.healthy


async def test_activity_is_unknown_where_slots_are_switched_off(fake: FakeLlamaCpp, llama: LlamaCpp) -> None:
    fake.faults["/slots"] = Fault("status", status=501, body='{"error":{"message":"Start it with `--slots`"}}')

    reading = await llama.look()

    assert reading.activity == "unknown"
    assert reading.healthy


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
@pytest.mark.parametrize("kind", ["status", "html", "truncated", "empty", "stall", "drop"])
async def test_c14_what_cannot_be_read_is_unknown(fake: FakeLlamaCpp, llama: LlamaCpp, path: str, kind: Any) -> None:
    fake.faults[path] = Fault(kind)

    reading = await llama.look()

    assert (reading.healthy, reading.resident, reading.models) == (False, None, None)
    assert reading.error is not None
    assert path in reading.error


async def test_a_server_that_is_still_loading_holds_nothing_known(fake: FakeLlamaCpp, llama: LlamaCpp) -> None:
    body = '{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}'
    fake.faults["/health"] = Fault("status", status=503, body=body)

    reading = await llama.look()

    assert reading.resident is None
    assert reading.error is not None
    assert "Loading model" in reading.error


async def test_it_never_passes_off_another_model_as_the_one_that_was_asked(fake: FakeLlamaCpp, llama: LlamaCpp) -> None:
    with pytest.raises(RuntimeFailure) as caught:
        async for _ in llama.run("qwen3", "generate", Work(prompt="x"), on_cpu=False):
            pass

    assert caught.value.reason is Reason.RUNTIME_BAD_REPLY
    assert "answered by tiny" in caught.value.detail


async def test_settings_have_their_llamacpp_names_and_beat_options(fake: FakeLlamaCpp, llama: LlamaCpp) -> None:
    work = Work(
        prompt="x",
        max_tokens=3,
        temperature=0.1,
        top_p=0.9,
        top_k=7,
        seed=42,
        stop=["."],
        options={"n_predict": 99, "min_p": 0.2, "stream": False, "prompt": "not this"},
    )

    result = await result_of(llama, work)

    assert result.completion_tokens == 3
    assert fake.bodies[0][1] == {
        "model": "tiny",
        "prompt": "x",
        "stream": True,
        "n_predict": 3,
        "temperature": 0.1,
        "top_p": 0.9,
        "top_k": 7,
        "seed": 42,
        "stop": ["."],
        "min_p": 0.2,
    }


async def test_chat_names_its_limit_as_openai_does(fake: FakeLlamaCpp, llama: LlamaCpp) -> None:
    hello = [ChatMessage(role="user", content="hi", images=["iVBORw0"])]

    await result_of(llama, Work(messages=hello, max_tokens=2), "chat")

    (_, body) = fake.bodies[0]
    assert body["max_tokens"] == 2
    assert "n_predict" not in body
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0"}}
    assert body["messages"] == [{"role": "user", "content": [{"type": "text", "text": "hi"}, image]}]


async def test_lines_end_at_line_feeds_only() -> None:
    words = ("a\u2028b", "\u2029", "c\x85d")
    async with FakeLlamaCpp(model="tiny", words=words) as fake:
        llama = LlamaCpp(RuntimeConfig(name="l", provider="llamacpp", url=fake.url))

        items = [item async for item in llama.run("tiny", "generate", Work(prompt="x"), on_cpu=False)]
        await llama.close()

    assert [item.text for item in items if isinstance(item, Token)] == list(words)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"stop_type": "limit"}, "length"),
        ({"stop_type": "eos"}, "stop"),
        ({"stop_type": "word"}, "stop"),
        ({"stopped_limit": True}, "length"),
        ({"stopped_eos": True}, "stop"),
        ({}, None),
    ],
)
async def test_the_end_of_old_and_new_servers_reads_the_same(
    fake: FakeLlamaCpp, llama: LlamaCpp, record: dict[str, Any], expected: str | None
) -> None:
    body = b"data: " + msgspec.json.encode({"content": "", "stop": True, **record}) + b"\n\n"
    fake.faults["/completion"] = Fault("status", status=200, body=body.decode())

    result = await result_of(llama, Work(prompt="x"))

    assert result.finish_reason == expected


def test_calls_of_tools_are_put_together_from_their_pieces() -> None:
    answer = openai_chat.Answer()
    pieces: list[dict[str, Any]] = [
        {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "add", "arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
        {"reasoning_content": "hm"},
        {"content": "done"},
    ]

    texts = [answer.take(msgspec.json.encode({"choices": [{"delta": delta}]}), "/p") for delta in pieces]

    assert texts == ["", "", "", "done"]
    assert answer.result().message == {
        "role": "assistant",
        "content": "done",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
    }


@pytest.mark.parametrize(
    ("line", "data"),
    [
        (b"data: {}", b"{}"),
        (b"data:{}\r", b"{}"),
        (b": ping", None),
        (b"event: message", None),
        (b"data: [DONE]", openai_chat.END),
    ],
)
def test_lines_of_an_event_stream_give_their_data(line: bytes, data: bytes | None) -> None:
    assert openai_chat.sse_data(line, "/p") == data


@pytest.mark.parametrize(
    ("line", "reason"),
    [(b'error: {"code":500}', Reason.RUNTIME_ERROR), (b"<html>", Reason.RUNTIME_BAD_REPLY)],
)
def test_lines_that_are_no_event_fail(line: bytes, reason: Reason) -> None:
    with pytest.raises(RuntimeFailure) as caught:
        openai_chat.sse_data(line, "/p")

    assert caught.value.reason is reason
