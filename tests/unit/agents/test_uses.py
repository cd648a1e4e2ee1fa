"""Which loads would take away what a job rests on."""

from __future__ import annotations

import asyncio

import pytest

from gpukeeper.agents.memory.uses import Uses

CTX = '{"num_ctx":4096}'


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize(
    ("runtime", "model", "options", "replaces"),
    [
        ("ollama", "m", "", False),
        ("ollama", "m:latest", "", False),
        ("ollama", "m", CTX, True),
        ("ollama", "other", CTX, False),
        ("vllm", "m", CTX, False),
    ],
)
def test_a_load_of_the_same_model_with_other_options_replaces_what_a_job_rests_on(
    runtime: str, model: str, options: str, *, replaces: bool, asked: bool
) -> None:
    uses = Uses()
    uses.begin(1, "ollama", "m", "", asked=asked)

    assert uses.with_other_options(runtime, model, options, but=2) is replaces
    assert not uses.with_other_options(runtime, model, options, but=1)


@pytest.mark.parametrize(
    ("runtime", "model", "asked", "awaits"),
    [
        ("ollama", "other", False, True),
        ("ollama", "other", True, False),
        ("ollama", "m", False, False),
        ("vllm", "other", False, False),
    ],
)
def test_what_no_request_has_reached_may_be_thrown_out_for_another_model(
    runtime: str, model: str, *, asked: bool, awaits: bool
) -> None:
    uses = Uses()
    uses.begin(1, "ollama", "m", "", asked=asked)

    assert uses.awaits_request(runtime, model, but=2) is awaits
    assert not uses.awaits_request(runtime, model, but=1)


def test_a_model_is_in_use_under_whichever_of_its_names_and_for_others_only() -> None:
    uses = Uses()
    uses.begin(1, "ollama", "m:latest", "")

    assert uses.has("ollama", "m", but=2)
    assert not uses.has("ollama", "m", but=1)
    assert not uses.has("vllm", "m", but=2)
    uses.end(1)
    assert not uses.has("ollama", "m", but=2)


async def test_a_load_waits_until_the_last_request_is_on_its_way_or_its_job_is_over() -> None:
    uses = Uses()
    uses.begin(1, "ollama", "m", "")
    uses.begin(2, "ollama", "m", "")
    load = asyncio.create_task(uses.until_asked("ollama", "other", but=3))
    await asyncio.sleep(0)
    uses.begin(1, "ollama", "m", "", asked=True)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not load.done()
    uses.end(2)

    await asyncio.wait_for(load, 5)
