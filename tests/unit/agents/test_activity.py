"""Whether a runtime works, told from outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.agents.runtimes.activity import infer_activity
from gpukeeper.events.readings import Activity, DeviceReading, ResidentModel, RuntimeReading

SOON = "2026-11-29T12:05:00Z"
LATER = "2026-11-29T12:06:00Z"


def row(model: str = "m", expires_at: str | None = SOON, **fields: Any) -> ResidentModel:
    return ResidentModel(model=model, expires_at=expires_at, **fields)


def look(*rows: ResidentModel, **fields: Any) -> RuntimeReading:
    given: dict[str, Any] = {"healthy": True, "resident": rows} | fields
    return RuntimeReading(runtime="o", read_at="2026-11-29T12:00:00Z", **given)


def card(utilization: int | None = 0, **fields: Any) -> DeviceReading:
    return DeviceReading(
        device="g0", source="nvml", read_at="2026-11-29T12:00:00Z", utilization_percent=utilization, **fields
    )


def told(
    reading: RuntimeReading,
    previous: RuntimeReading | None,
    devices: Sequence[DeviceReading] = (card(),),
    *,
    own_jobs: int = 0,
    sole_client: bool = False,
) -> Activity:
    return infer_activity(
        reading, own_jobs=own_jobs, sole_client=sole_client, device_readings=devices, previous=previous
    )


def test_a_job_of_ours_is_work_whatever_anybody_says() -> None:
    assert told(look(row(), activity="idle"), look(row()), own_jobs=1, sole_client=True) == "busy"
    assert told(look(healthy=False, resident=None), None, own_jobs=1) == "busy"


@pytest.mark.parametrize("word", ["busy", "idle"])
def test_a_runtimes_own_word_goes_before_what_is_inferred(word: Activity) -> None:
    assert told(look(row(), activity=word), None, [card(99)]) == word
    assert told(look(row(), activity=word), None, [card(0)], sole_client=True) == word


def test_its_only_client_without_a_job_knows_that_it_is_idle() -> None:
    assert told(look(row()), None, (), sole_client=True) == "idle"
    assert told(look(row(expires_at=LATER)), look(row()), [card(99)], sole_client=True) == "idle"


@pytest.mark.parametrize("sole_client", [False, True])
def test_c14_a_runtime_that_does_not_answer_is_not_idle(sole_client: bool) -> None:
    assert told(look(healthy=False, resident=None), look(), sole_client=sole_client) == "unknown"
    assert told(look(resident=None), look(), sole_client=sole_client) == "unknown"


@pytest.mark.parametrize("sole_client", [False, True])
def test_a_runtime_that_loads_is_busy(sole_client: bool) -> None:
    assert told(look(row(loading=True)), look(row(loading=True)), sole_client=sole_client) == "busy"


@pytest.mark.parametrize("rows", [(), (row(),), (row("a"), row("b", LATER)), (row("p", pinned=True),)])
def test_idle_devices_and_stays_that_do_not_move_are_idle(rows: tuple[ResidentModel, ...]) -> None:
    assert told(look(*rows), look(*reversed(rows))) == "idle"


@pytest.mark.parametrize(
    "devices",
    [
        (),
        [card(1)],
        [card(None)],
        [card(), card(7)],
        [card(), card(None)],
        [card(state="unknown")],
        [card(state="lost")],
    ],
)
def test_a_device_that_works_or_does_not_tell_leaves_it_unknown(devices: Sequence[DeviceReading]) -> None:
    assert told(look(row()), look(row()), devices) == "unknown"


def test_the_first_look_has_nothing_to_compare_with() -> None:
    assert told(look(row()), None) == "unknown"
    assert told(look(row()), look(healthy=False, resident=None)) == "unknown"


@pytest.mark.parametrize("now", [row(expires_at=LATER), row(expires_at=None), row("other")])
def test_a_stay_that_moved_leaves_it_unknown(now: ResidentModel) -> None:
    assert told(look(now), look(row())) == "unknown"


def test_a_model_that_came_leaves_it_unknown() -> None:
    assert told(look(row(), row("new")), look(row())) == "unknown"


def test_a_model_past_its_end_may_still_work() -> None:
    assert told(look(row(stopping=True)), look(row(stopping=True))) == "unknown"


@pytest.mark.parametrize("sole_client", [False, True])
def test_c13_a_model_that_is_held_once_where_it_was_held_twice_is_disputed(sole_client: bool) -> None:
    assert told(look(row("a")), look(row("a"), row("a")), sole_client=sole_client) == "unknown"


@pytest.mark.parametrize("sole_client", [False, True])
@pytest.mark.parametrize("now", [(), (row("b"),), (row("a"), row("c"))])
def test_c13_a_row_that_is_missing_is_disputed_and_not_idle(now: tuple[ResidentModel, ...], sole_client: bool) -> None:
    assert told(look(*now), look(row("a"), row("b")), sole_client=sole_client) == "unknown"


def test_c13_a_row_missing_from_two_polls_while_its_request_runs_is_never_idle() -> None:
    """The request is somebody else's: the card shows it."""
    polls = [look(row()), look(), look(), look(row())]

    words = [told(now, before, [card(80)]) for before, now in zip([None, *polls], polls, strict=False)]

    assert words == ["unknown"] * 4


ROWS = st.lists(st.builds(row, st.sampled_from("abc"), st.sampled_from([None, SOON, LATER])), max_size=3)


def look_at(rows: list[ResidentModel]) -> RuntimeReading:
    return look(*rows)


LOOKS = st.builds(look_at, ROWS) | st.just(look(healthy=False, resident=None))
CARDS = st.lists(st.builds(card, st.sampled_from([None, 0, 1, 100])), max_size=3)


@given(LOOKS, st.none() | LOOKS, CARDS)
def test_without_our_jobs_or_its_word_idle_needs_every_sign_of_it(
    reading: RuntimeReading, previous: RuntimeReading | None, devices: list[DeviceReading]
) -> None:
    if told(reading, previous, devices) == "idle":
        assert devices
        assert all(one.utilization_percent == 0 for one in devices)
        assert previous is not None
        assert {(one.model, one.expires_at) for one in previous.resident or ()} >= {
            (one.model, one.expires_at) for one in reading.resident or ()
        }
