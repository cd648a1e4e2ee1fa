"""Which runtimes a host has."""

from __future__ import annotations

import pytest

from gpukeeper.agents.config import AgentConfig, RuntimeConfig
from gpukeeper.agents.runtimes.llamacpp import LlamaCpp
from gpukeeper.agents.runtimes.ollama import Ollama
from gpukeeper.agents.runtimes.registry import build, find_runtimes
from gpukeeper.events.modelnames import all_names, same_model
from support.fake_http import Fault, FaultKind
from support.ollama import FakeOllama

DECLARED = RuntimeConfig(name="mine", provider="llamacpp", url="http://127.0.0.1:1")


async def test_each_provider_is_built_by_its_name() -> None:
    llama = build(DECLARED)
    ollama = build(RuntimeConfig(name="o", provider="ollama", url="http://127.0.0.1:1"))

    assert isinstance(llama, LlamaCpp)
    assert isinstance(ollama, Ollama)
    assert llama.config is DECLARED
    await llama.close()
    await ollama.close()


async def test_declared_runtimes_are_the_registry() -> None:
    async with FakeOllama() as fake:
        found = await find_runtimes(AgentConfig(host="h", runtimes=(DECLARED,)), ollama_url=fake.url)

        assert found == (DECLARED,)
        assert not fake.requests


async def test_an_ollama_that_answers_is_found_when_none_is_declared() -> None:
    async with FakeOllama() as fake:
        (found,) = await find_runtimes(AgentConfig(host="h"), ollama_url=fake.url)

        assert (found.name, found.provider, found.url) == ("ollama", "ollama", fake.url)
        assert dict(fake.requests) == {"/api/version": 1}


@pytest.mark.parametrize("kind", ["status", "html", "empty", "drop"])
async def test_what_answers_like_something_else_is_no_ollama(kind: FaultKind) -> None:
    async with FakeOllama() as fake:
        fake.faults["/api/version"] = Fault(kind)

        assert await find_runtimes(AgentConfig(host="h"), ollama_url=fake.url) == ()


async def test_nothing_is_looked_for_where_that_is_switched_off() -> None:
    async with FakeOllama() as fake:
        assert await find_runtimes(AgentConfig(host="h", find_runtimes=False), ollama_url=fake.url) == ()
        assert not fake.requests


async def test_no_ollama_is_no_error() -> None:
    async with FakeOllama() as fake:
        url = fake.url

    assert await find_runtimes(AgentConfig(host="h"), ollama_url=url) == ()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("qwen3", "qwen3:latest", True),
        ("qwen3:8b", "qwen3:latest", False),
        ("qwen3:8b", "qwen3", False),
        ("/models/a/Tiny-Q4.gguf", "Tiny-Q4", True),
        ("C:\\models\\Tiny-Q4.GGUF", "Tiny-Q4.gguf", True),
        ("Tiny-Q4.gguf", "tiny-q4", False),
        ("hf.co/user/model:Q4", "model:Q4", False),
        ("a", "a", True),
    ],
)
def test_names_of_one_model(one: str, other: str, same: bool) -> None:
    assert same_model(one, other) is same
    assert same_model(other, one) is same


def test_a_catalogue_has_every_name_of_a_file() -> None:
    assert all_names("/m/t.gguf") == ("/m/t.gguf", "t.gguf", "t")
    assert all_names("qwen3:latest") == ("qwen3:latest", "qwen3")
    assert all_names("qwen3:8b") == ("qwen3:8b",)
