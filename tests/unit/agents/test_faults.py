"""What goes wrong on the wire ends in the right reason, once, for every provider and task."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
import pytest_asyncio

from gpukeeper.agents.config import RuntimeConfig
from gpukeeper.agents.runtimes.port import Provider, RuntimeFailure, Token
from gpukeeper.agents.runtimes.registry import build
from gpukeeper.events.errors import ConfigError
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import ChatMessage, Task, Work
from support.fake_http import Fault, FaultKind
from support.llamacpp_fake import FakeLlamaCpp
from support.ollama import BUSY, FakeOllama

PATHS: dict[tuple[str, Task], str] = {
    ("ollama", "generate"): "/api/generate",
    ("ollama", "chat"): "/api/chat",
    ("ollama", "embed"): "/api/embed",
    ("llamacpp", "generate"): "/completion",
    ("llamacpp", "chat"): "/v1/chat/completions",
    ("llamacpp", "embed"): "/v1/embeddings",
}
WORK: dict[Task, Work] = {
    "generate": Work(prompt="x"),
    "chat": Work(messages=[ChatMessage(role="user", content="x")]),
    "embed": Work(input=["x"]),
}
STREAMED = [key for key in PATHS if key[1] != "embed"]


class Pair:
    def __init__(self, server: FakeOllama | FakeLlamaCpp, provider: Provider) -> None:
        self.server = server
        self.provider = provider

    async def run(self, task: Task) -> None:
        async for _ in self.provider.run("m:8b", task, WORK[task], on_cpu=False):
            pass


@pytest_asyncio.fixture
async def pairs() -> AsyncGenerator[dict[str, Pair]]:
    async with FakeOllama() as ollama, FakeLlamaCpp(model="m:8b") as llama:
        pairs = {
            "ollama": Pair(ollama, build(RuntimeConfig(name="o", provider="ollama", url=ollama.url))),
            "llamacpp": Pair(llama, build(RuntimeConfig(name="l", provider="llamacpp", url=llama.url))),
        }
        yield pairs
        for pair in pairs.values():
            await pair.provider.close()


async def failure_of(pair: Pair, task: Task) -> RuntimeFailure:
    with pytest.raises(RuntimeFailure) as caught:
        await pair.run(task)
    return caught.value


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("status", Reason.RUNTIME_ERROR),
        ("html", Reason.RUNTIME_BAD_REPLY),
        ("empty", Reason.RUNTIME_EMPTY_REPLY),
        ("truncated", Reason.RUNTIME_CUT),
        ("drop", Reason.RUNTIME_CUT),
    ],
)
@pytest.mark.parametrize(("provider", "task"), PATHS)
async def test_a_fault_is_one_failure_with_its_reason(
    pairs: dict[str, Pair], provider: str, task: Task, kind: FaultKind, reason: Reason
) -> None:
    pair = pairs[provider]
    path = PATHS[provider, task]
    pair.server.faults[path] = Fault(kind)

    failure = await failure_of(pair, task)

    assert failure.reason is reason
    assert path in failure.detail
    assert pair.server.requests[path] == 1


@pytest.mark.parametrize(("provider", "task"), STREAMED)
async def test_a_stream_that_is_cut_yields_what_came_and_then_fails(
    pairs: dict[str, Pair], provider: str, task: Task
) -> None:
    pair = pairs[provider]
    pair.server.faults[PATHS[provider, task]] = Fault("cut")
    seen: list[object] = []

    async def collect() -> None:
        async for item in pair.provider.run("m:8b", task, WORK[task], on_cpu=False):
            seen.append(item)  # noqa: PERF401 (what came before the failure is wanted)

    with pytest.raises(RuntimeFailure) as caught:
        await collect()

    assert seen
    assert caught.value.reason is Reason.RUNTIME_CUT
    assert all(isinstance(item, Token) for item in seen)


@pytest.mark.parametrize(("provider", "task"), STREAMED)
async def test_an_error_record_in_mid_stream_is_an_error(pairs: dict[str, Pair], provider: str, task: Task) -> None:
    pair = pairs[provider]
    pair.server.stream_error = "CUDA error: out of memory"

    failure = await failure_of(pair, task)

    assert failure.reason is Reason.RUNTIME_ERROR
    assert "CUDA error: out of memory" in failure.detail


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (503, f'{{"error":"{BUSY}"}}', Reason.RUNTIME_BUSY),
        (429, "slow down", Reason.RUNTIME_BUSY),
        (503, '{"error":{"code":503,"message":"Loading model"}}', Reason.RUNTIME_ERROR),
        (503, "<html>bad gateway</html>", Reason.RUNTIME_ERROR),
        (400, '{"error":{"message":"no such option"}}', Reason.RUNTIME_ERROR),
        (302, "", Reason.RUNTIME_ERROR),
    ],
)
async def test_a_status_is_kept_with_what_was_said(
    pairs: dict[str, Pair], status: int, body: str, reason: Reason
) -> None:
    pairs["ollama"].server.faults["/api/generate"] = Fault("status", status=status, body=body)

    failure = await failure_of(pairs["ollama"], "generate")

    assert failure.reason is reason
    assert failure.status == status
    assert str(status) in failure.detail


async def test_words_inside_an_error_object_are_shown_without_their_wrapping(pairs: dict[str, Pair]) -> None:
    body = '{"error":{"code":400,"message":"exceeds the available context size"}}'
    pairs["llamacpp"].server.faults["/completion"] = Fault("status", status=400, body=body)

    failure = await failure_of(pairs["llamacpp"], "generate")

    assert failure.detail == "/completion: status 400: exceeds the available context size"


async def test_what_is_shown_of_a_large_error_is_bounded(pairs: dict[str, Pair]) -> None:
    pairs["ollama"].server.faults["/api/chat"] = Fault("status", body="x" * 1_000_000)

    failure = await failure_of(pairs["ollama"], "chat")

    assert len(failure.detail) < 600


async def test_c8_a_busy_runtime_is_a_failure_of_its_own(pairs: dict[str, Pair]) -> None:
    """C8: a 503 is neither success nor retried in silence."""
    pairs["ollama"].server.max_in_flight = 0

    failure = await failure_of(pairs["ollama"], "generate")

    assert failure.reason is Reason.RUNTIME_BUSY
    assert failure.status == 503
    assert pairs["ollama"].server.requests["/api/generate"] == 1


@pytest.mark.parametrize(("provider", "task"), PATHS)
async def test_a_runtime_that_answers_nothing_is_left_at_the_callers_deadline(
    pairs: dict[str, Pair], provider: str, task: Task
) -> None:
    pair = pairs[provider]
    pair.server.faults[PATHS[provider, task]] = Fault("stall", times=1)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await pair.run(task)

    for connection in list(pair.server.live):
        async with asyncio.timeout(5):
            await connection.gone.wait()
    await pair.run(task)


@pytest.mark.parametrize(("provider", "task"), STREAMED)
async def test_leaving_a_stream_closes_its_connection(pairs: dict[str, Pair], provider: str, task: Task) -> None:
    pair = pairs[provider]
    pair.server.hold = asyncio.Event()

    async with asyncio.timeout(5), aclosing(pair.provider.run("m:8b", task, WORK[task], on_cpu=False)) as running:
        async for item in running:
            assert isinstance(item, Token)
            break

    async with asyncio.timeout(5):
        for connection in list(pair.server.live):
            await connection.gone.wait()
    assert not pair.server.live


@pytest.mark.parametrize(("provider", "task"), PATHS)
async def test_finished_runs_share_one_connection(pairs: dict[str, Pair], provider: str, task: Task) -> None:
    for _ in range(5):
        await pairs[provider].run(task)

    assert pairs[provider].server.connections == 1


async def test_a_connection_that_the_runtime_closed_while_idle_is_not_reused(pairs: dict[str, Pair]) -> None:
    pair = pairs["ollama"]
    await pair.run("generate")
    (connection,) = pair.server.live
    connection.close()
    await connection.gone.wait()

    await pair.run("generate")

    assert pair.server.connections == 2
    assert pair.server.payload_calls == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("provider", ["ollama", "llamacpp"])
async def test_a_runtime_that_is_not_there_is_unreachable(provider: str) -> None:
    config = RuntimeConfig(name="gone", provider="ollama", url=f"http://127.0.0.1:{unused_port()}")
    found = build(config)

    with pytest.raises(RuntimeFailure) as caught:
        async for _ in found.run("m:8b", "generate", WORK["generate"], on_cpu=False):
            pass
    await found.close()

    assert caught.value.reason is Reason.RUNTIME_UNREACHABLE
    assert config.url in caught.value.detail


@pytest.mark.parametrize("url", ["127.0.0.1:11434", "ftp://host", "http://", "", "http://host:notaport"])
def test_a_url_that_is_none_is_an_error_of_the_configuration(url: str) -> None:
    with pytest.raises(ConfigError):
        build(RuntimeConfig(name="x", provider="ollama", url=url))


def unused_port() -> int:
    """A port that nobody listens on: it was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
