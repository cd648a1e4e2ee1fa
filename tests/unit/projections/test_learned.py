"""What the loads of before teach."""

from __future__ import annotations

import msgspec
import pytest

from gpukeeper.events.runtime import ModelLoaded
from gpukeeper.projections.learned import LOADS_MAX, MODELS_MAX, Learned, LearnedLoad


def loaded(vram_mb: int | None, *, model: str = "qwen3", options: str = "", host: str = "h") -> ModelLoaded:
    return ModelLoaded(
        host=host,
        runtime="ollama",
        model=model,
        job="j",
        epoch=1,
        load_s=1.0,
        vram_mb=vram_mb,
        load_options=options,
    )


def learn(*facts: ModelLoaded) -> Learned:
    learned = Learned()
    for fact in facts:
        learned.apply(fact)
    return learned


def test_the_peak_of_the_loads_is_learned_under_every_name_of_the_model() -> None:
    learned = learn(loaded(5000, model="qwen3:latest"), loaded(5200), loaded(5100))
    assert learned.peak_mb("h", "ollama", "qwen3:latest") == 5200


def test_other_options_other_hosts_and_other_runtimes_are_learned_apart() -> None:
    learned = learn(loaded(5000, options='{"num_ctx":4096}'))
    assert learned.peak_mb("h", "ollama", "qwen3", '{"num_ctx":4096}') == 5000
    assert learned.peak_mb("h", "ollama", "qwen3") is None
    assert learned.peak_mb("other", "ollama", "qwen3", '{"num_ctx":4096}') is None
    assert learned.peak_mb("h", "vllm", "qwen3", '{"num_ctx":4096}') is None


@pytest.mark.parametrize("vram_mb", [None, 0, -3])
def test_a_load_that_showed_nothing_teaches_nothing(vram_mb: int | None) -> None:
    assert learn(loaded(vram_mb)).peak_mb("h", "ollama", "qwen3") is None


def test_an_old_peak_is_forgotten_after_as_many_newer_loads() -> None:
    learned = learn(loaded(9000), *(loaded(5000) for _ in range(LOADS_MAX - 1)))
    assert learned.peak_mb("h", "ollama", "qwen3") == 9000
    learned.apply(loaded(5000))
    assert learned.peak_mb("h", "ollama", "qwen3") == 5000


def test_what_was_loaded_longest_ago_is_forgotten_and_only_on_its_host() -> None:
    learned = learn(loaded(1, host="other"), *(loaded(5000, model=f"m{index}") for index in range(MODELS_MAX)))
    learned.apply(loaded(5000, model="m0"))
    learned.apply(loaded(5000, model="new"))
    assert learned.peak_mb("h", "ollama", "m0") == 5000
    assert learned.peak_mb("h", "ollama", "m1") is None
    assert learned.peak_mb("other", "ollama", "qwen3") == 1


def test_a_snapshot_and_the_rest_give_what_a_full_fold_gives() -> None:
    facts = [loaded(1000 + index, model=f"m{index % (MODELS_MAX + 9)}") for index in range(3 * MODELS_MAX)]
    half = learn(*facts[:400])
    restored = Learned(msgspec.msgpack.decode(msgspec.msgpack.encode(half.state()), type=list[LearnedLoad]))
    for fact in facts[400:]:
        restored.apply(fact)
    assert restored.state() == learn(*facts).state()


def test_one_hosts_part_is_what_folding_that_host_alone_gives() -> None:
    facts = [loaded(1000 + index, model=f"m{index}", host="ab"[index % 2]) for index in range(2 * MODELS_MAX + 8)]
    assert learn(*facts).state("a") == learn(*(fact for fact in facts if fact.host == "a")).state()
    assert Learned(learn(*facts).state("a")).state() == learn(*facts).state("a")
