from __future__ import annotations

import pytest

from gpukeeper.agents.memory.settling import STILL_AS_PROMISED_S, STILL_S, Settling


def settling(*, promised_mb: int = 4000, wanted_mb: int | None = None) -> Settling:
    return Settling(before_mb=1000, promised_mb=promised_mb, wanted_mb=wanted_mb)


def test_what_is_wanted_is_enough_at_once() -> None:
    watched = settling(wanted_mb=3000)

    assert watched.saw(2999, 1.0) == "moving"
    assert watched.saw(3000, 1.1) == "enough"
    assert (watched.free_mb, watched.measured_mb) == (3000, 2000)


def test_c26_a_reading_is_waited_for_until_it_no_longer_moves() -> None:
    watched = settling()

    assert watched.saw(3500, 1.0) == "moving"
    assert watched.saw(3600, 4.0) == "moving"
    assert watched.saw(3600, 4.0 + STILL_S - 0.1) == "moving"
    assert watched.saw(3600, 4.0 + STILL_S) == "settled"


def test_what_was_promised_is_waited_for_only_for_a_moment() -> None:
    watched = settling()

    assert watched.saw(5000, 1.0) == "moving"
    assert watched.saw(5000, 1.0 + STILL_AS_PROMISED_S) == "settled"


@pytest.mark.parametrize("free_mb", [1000, 900, 1100, 2999])
def test_c57_as_long_as_less_than_half_has_come_the_owner_may_still_let_go(free_mb: int) -> None:
    watched = settling()

    assert watched.saw(free_mb, 1.0) == "moving"
    assert watched.saw(free_mb, 1000.0) == "moving"
    assert not watched.yielded


def test_half_of_what_was_promised_is_a_yield() -> None:
    watched = settling()
    watched.saw(3000, 1.0)

    assert watched.yielded
    assert watched.saw(3000, 1.0 + STILL_S) == "settled"


def test_where_nothing_was_promised_anything_that_comes_is_a_yield_and_nothing_is_none() -> None:
    watched = settling(promised_mb=0)
    assert not watched.yielded
    watched.saw(1001, 1.0)

    assert watched.yielded


def test_a_reading_without_figures_tells_nothing() -> None:
    watched = settling(wanted_mb=1500)

    assert watched.saw(None, 1.0) == "moving"
    assert watched.free_mb == 1000
