"""The tiny model is a real model file, and what a real server says with it can be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpukeeper.agents.config import RuntimeConfig
from gpukeeper.agents.runtimes.llamacpp import LlamaCpp
from gpukeeper.agents.runtimes.port import Done
from gpukeeper.cli.demo.tiny_model import SENTENCE, WORDS, write_tiny_model
from gpukeeper.events.work import Work
from support.llamacpp_server import llama_server


def test_the_same_seed_writes_the_same_file(tmp_path: Path) -> None:
    one = write_tiny_model(tmp_path / "one.gguf", seed=3)
    two = write_tiny_model(tmp_path / "two.gguf", seed=3)
    other = write_tiny_model(tmp_path / "other.gguf", seed=4)

    assert one.read_bytes() == two.read_bytes()
    assert one.read_bytes() != other.read_bytes()
    assert one.stat().st_size < 1_000_000


@pytest.mark.parametrize("width", [0, 8, 20])
def test_a_width_that_no_layer_can_have_is_refused(tmp_path: Path, width: int) -> None:
    with pytest.raises(ValueError, match="width"):
        write_tiny_model(tmp_path / "m.gguf", width=width)


async def test_it_speaks_in_words_and_says_no_more_than_it_is_asked(tmp_path: Path) -> None:
    async with llama_server(tmp_path) as server:
        llama = LlamaCpp(RuntimeConfig(name="l", provider="llamacpp", url=server.url))
        work = Work(prompt="Hello", max_tokens=60, temperature=10, options={"top_k": 0, "top_p": 1, "min_p": 0})
        items = [item async for item in llama.run("tiny", "generate", work, on_cpu=False)]
        await llama.close()

    done = items[-1]
    assert isinstance(done, Done)
    assert done.result.completion_tokens == 60
    text = done.result.text
    assert text is not None
    assert set(text.replace(".", " .").split()) <= WORDS


async def test_with_many_layers_it_still_speaks_in_sentences(tmp_path: Path) -> None:
    async with llama_server(tmp_path, layers=40) as server:
        llama = LlamaCpp(RuntimeConfig(name="l", provider="llamacpp", url=server.url))
        work = Work(prompt="Hello", max_tokens=70, temperature=0)
        items = [item async for item in llama.run("tiny", "generate", work, on_cpu=False)]
        await llama.close()

    done = items[-1]
    assert isinstance(done, Done)
    assert done.result.text is not None
    words = done.result.text.replace(".", " .").split()
    assert len(words) == 70
    assert [word for place, word in enumerate(words) if word not in SENTENCE[place % len(SENTENCE)]] == []
