"""When a device has shown what a release gave back."""

from __future__ import annotations

import pytest

from gpukeeper.agents.memory.settling import STILL_AS_PROMISED_S, STILL_S, Settling


def settling(*, wanted_mb: int | None = None) -> Settling:
    """1,000 MB were free, 10,000 were promised."""
    return Settling(before_mb=1_000, promised_mb=10_000, wanted_mb=wanted_mb)


def test_what_is_enough_for_who_asked_ends_the_waiting_at_once() -> None:
    watched = settling(wanted_mb=5_000)
    assert watched.saw(4_999, 0.0) == "moving"
    assert watched.saw(5_000, 0.1) == "enough"
    assert watched.measured_mb == 4_000


def test_a_device_that_shows_nothing_is_waited_for_without_an_end_of_its_own() -> None:
    watched = settling()
    for second in range(600):
        assert watched.saw(1_000, float(second)) == "moving"
    assert watched.saw(900, 600.0) == "moving"
    assert not watched.yielded


def test_c26_a_reading_that_still_rises_is_no_end() -> None:
    watched = settling()
    for step in range(20):
        assert watched.saw(1_000 + 100 * step, 4.0 * step) == "moving"


@pytest.mark.parametrize(("free_mb", "still_s"), [(11_000, STILL_AS_PROMISED_S), (10_999, STILL_S), (6_000, STILL_S)])
def test_it_has_settled_when_it_stayed_for_long_enough_and_sooner_where_all_is_there(
    free_mb: int, still_s: float
) -> None:
    watched = settling()
    assert watched.saw(free_mb, 10.0) == "moving"
    assert watched.saw(free_mb, 10.0 + still_s - 0.01) == "moving"
    assert watched.saw(free_mb, 10.0 + still_s) == "settled"


@pytest.mark.parametrize("free_mb", [1_001, 5_999])
def test_c57_as_long_as_less_than_half_has_come_the_owner_may_still_let_go(free_mb: int) -> None:
    watched = settling()
    watched.saw(free_mb, 0.0)

    assert watched.saw(free_mb, 600.0) == "moving"


def test_a_reading_without_figures_proves_nothing_and_is_no_change() -> None:
    watched = settling()
    assert watched.saw(None, 0.0) == "moving"
    assert watched.saw(11_000, 1.0) == "moving"
    assert watched.saw(None, 100.0) == "moving"
    assert watched.free_mb == 11_000
    assert watched.saw(11_000, 101.0) == "settled"


@pytest.mark.parametrize(("free_mb", "yielded"), [(5_999, False), (6_000, True), (500, False)])
def test_less_than_half_of_the_promise_is_no_yield(free_mb: int, yielded: bool) -> None:
    watched = settling()
    watched.saw(free_mb, 0.0)

    assert watched.yielded is yielded


def test_of_an_owner_that_promised_nothing_any_rise_is_a_yield_and_none_is_not() -> None:
    watched = Settling(before_mb=1_000, promised_mb=0, wanted_mb=None)
    assert not watched.yielded
    watched.saw(1_001, 0.0)
    assert watched.yielded
