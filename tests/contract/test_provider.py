"""The contract of a provider, the same for each: a real llama.cpp server, and a fake of each protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from gpukeeper.agents.config import RuntimeConfig
from gpukeeper.agents.runtimes.comfyui import ComfyUI
from gpukeeper.agents.runtimes.port import Done, Provider, RuntimeFailure, Token
from gpukeeper.agents.runtimes.registry import build
from gpukeeper.agents.stopping import StopProof
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import ChatMessage, JobResult, Task, Work, task_of
from gpukeeper.scheduler.feasible import lists_model
from support.comfyui_fake import FakeComfyUI
from support.fake_http import FakeServer
from support.huggingface_fake import FakeHuggingFace
from support.llamacpp_fake import FakeLlamaCpp
from support.llamacpp_router import FakeLlamaRouter
from support.llamacpp_server import llama_server
from support.ollama import FakeOllama
from support.vllm_fake import FakeVllm

KINDS = (
    "real llama.cpp",
    "fake llama.cpp",
    "fake llama.cpp router",
    "fake Ollama",
    "fake vLLM",
    "fake Hugging Face",
    "fake ComfyUI",
)
TEXT: tuple[Task, ...] = ("generate", "chat", "embed")
HOLDS_MB = 1_000


class Subject:
    """A provider, the model it has under its usual name, another name of the same model, and what is its own."""

    def __init__(
        self,
        provider: Provider,
        model: str,
        other_name: str,
        fake: FakeServer | None,
        *,
        tasks: tuple[Task, ...] = TEXT,
        missing: Reason = Reason.LOAD_FAILED,
        knows_size: bool = True,
        shows_stop: bool = True,
    ) -> None:
        self.provider = provider
        #: None for a real server.
        self.fake = fake
        self.model = model
        self.other_name = other_name
        #: What it can do; everything else it refuses.
        self.tasks = tasks
        #: How a load of a model that it has not fails.
        self.missing = missing
        #: Whether it says how large a model is before it is resident.
        self.knows_size = knows_size
        #: Whether anything shows that a run has ended.
        self.shows_stop = shows_stop

    @property
    def task(self) -> Task:
        """A task that it can do."""
        return self.tasks[0]

    def work(self, text: str = "x", length: int = 2) -> Work:
        """Work of :attr:`task`."""
        if self.task == "workflow":
            return Work(workflow={"9": {"class_type": "SaveImage", "inputs": {"filename_prefix": text}}})
        return Work(prompt=text, max_tokens=length)


@asynccontextmanager
async def serve(kind: str, folder: Path) -> AsyncGenerator[Subject]:
    match kind:
        case "real llama.cpp":
            async with llama_server(folder, model="tiny") as server:
                yield Subject(provider("llamacpp", server.url), "tiny", "tiny.gguf", None)
        case "fake llama.cpp":
            async with FakeLlamaCpp(model="tiny") as server:
                yield Subject(provider("llamacpp", server.url), "tiny", "tiny.gguf", server)
        case "fake llama.cpp router":
            async with FakeLlamaRouter({"other": 2_000_000, "tiny": 1_000_000}, aliases={"tiny": ("small",)}) as server:
                found = Subject(provider("llamacpp", server.url), "tiny", "small", server)
                # Its runs never load: nobody would look where the model went.
                await found.provider.load("tiny", on_cpu=False)
                yield found
        case "fake vLLM":
            async with FakeVllm(names=("tiny", "tiny-alias")) as server:
                made = provider("vllm", server.url, holds_mb=HOLDS_MB)
                yield Subject(made, "tiny", "tiny-alias", server)
        case "fake Hugging Face":
            async with FakeHuggingFace(model="org/tiny") as server:
                made = provider("huggingface", server.url, holds_mb=HOLDS_MB)
                yield Subject(made, "org/tiny", "org/tiny:latest", server, tasks=("generate",), shows_stop=False)
        case "fake ComfyUI":
            async with FakeComfyUI() as server:
                made = ComfyUI(RuntimeConfig(name="r", provider="comfyui", url=server.url), poll_s=0.001)
                yield Subject(made, "comfyui", "r", server, tasks=("workflow",), knows_size=False)
        case _:
            async with FakeOllama() as server:
                made = provider("ollama", server.url)
                yield Subject(made, "qwen3:latest", "qwen3", server, missing=Reason.RUNTIME_ERROR)


def provider(name: Any, url: str, **settings: Any) -> Provider:
    return build(RuntimeConfig(name="r", provider=name, url=url, **settings))


@pytest_asyncio.fixture(params=KINDS)
async def at(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Subject]:
    async with serve(request.param, tmp_path) as found:
        try:
            yield found
        finally:
            await found.provider.close()


async def ran(at: Subject, task: Task, work: Work, *, model: str | None = None) -> tuple[list[str], JobResult]:
    """The texts of all tokens and the result, with the shape of a run checked."""
    items = [item async for item in at.provider.run(model or at.model, task, work, on_cpu=False)]
    *tokens, done = items
    assert isinstance(done, Done)
    assert all(isinstance(token, Token) for token in tokens)
    return [token.text for token in tokens if isinstance(token, Token)], done.result


async def refuses(at: Subject, task: Task, work: Work) -> bool:
    """Whether it cannot do the task; then it says so."""
    if task in at.tasks:
        return False
    with pytest.raises(RuntimeFailure) as caught:
        await ran(at, task, work)
    assert caught.value.reason is Reason.UNSUPPORTED_TASK
    assert task in caught.value.detail
    return True


async def test_look_reads_health_and_catalogue(at: Subject) -> None:
    await at.provider.load(at.model, on_cpu=False)

    reading = await at.provider.look()

    assert reading.healthy
    assert reading.error is None
    assert reading.runtime == "r"
    assert reading.models is not None
    assert lists_model(reading.models, at.model)
    assert lists_model(reading.models, at.other_name)


async def test_a_loaded_model_is_resident_under_each_of_its_names(at: Subject) -> None:
    await at.provider.load(at.other_name, on_cpu=False)

    reading = await at.provider.look()

    row = at.provider.find(reading, at.model)
    assert row is not None
    assert row == at.provider.find(reading, at.other_name)
    assert row.size_bytes is not None
    assert row.size_bytes > 0
    assert not row.stopping
    assert (row.vram_bytes is not None) == at.provider.reports_vram


async def test_a_model_it_has_not_is_not_found(at: Subject) -> None:
    reading = await at.provider.look()

    assert at.provider.find(reading, "nobody/has-this") is None
    assert await at.provider.model_bytes("nobody/has-this") is None


async def test_model_bytes_are_what_the_runtime_says(at: Subject) -> None:
    size = await at.provider.model_bytes(at.other_name)

    assert (size is not None) == at.knows_size
    assert size is None or size > 0


async def test_loading_a_model_it_has_not_fails_with_the_name(at: Subject) -> None:
    with pytest.raises(RuntimeFailure) as caught:
        await at.provider.load("nobody/has-this", on_cpu=False)

    assert caught.value.reason is at.missing
    assert "nobody/has-this" in caught.value.detail


async def test_generate_streams_what_it_returns(at: Subject) -> None:
    work = Work(prompt="Say something.", max_tokens=5, seed=7)
    if await refuses(at, "generate", work):
        return

    tokens, result = await ran(at, "generate", work)

    assert result.text == "".join(tokens)
    assert result.text
    assert result.message is None
    assert result.embeddings is None
    assert result.finish_reason == "length"
    assert result.completion_tokens == 5
    assert result.prompt_tokens


async def test_chat_streams_what_it_returns(at: Subject) -> None:
    hello = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Hello")]

    work = Work(messages=hello, max_tokens=5)
    if await refuses(at, "chat", work):
        return

    tokens, result = await ran(at, "chat", work)

    assert result.message is not None
    assert result.message["role"] == "assistant"
    assert result.message["content"] == "".join(tokens)
    assert result.message["content"]
    assert result.text is None
    assert result.finish_reason == "length"
    assert result.completion_tokens == 5


@pytest.mark.parametrize("given", ["one text", ["one", "two", "three"]])
async def test_embed_returns_a_row_for_each_input(at: Subject, given: str | list[str]) -> None:
    if await refuses(at, "embed", Work(input=given)):
        return

    tokens, result = await ran(at, "embed", Work(input=given))

    assert tokens == []
    assert result.embeddings is not None
    assert len(result.embeddings) == (1 if isinstance(given, str) else 3)
    assert all(row for row in result.embeddings)
    assert result.text is None


@pytest.mark.parametrize(
    "work", [Work(workflow={"1": {"class_type": "X", "inputs": {}}}), Work(analysis={"moves": []})]
)
async def test_a_graph_or_an_analysis_gives_an_output(at: Subject, work: Work) -> None:
    task = task_of(work)
    assert task is not None
    if await refuses(at, task, work):
        return

    _, result = await ran(at, task, work)

    assert result.output
    assert (result.text, result.message, result.embeddings) == (None, None, None)


async def test_another_name_of_the_model_runs_it(at: Subject) -> None:
    await at.provider.residency()

    _, result = await ran(at, at.task, at.work(), model=at.other_name)

    assert result.text or result.output


async def test_a_model_it_has_not_is_never_answered_by_another(at: Subject) -> None:
    with pytest.raises(RuntimeFailure) as caught:
        await ran(at, at.task, at.work(), model="nobody/has-this")

    assert "nobody/has-this" in caught.value.detail


async def test_a_run_that_is_left_early_leaves_the_runtime_usable(at: Subject) -> None:
    if at.fake is not None:
        at.fake.hold = asyncio.Event()
    async with aclosing(at.provider.run(at.model, at.task, at.work(length=4000), on_cpu=False)) as running:
        async for item in running:
            assert isinstance(item, Token)
            break
    if at.fake is not None:
        at.fake.hold = None

    _, result = await ran(at, at.task, at.work("y"))

    assert result.text or result.output


async def test_signs_prove_a_run_that_was_left_to_have_ended_and_not_one_that_goes_on(at: Subject) -> None:
    await at.provider.load(at.model, on_cpu=False)
    if at.fake is not None:
        at.fake.hold = asyncio.Event()
    async with aclosing(at.provider.run(at.model, at.task, at.work(length=4000), on_cpu=False)) as running:
        async for item in running:
            assert isinstance(item, Token)
            break
        during = await at.provider.signs(at.model)
        proof = StopProof(during)
        looks = [proof.shown_by(await at.provider.signs(at.model)) for _ in range(3)]
    if not at.shows_stop:
        looks += [proof.shown_by(await at.provider.signs(at.model)) for _ in range(5)]
        assert not any(looks)
        return
    async with asyncio.timeout(20):
        while not proof.shown_by(await at.provider.signs(at.model)):
            pass

    assert looks == [False, False, False]


async def test_runs_at_once_do_not_mix(at: Subject) -> None:
    lengths = (1, 2, 3, 4)

    results = await asyncio.gather(*(ran(at, at.task, at.work(f"n{length}", length)) for length in lengths))

    if at.task == "workflow":
        assert [f"n{length}.png" in str(result.output) for length, (_, result) in zip(lengths, results, strict=True)]
    else:
        assert [result.completion_tokens for _, result in results] == [1, 2, 3, 4]


async def test_a_release_is_done_as_the_provider_says_it_can(at: Subject) -> None:
    await at.provider.load(at.model, on_cpu=False)
    await ran(at, at.task, at.work())
    model = None if at.provider.releases == "all" else at.model

    if at.provider.releases == "none":
        with pytest.raises(RuntimeFailure) as caught:
            await at.provider.release(model)
        assert caught.value.reason is Reason.NOT_RELEASABLE
        return
    await at.provider.release(model)

    reading = await at.provider.residency()
    assert reading.healthy
    assert at.provider.find(reading, at.model) is None
    await at.provider.load(at.model, on_cpu=False)
    assert at.provider.find(await at.provider.residency(), at.model) is not None


async def test_what_the_registry_forbids_to_let_go_is_not_asked(at: Subject) -> None:
    config = msgspec.structs.replace(at.provider.config, release="none")
    forbidden = build(config)

    assert forbidden.releases == "none"
    with pytest.raises(RuntimeFailure) as caught:
        await forbidden.release(None)
    await forbidden.close()

    assert caught.value.reason is Reason.NOT_RELEASABLE


async def test_a_fetch_it_cannot_do_fails_with_the_name(at: Subject) -> None:
    if at.provider.pulls:
        return
    with pytest.raises(RuntimeFailure) as caught:
        async for _ in at.provider.pull("nobody/has-this"):
            pass

    assert caught.value.reason is Reason.MODEL_MISSING
    assert "nobody/has-this" in caught.value.detail


# --- giving memory back, and fetching


async def test_what_it_can_release_is_gone_after_an_accepted_release(at: Subject) -> None:
    await at.provider.load(at.model, on_cpu=False)
    if at.provider.releases == "none":
        with pytest.raises(RuntimeFailure) as caught:
            await at.provider.release(at.model)
        assert caught.value.reason is Reason.NOT_RELEASABLE
    else:
        await at.provider.release(at.other_name)

    reading = await at.provider.residency()

    assert (at.provider.find(reading, at.model) is None) == (at.provider.releases != "none")
    assert reading.healthy


async def test_a_release_of_what_is_not_there_is_no_error_where_it_can_release(at: Subject) -> None:
    await at.provider.look()
    if at.provider.releases == "none":
        return
    await at.provider.release(at.model)
    await at.provider.release(at.model)

    reading = await at.provider.residency()

    assert at.provider.find(reading, at.model) is None


async def test_a_model_that_was_released_can_be_loaded_and_run_again(at: Subject) -> None:
    await at.provider.load(at.model, on_cpu=False)
    if at.provider.releases != "none":
        await at.provider.release(at.model)
    await at.provider.load(at.model, on_cpu=False)

    _, result = await ran(at, at.task, at.work())

    assert result.text or result.output


async def test_a_release_for_an_unreachable_runtime_is_not_accepted(at: Subject) -> None:
    """Nobody listens on port 1 of this host."""
    provider = build(msgspec.structs.replace(at.provider.config, url="http://127.0.0.1:1"))
    try:
        with pytest.raises(RuntimeFailure) as caught:
            await provider.release(at.model)
    finally:
        await provider.close()

    assert caught.value.reason in (Reason.RUNTIME_UNREACHABLE, Reason.NOT_RELEASABLE)


async def test_a_fetch_that_it_cannot_do_fails_with_the_name_or_the_words(at: Subject) -> None:
    with pytest.raises(RuntimeFailure) as caught:
        async for _ in at.provider.pull("nobody/has-this"):
            pass

    assert caught.value.reason is (Reason.PROVISION_FAILED if at.provider.pulls else Reason.MODEL_MISSING)
    assert caught.value.detail


async def test_load_options_are_the_same_for_the_same_options_in_any_order(at: Subject) -> None:
    one = Work(prompt="x", temperature=0.5, options={"num_ctx": 8192, "num_thread": 4})
    other = Work(prompt="y", options={"num_thread": 4, "mirostat": 1, "num_ctx": 8192})

    assert at.provider.load_options(one) == at.provider.load_options(other)
    assert at.provider.load_options(Work(prompt="x", temperature=0.5)) == ""


async def test_closing_twice_is_no_error(at: Subject) -> None:
    await at.provider.close()
    await at.provider.close()
