from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.capacity.provision import MB, Layers, may_fetch, too_full
from gpukeeper.events.modelnames import matches
from gpukeeper.events.reasons import Reason


@pytest.mark.parametrize(
    ("patterns", "model", "may"),
    [
        ((), "qwen3", False),
        (("qwen3",), "qwen3", True),
        (("qwen3",), "qwen3:latest", True),
        (("qwen3:latest",), "qwen3", True),
        (("qwen3:*",), "qwen3", True),
        (("qwen3:*",), "qwen3:8b", True),
        (("qwen3:8b",), "qwen3", False),
        (("qwen3",), "qwen3:8b", False),
        (("qwen?",), "Qwen3", False),
        (("a", "hf.co/*/*"), "hf.co/ggml-org/m-GGUF:Q4_K_M", True),
        (("hf.co/*",), "registry.local/m", False),
        (("*",), "anything/at:all", True),
    ],
)
def test_a_model_may_be_fetched_when_one_of_its_names_matches(patterns: tuple[str, ...], model: str, may: bool) -> None:
    assert matches(patterns, model) is may


def test_what_is_on_no_list_is_missing_and_says_what_may_be_fetched() -> None:
    refusal = may_fetch("m", runtime="o", allowed=("qwen3:*",), free_mb=10**9, leaves_mb=0)
    nothing = may_fetch("m", runtime="o", allowed=(), free_mb=10**9, leaves_mb=0)

    assert refusal is not None
    assert (refusal.reason, refusal.detail) == (Reason.MODEL_MISSING, "o lacks m, and it may fetch qwen3:*")
    assert nothing is not None
    assert "`pull`" in nothing.detail


@pytest.mark.parametrize(("free_mb", "may"), [(1000, True), (999, False), (0, False), (None, False)])
def test_a_fetch_begins_only_where_the_disk_is_known_to_have_room(free_mb: int | None, may: bool) -> None:
    refusal = may_fetch("m", runtime="o", allowed=("m",), free_mb=free_mb, leaves_mb=1000)

    assert (refusal is None) is may
    if refusal is not None:
        assert refusal.reason is Reason.PROVISION_FAILED


@pytest.mark.parametrize(("missing_bytes", "full"), [(0, False), (500 * MB, False), (500 * MB + 1, True)])
def test_what_is_still_to_come_counts_as_used(missing_bytes: int, full: bool) -> None:
    words = too_full(free_mb=1500, missing_bytes=missing_bytes, leaves_mb=1000)

    assert (words is not None) is full
    if words is not None:
        assert "501 MB more" in words


def test_the_parts_of_a_fetch_add_up_and_repeats_count_once() -> None:
    layers = Layers()

    grown = [
        layers.take("pulling manifest", None, None),
        layers.take("pulling a", None, 100),
        layers.take("pulling a", 40, 100),
        layers.take("pulling b", 10, 50),
        layers.take("pulling a", 30, 100),
        layers.take("pulling a", 100, 120),
    ]

    assert grown == [False, True, False, True, False, True]
    assert (layers.completed_bytes, layers.total_bytes, layers.missing_bytes) == (110, 170, 60)


def test_a_fetch_that_has_told_of_no_part_has_unknown_figures() -> None:
    layers = Layers()
    layers.take("pulling manifest", 7, None)

    assert (layers.completed_bytes, layers.total_bytes, layers.missing_bytes) == (None, None, 0)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.none() | st.integers(1, 99), st.none() | st.integers(1, 99))))
def test_no_telling_makes_more_come_than_there_is(told: list[tuple[str, int | None, int | None]]) -> None:
    layers = Layers()
    for status, completed, total in told:
        layers.take(status, completed, total)

    assert layers.missing_bytes == (layers.total_bytes or 0) - (layers.completed_bytes or 0)
    assert layers.missing_bytes >= 0
