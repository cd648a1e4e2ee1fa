"""What is particular to Ollama: what it says it holds, loading, and its shapes."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from gpukeeper.agents.config import RuntimeConfig
from gpukeeper.agents.runtimes import ollama_chat
from gpukeeper.agents.runtimes import ollama_wire as wire
from gpukeeper.agents.runtimes.ollama import Ollama
from gpukeeper.agents.runtimes.port import Done, RuntimeFailure, Token
from gpukeeper.events.readings import ResidentModel
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import ChatMessage, JobResult, Work
from support.fake_http import Fault, FaultKind
from support.ollama import FakeOllama

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


@pytest_asyncio.fixture
async def fake() -> AsyncGenerator[FakeOllama]:
    async with FakeOllama() as server:
        yield server


@pytest_asyncio.fixture
async def ollama(fake: FakeOllama) -> AsyncGenerator[Ollama]:
    provider = Ollama(RuntimeConfig(name="o", provider="ollama", url=fake.url), look_timeout_s=0.5)
    yield provider
    await provider.close()


def parsed(*rows: dict[str, Any]) -> tuple[ResidentModel, ...]:
    return wire.resident(wire.ps_decoder.decode(msgspec.json.encode({"models": rows})), NOW)


async def result_of(ollama: Ollama, work: Work, task: Any = "generate", *, on_cpu: bool = False) -> JobResult:
    items = [item async for item in ollama.run("m:8b", task, work, on_cpu=on_cpu)]
    assert isinstance(items[-1], Done)
    return items[-1].result


def test_c1_a_size_vram_that_is_left_out_is_zero() -> None:
    (row,) = parsed({"name": "m:8b", "model": "m:8b", "size": 5137025024, "digest": "abc", "expires_at": "..."})

    assert row.vram_bytes == 0
    assert row.size_bytes == 5137025024


@pytest.mark.parametrize(
    ("size", "vram", "expected"),
    [
        (0, 0, (0, 0)),
        (0, 5_000_000_000, (0, 5_000_000_000)),
        (5_000_000_000, 6_000_000_000, (5_000_000_000, 6_000_000_000)),
        (-1, -2, (-1, -2)),
        ("5137025024", "0", (None, None)),
        (None, None, (None, None)),
        (True, False, (None, None)),
        (1.5, 10**30, (None, None)),
        ([], {}, (None, None)),
    ],
)
def test_c2_figures_are_kept_where_they_are_whole_numbers(size: Any, vram: Any, expected: Any) -> None:
    (row,) = parsed({"name": "m", "size": size, "size_vram": vram})

    assert (row.size_bytes, row.vram_bytes) == expected


#: Small alphabets and sizes: what matters is the kind of a value.
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0.0, -1.5, 1e300, "", "7", "é", "2026-11-29T12:00:00Z"])
)


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["size", "size_vram", "expires_at", "context_length", "details", "new_field"]),
        SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(st.sampled_from("ab"), SCALARS, max_size=2),
    )
)
def test_c2_no_figure_of_a_row_is_a_crash(fields: dict[str, Any]) -> None:
    body = json.dumps({"models": [{"name": "m", **fields}]}).encode()

    (row,) = wire.resident(wire.ps_decoder.decode(body), NOW)

    assert row.model == "m"
    assert msgspec.json.decode(msgspec.json.encode(row), type=ResidentModel) == row


@pytest.mark.parametrize(
    ("expires_at", "pinned", "stopping"),
    [
        ("2026-11-29T12:05:00Z", False, False),
        ("2026-11-29T13:05:00.123456789+01:00", False, False),
        ("2026-11-29T11:59:59.999Z", False, True),
        ("2026-11-29T12:30:00+01:00", False, True),
        ("2318-03-11T11:47:16.854775807Z", True, False),
        ("9999-12-31T23:59:59-10:00", True, False),
        ("292277026596-12-04T15:30:07Z", True, False),
        ("0001-01-01T00:00:00Z", False, True),
        ("0001-01-01T00:00:00+05:00", False, True),
        ("...", False, False),
        ("", False, False),
        ("2026-13-45T99:99:99Z", False, False),
    ],
)
def test_the_end_of_a_stay_says_whether_it_is_pinned_or_stopping(expires_at: str, pinned: bool, stopping: bool) -> None:
    (row,) = parsed({"name": "m", "size": 1, "size_vram": 1, "expires_at": expires_at})

    assert (row.pinned, row.stopping) == (pinned, stopping)
    assert row.expires_at == expires_at


@given(st.text(max_size=40) | st.from_regex(r"\+?-?\d{4,12}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)?"))
def test_no_time_is_a_crash(text: str) -> None:
    ahead = wire.time_ahead(text, NOW)

    assert ahead is None or isinstance(ahead, timedelta)


@pytest.mark.parametrize("kind", ["status", "html", "truncated", "empty", "stall", "drop"])
async def test_c14_an_unreadable_ps_is_unknown_and_never_no_models(
    fake: FakeOllama, ollama: Ollama, kind: FaultKind
) -> None:
    await ollama.load("m:8b", on_cpu=False)
    fake.faults["/api/ps"] = Fault(kind)

    reading = await ollama.look()

    assert reading.resident is None
    assert not reading.healthy
    assert reading.error is not None
    assert "/api/ps" in reading.error
    assert reading.models is not None


@pytest.mark.parametrize(
    "body",
    ["{}", '{"models":null}', "[]", '{"models":[7]}', '{"models":[{}]}', '{"models":[{"name":""}]}', '"x"'],
)
async def test_c14_a_ps_of_another_shape_is_unknown(fake: FakeOllama, ollama: Ollama, body: str) -> None:
    fake.faults["/api/ps"] = Fault("status", status=200, body=body)

    reading = await ollama.look()

    assert reading.resident is None
    assert reading.error is not None


async def test_c14_a_refused_connection_is_unknown() -> None:
    async with FakeOllama() as fake:
        url = fake.url
    ollama = Ollama(RuntimeConfig(name="o", provider="ollama", url=url))

    reading = await ollama.look()
    await ollama.close()

    assert (reading.healthy, reading.resident, reading.models) == (False, None, None)
    assert reading.error is not None
    assert "cannot be reached" in reading.error


async def test_a_failed_catalogue_does_not_hide_what_is_resident(fake: FakeOllama, ollama: Ollama) -> None:
    await ollama.load("m:8b", on_cpu=False)
    fake.faults["/api/tags"] = Fault("stall")

    reading = await ollama.look()

    assert reading.healthy
    assert reading.resident is not None
    assert [row.model for row in reading.resident] == ["m:8b"]
    assert reading.models is None
    assert reading.error is not None


async def test_an_empty_ps_is_an_empty_list(ollama: Ollama) -> None:
    reading = await ollama.look()

    assert reading.resident == ()
    assert reading.activity == "unknown"


async def test_loading_does_none_of_the_work(fake: FakeOllama, ollama: Ollama) -> None:
    await ollama.load("m:8b", on_cpu=False)

    assert (fake.load_calls, fake.payload_calls, fake.loads) == (1, 0, 1)
    (_, body) = fake.bodies[0]
    assert body == {"model": "m:8b", "stream": False, "keep_alive": 300}


async def test_a_load_for_the_cpu_puts_nothing_into_vram_and_the_run_keeps_it_so(
    fake: FakeOllama, ollama: Ollama
) -> None:
    await ollama.load("m:8b", on_cpu=True)
    await result_of(ollama, Work(prompt="x"), on_cpu=True)

    reading = await ollama.look()
    row = ollama.find(reading, "m:8b")
    assert row is not None
    assert row.vram_bytes == 0
    assert fake.loads == 1


async def test_a_run_goes_where_it_is_told_whatever_was_loaded_for_others(fake: FakeOllama, ollama: Ollama) -> None:
    """Somebody else has loaded the model into VRAM since it was loaded for the CPU here, and that was verified."""
    await ollama.load("m:8b", on_cpu=True)
    await result_of(ollama, Work(prompt="x"), on_cpu=False)

    assert "options" not in fake.bodies[-1][1]


async def test_a_load_with_the_options_of_the_job_is_the_only_load(fake: FakeOllama, ollama: Ollama) -> None:
    work = Work(prompt="x", temperature=0.5, options={"num_ctx": 8192, "mirostat": 1})

    await ollama.load("m:8b", on_cpu=False, work=work)
    await result_of(ollama, work)

    assert fake.loads == 1
    assert fake.bodies[0][1]["options"] == {"num_ctx": 8192}
    assert fake.bodies[1][1]["options"] == {"num_ctx": 8192, "mirostat": 1, "temperature": 0.5}


@pytest.mark.parametrize(("keep_alive_s", "sent"), [(-1, -1), (0, 300), (10, 300), (3600, 3600)])
async def test_a_load_never_asks_to_unload(fake: FakeOllama, keep_alive_s: int, sent: int) -> None:
    config = RuntimeConfig(name="o", provider="ollama", url=fake.url, keep_alive_s=keep_alive_s)
    ollama = Ollama(config)

    await ollama.load("m:8b", on_cpu=False)
    await ollama.close()

    assert fake.bodies[0][1]["keep_alive"] == sent
    assert "m:8b" in fake.loaded


async def test_a_pinned_model_is_read_as_pinned(fake: FakeOllama, ollama: Ollama) -> None:
    async for _ in ollama.run("m:8b", "generate", Work(prompt="x"), keep_alive_s=-1, on_cpu=False):
        pass

    reading = await ollama.look()

    row = ollama.find(reading, "m:8b")
    assert row is not None
    assert row.pinned
    assert fake.bodies[0][1]["keep_alive"] == -1


async def test_a_load_that_the_runtime_cannot_do_is_load_failed(fake: FakeOllama, ollama: Ollama) -> None:
    fake.load_error = "model requires more system memory (9.1 GiB) than is available (3.0 GiB)"

    with pytest.raises(RuntimeFailure) as caught:
        await ollama.load("m:8b", on_cpu=False)

    assert caught.value.reason is Reason.LOAD_FAILED
    assert "9.1 GiB" in caught.value.detail
    assert fake.requests["/api/generate"] == 1


async def test_a_model_it_has_not_is_an_error_with_its_words(ollama: Ollama) -> None:
    with pytest.raises(RuntimeFailure) as caught:
        await ollama.load("none:1b", on_cpu=False)

    assert caught.value.reason is Reason.RUNTIME_ERROR
    assert caught.value.status == 404
    assert "model 'none:1b' not found" in caught.value.detail


async def test_lines_end_at_line_feeds_only() -> None:
    words = ("a\u2028b", "\u2029", "c\x85d", "\x0b\x0c", "\x1c", "e")
    async with FakeOllama(words=words) as fake:
        ollama = Ollama(RuntimeConfig(name="o", provider="ollama", url=fake.url))

        items = [item async for item in ollama.run("m:8b", "generate", Work(prompt="x"), on_cpu=False)]
        await ollama.close()

    assert [item.text for item in items if isinstance(item, Token)] == list(words)
    assert isinstance(items[-1], Done)
    assert items[-1].result.text == "".join(words)


async def test_neutral_settings_go_into_options_and_beat_them(fake: FakeOllama, ollama: Ollama) -> None:
    work = Work(
        prompt="x",
        max_tokens=3,
        temperature=0.1,
        top_p=0.9,
        top_k=7,
        seed=42,
        stop=["."],
        options={"num_predict": 99, "mirostat": 2},
    )

    result = await result_of(ollama, work)

    assert result.completion_tokens == 3
    assert fake.bodies[0][1]["options"] == {
        "num_predict": 3,
        "mirostat": 2,
        "temperature": 0.1,
        "top_p": 0.9,
        "top_k": 7,
        "seed": 42,
        "stop": ["."],
    }


def test_content_in_parts_becomes_text_and_images() -> None:
    parts = [
        {"type": "text", "text": "What is"},
        {"type": "text", "text": "this?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0"}},
    ]
    work = Work(messages=[ChatMessage(role="user", content=parts, images=["/9j/4A"])])

    (message,) = ollama_chat.messages(work)

    assert message == {"role": "user", "content": "What is\nthis?", "images": ["/9j/4A", "iVBORw0"]}


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}, {"type": "audio"}, 7])
def test_a_part_that_ollama_cannot_take_is_named_by_its_place(part: Any) -> None:
    with pytest.raises(RuntimeFailure) as caught:
        ollama_chat.messages(Work(messages=[ChatMessage(role="user", content=["skipped", part][1:])]))

    assert caught.value.reason is Reason.INVALID
    assert "messages[0].content[0]" in caught.value.detail


def test_calls_of_tools_have_their_arguments_as_an_object() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    work = Work(messages=[ChatMessage(role="assistant", tool_calls=[call])])

    (message,) = ollama_chat.messages(work)

    assert message["tool_calls"] == [{"function": {"name": "add", "arguments": {"a": 1}}}]


async def test_thinking_is_progress_but_not_text(fake: FakeOllama, ollama: Ollama) -> None:
    lines = [
        {"message": {"role": "assistant", "content": "", "thinking": "hm"}, "done": False},
        {"message": {"role": "assistant", "content": "yes"}, "done": False},
        {"message": {"role": "assistant", "content": ""}, "done": True, "done_reason": "stop", "new": [1]},
    ]
    body = "\n".join(msgspec.json.encode(line).decode() for line in lines)
    fake.faults["/api/chat"] = Fault("status", status=200, body=body)
    chat = Work(messages=[ChatMessage(role="user", content="?")])

    items = [item async for item in ollama.run("m:8b", "chat", chat, on_cpu=False)]

    assert [item.text for item in items if isinstance(item, Token)] == ["", "yes"]
    assert isinstance(items[-1], Done)
    assert items[-1].result.message == {"role": "assistant", "content": "yes"}


async def test_fewer_embeddings_than_inputs_are_a_bad_reply(fake: FakeOllama, ollama: Ollama) -> None:
    fake.faults["/api/embed"] = Fault("status", status=200, body='{"model":"m","embeddings":[[1.0]]}')

    with pytest.raises(RuntimeFailure) as caught:
        await result_of(ollama, Work(input=["a", "b"]), "embed")

    assert caught.value.reason is Reason.RUNTIME_BAD_REPLY
