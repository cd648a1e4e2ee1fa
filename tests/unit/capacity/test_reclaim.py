"""Who may be asked to let go, who is, and why the others stay."""

from __future__ import annotations

from typing import Any

import pytest

from gpukeeper.capacity.reclaim import EXACT_MAX, Owner, hurdles, plan, unmanaged_mb
from gpukeeper.events.readings import DeviceReading
from gpukeeper.events.reasons import Reason


def owner(name: str = "comfyui", held_mb: int | None = 8000, **changes: Any) -> Owner:
    """One that may go, unless ``changes`` say otherwise."""
    settings: dict[str, Any] = {
        "runtime": name,
        "held_mb": held_mb,
        "on_device": True,
        "activity": "idle",
        "idle_s": 400.0,
        "grace_s": 300.0,
        "releases": "all",
    }
    return Owner(**(settings | changes))


def names(chosen: tuple[Owner, ...]) -> list[str]:
    return [each.label for each in chosen]


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        ({"on_device": False}, Reason.OTHER_DEVICE, "does not sit on this device"),
        ({"on_device": None}, Reason.OTHER_DEVICE, "whether it sits"),
        ({"held_mb": None}, Reason.OTHER_DEVICE, "how much"),
        ({"held_mb": 0}, Reason.OTHER_DEVICE, "nothing"),
        ({"held_mb": -5}, Reason.OTHER_DEVICE, "nothing"),
        ({"releases": "none"}, Reason.NOT_RELEASABLE, "no safe way"),
        ({"releases": "model"}, Reason.NOT_RELEASABLE, "models only"),
        ({"model": "m"}, Reason.NOT_RELEASABLE, "everything at once"),
        ({"stopping": True}, Reason.NOT_RELEASABLE, "on its way out"),
        ({"pinned": True}, Reason.PINNED, "pinned"),
        ({"jobs_here": 1}, Reason.OWNER_BUSY, "1 job"),
        ({"loading": True}, Reason.OWNER_BUSY, "loading"),
        ({"activity": "busy"}, Reason.OWNER_BUSY, "busy"),
        ({"activity": "unknown"}, Reason.ACTIVITY_UNKNOWN, "whether it works"),
        ({"idle_s": None}, Reason.ACTIVITY_UNKNOWN, "since when"),
        ({"idle_s": 120.0}, Reason.IN_GRACE, "idle 120 s of 300 s"),
        ({"idle_s": 299.99}, Reason.IN_GRACE, "idle 299 s of 300 s"),
        ({"idle_s": float("nan")}, Reason.IN_GRACE, "idle"),
    ],
)
def test_an_owner_stays_for_its_reason(changes: dict[str, Any], reason: Reason, words: str) -> None:
    found = plan(1000, [owner(**changes)])
    assert not found.chosen
    assert not found.enough
    assert found.considered[0].kept == reason
    assert words in found.considered[0].detail


def test_the_first_rule_that_fails_names_the_reason_and_all_of_them_are_kept() -> None:
    everything = owner(
        on_device=False, releases="none", pinned=True, jobs_here=2, loading=True, activity="unknown", idle_s=1.0
    )
    assert [each.reason for each in hurdles(everything)] == [
        Reason.OTHER_DEVICE,
        Reason.NOT_RELEASABLE,
        Reason.PINNED,
        Reason.OWNER_BUSY,
    ]
    assert [each.reason for each in hurdles(owner(pinned=True, idle_s=1.0))] == [Reason.PINNED, Reason.IN_GRACE]


def test_an_owner_that_nothing_speaks_against_may_go() -> None:
    assert hurdles(owner(idle_s=300.0)) == ()
    assert hurdles(owner(releases="model", model="m")) == ()


@pytest.mark.parametrize(
    ("shortfall_mb", "chosen"),
    [
        (1, ["small"]),
        (2000, ["small"]),
        (2001, ["middle"]),
        (5001, ["middle", "small"]),
        (7001, ["large"]),
        (12_001, ["large", "middle"]),
        (17_000, ["large", "middle", "small"]),
    ],
)
def test_the_least_that_fits_is_released(shortfall_mb: int, chosen: list[str]) -> None:
    owners = [owner("large", 10_000), owner("small", 2000), owner("middle", 5000)]
    found = plan(shortfall_mb, owners)
    assert found.enough
    assert names(found.chosen) == chosen
    assert found.would_free_mb == sum(each.held_mb or 0 for each in found.chosen)
    kept = {each.runtime: each.kept for each in found.considered}
    assert list(kept) == ["large", "small", "middle"], "as they were given"
    assert {name for name, reason in kept.items() if reason is None} == set(chosen)
    assert {reason for reason in kept.values() if reason is not None} <= {Reason.NOT_NEEDED}


def test_of_equal_totals_the_fewest_releases_are_chosen() -> None:
    owners = [owner("a", 1000), owner("b", 2000), owner("c", 3000), owner("d", 1000)]
    assert names(plan(3000, owners).chosen) == ["c"]
    assert names(plan(5000, owners).chosen) == ["c", "b"]


def test_of_equal_choices_the_longest_idle_goes_whatever_the_order() -> None:
    owners = [owner("a", 1000), owner("b", 1000, idle_s=900.0), owner("c", 1000)]
    assert names(plan(1000, owners).chosen) == ["b"]
    assert names(plan(1000, owners[::-1]).chosen) == ["b"]
    assert names(plan(2000, owners[::-1]).chosen) == ["b", "a"]


def test_nothing_is_thrown_out_for_nothing() -> None:
    owners = [owner("a", 4000), owner("b", 5000), owner("c", 9000, pinned=True)]
    found = plan(9001, owners)
    assert found.chosen == ()
    assert not found.enough
    assert (found.would_free_mb, found.could_free_mb) == (0, 9000)
    assert [each.kept for each in found.considered] == [Reason.INSUFFICIENT, Reason.INSUFFICIENT, Reason.PINNED]


@pytest.mark.parametrize("shortfall_mb", [0, -500])
def test_without_a_shortfall_nobody_goes(shortfall_mb: int) -> None:
    found = plan(shortfall_mb, [owner("a"), owner("b", pinned=True)])
    assert found.enough
    assert found.chosen == ()
    assert [each.kept for each in found.considered] == [Reason.NOT_NEEDED, Reason.PINNED]


def test_who_names_no_amount_gets_all_that_may_go() -> None:
    found = plan(None, [owner("a", 1000), owner("b", 3000), owner("c", pinned=True)])
    assert names(found.chosen) == ["b", "a"]
    assert found.would_free_mb == 4000


def test_the_same_owner_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match="twice"):
        plan(1, [owner("a"), owner("a")])


def test_more_owners_than_can_be_searched_still_give_a_sufficient_choice_without_waste() -> None:
    owners = [owner(f"r{index:02}", 100 + index) for index in range(3 * EXACT_MAX)]
    for shortfall_mb in (5000, sum(each.held_mb or 0 for each in owners)):
        found = plan(shortfall_mb, owners)
        assert found.enough
        assert found.would_free_mb >= shortfall_mb
        smallest = min(each.held_mb or 0 for each in found.chosen)
        assert found.would_free_mb - smallest < shortfall_mb, "nobody goes without need"


def test_c22_an_unmanaged_program_is_counted_and_not_an_owner() -> None:
    """Of a 12 GB card 7.2 GB are held by a program that nobody registered (ollama#8430)."""
    reading = DeviceReading(
        device="GPU-1",
        source="nvml",
        read_at="2025-06-01T12:00:00.000000Z",
        total_mb=12_288,
        used_mb=8400,
        free_mb=3888,
    )
    ours = owner("ollama", 1000)
    assert unmanaged_mb(reading, [ours, owner("elsewhere", 5000, on_device=False)]) == 7400
    found = plan(4400 - 3888, [ours])
    assert names(found.chosen) == ["ollama"]
    assert not plan(8000 - 3888, [ours]).enough


def test_c37_one_release_by_memory_not_by_count() -> None:
    """4 x 48 GB with about 100 GB resident, 29 GB asked (llama.cpp#25326): exactly one goes, the least that fits."""
    owners = [
        owner("router", held_mb, releases="model", model=model)
        for model, held_mb in (("big", 46_000), ("half", 30_000), ("other", 24_000))
    ]
    found = plan(29_000 - 2000, owners)
    assert [each.model for each in found.chosen] == ["half"]
    in_grace = [*owners[:1], owner("router", 30_000, releases="model", model="half", idle_s=299.0), owners[2]]
    assert [each.model for each in plan(27_000, in_grace).chosen] == ["big"]


def test_c58_where_everything_is_pinned_nobody_goes() -> None:
    found = plan(1000, [owner("a", pinned=True), owner("b", pinned=True)])
    assert not found.enough
    assert {each.kept for each in found.considered} == {Reason.PINNED}


@pytest.mark.parametrize(
    ("used_mb", "owners", "expected"),
    [
        (None, [], None),
        (5000, [], 5000),
        (5000, [owner("a", 2000), owner("b", 1000)], 2000),
        (5000, [owner("a", 9000)], 0),
        (5000, [owner("a", None)], None),
        (5000, [owner("a", 2000, on_device=None)], None),
        (5000, [owner("a", None, on_device=False)], 5000),
    ],
)
def test_what_nobody_registered_holds(used_mb: int | None, owners: list[Owner], expected: int | None) -> None:
    reading = DeviceReading(device="GPU-1", source="nvml", read_at="2025-06-01T12:00:00.000000Z", used_mb=used_mb)
    assert unmanaged_mb(reading, owners) == expected
