"""What proves that a request has ended, and what does not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gpukeeper.agents.runtimes.port import Signs
from gpukeeper.agents.stopping import GONE_LOOKS, NOT_LOADED, StopProof

BUSY, IDLE, GONE, UNREAD = Signs(activity="busy"), Signs(activity="idle"), Signs(resident=False), Signs()


def held(last_end: str | None) -> Signs:
    return Signs(resident=True, last_end=last_end)


def proven_at(during: Signs | None, looks: Sequence[Signs]) -> int | None:
    """The number of the look that proves it, the first being 1."""
    proof = StopProof(during)
    return next((number for number, signs in enumerate(looks, 1) if proof.shown_by(signs)), None)


@pytest.mark.parametrize(
    ("during", "looks", "expected"),
    [
        (None, [BUSY, BUSY, IDLE], 3),
        (None, [UNREAD] * 20, None),
        (held("1"), [held("1")] * 20, None),
        (held("1"), [held("1"), held("2"), held("2")], 3),
        (held("1"), [held("2"), UNREAD, held("2"), held("2")], 4),
        (None, [held("1"), held("2"), held("2")], None),
        (held(None), [held("2"), held("2")], None),
        (held("1"), [held(None)] * 20, None),
        (NOT_LOADED, [held("1"), held("1")], 2),
        (held("1"), [GONE] * GONE_LOOKS, GONE_LOOKS),
    ],
)
def test_what_proves_that_a_request_has_ended(during: Signs | None, looks: Sequence[Signs], expected: int) -> None:
    assert proven_at(during, looks) == expected


def test_c13_a_model_that_is_left_out_of_two_looks_is_not_gone() -> None:
    """C13: a busy model was seen to be missing from two polls in a row."""
    assert proven_at(held("1"), [GONE, GONE, held("1"), GONE, GONE, held("1"), GONE, UNREAD, GONE, GONE]) is None


def test_a_mark_that_moves_with_every_look_proves_nothing() -> None:
    """Ollama makes one up while a model is loading."""
    looks = [held(str(number)) for number in range(2, 40)]

    assert proven_at(held("1"), looks) is None
    assert proven_at(NOT_LOADED, looks) is None
