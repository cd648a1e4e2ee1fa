"""Which loads would take away what a job rests on."""

from __future__ import annotations

import asyncio

import pytest

from gpukeeper.agents.memory.uses import Uses

CTX = '{"num_ctx":4096}'


@pytest.mark.parametrize(
    ("runtime", "model", "options", "suffers"),
    [
        ("ollama", "m", "", False),
        ("ollama", "m:latest", "", False),
        ("ollama", "m", CTX, True),
        ("ollama", "other", "", True),
        ("vllm", "m", CTX, False),
    ],
)
def test_what_no_request_has_reached_suffers_from_any_other_load_of_its_runtime(
    runtime: str, model: str, options: str, *, suffers: bool
) -> None:
    uses = Uses()
    uses.begin(1, "ollama", "m", "")

    assert uses.would_suffer(runtime, model, options, but=2) is suffers
    assert not uses.would_suffer(runtime, model, options, but=1)


@pytest.mark.parametrize(("model", "options", "suffers"), [("m", CTX, True), ("m", "", False), ("other", "", False)])
def test_what_is_under_way_suffers_from_other_options_of_the_same_model_alone(
    model: str, options: str, *, suffers: bool
) -> None:
    uses = Uses()
    uses.begin(1, "ollama", "m", "", asked=True)

    assert uses.would_suffer("ollama", model, options, but=2) is suffers


def test_a_model_is_in_use_under_whichever_of_its_names_and_for_others_only() -> None:
    uses = Uses()
    uses.begin(1, "ollama", "m:latest", "")

    assert uses.has("ollama", "m", but=2)
    assert not uses.has("ollama", "m", but=1)
    assert not uses.has("vllm", "m", but=2)
    uses.end(1)
    assert not uses.has("ollama", "m", but=2)


async def test_a_load_waits_for_the_last_of_those_that_would_suffer() -> None:
    uses = Uses()
    uses.begin(1, "ollama", "m", "")
    uses.begin(2, "ollama", "m", "", asked=True)
    load = asyncio.create_task(uses.until_harmless("ollama", "m", CTX, but=3))
    for change in (lambda: uses.begin(1, "ollama", "m", "", asked=True), lambda: uses.end(2)):
        change()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not load.done()
    uses.end(1)

    await asyncio.wait_for(load, 5)
