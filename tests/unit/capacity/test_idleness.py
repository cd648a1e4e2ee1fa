"""Only an unbroken run of idle looks counts."""

from __future__ import annotations

from datetime import timedelta

import pytest

from gpukeeper.capacity.idleness import Idleness
from gpukeeper.events.instants import utc_text
from gpukeeper.events.readings import Activity, RuntimeReading
from support.moments import Moments


@pytest.fixture
def clock() -> Moments:
    return Moments()


def idle_for(clock: Moments, seconds: int, start: Idleness | None = None) -> Idleness:
    """Looks every five seconds, the first one now."""
    found = (start or Idleness()).looked(clock(), "idle", 0)
    for _ in range(seconds // 5):
        found = found.looked(clock.pass_s(5), "idle", 0)
    return found


def test_nothing_is_known_before_the_first_look(clock: Moments) -> None:
    assert Idleness().idle_s(clock()) is None


def test_one_look_proves_no_time(clock: Moments) -> None:
    assert Idleness().looked(clock(), "idle", 0).idle_s(clock()) == 0


def test_an_unbroken_run_counts_from_its_first_look_to_its_last(clock: Moments) -> None:
    found = idle_for(clock, 300)
    assert found.idle_s(clock()) == 300
    assert found.idle_s(clock.pass_s(4)) == 300, "what nobody looked at is not proven"


@pytest.mark.parametrize("activity", ["busy", "unknown"])
def test_a_look_that_is_not_idle_restarts_it(clock: Moments, activity: Activity) -> None:
    found = idle_for(clock, 300).looked(clock.pass_s(5), activity, 0)
    assert found.idle_s(clock()) is None
    clock.pass_s(5)
    assert idle_for(clock, 10, found).idle_s(clock()) == 10


def test_a_job_of_ours_restarts_it_whatever_the_runtime_says(clock: Moments) -> None:
    found = idle_for(clock, 300).looked(clock.pass_s(5), "idle", 1)
    assert found.idle_s(clock()) is None


@pytest.mark.parametrize(("pause_s", "proven_s"), [(15.0, 315.0), (15.1, 0.0)])
def test_a_pause_without_looks_restarts_it(clock: Moments, pause_s: float, proven_s: float) -> None:
    found = idle_for(clock, 300).looked(clock.pass_s(pause_s), "idle", 0)
    assert found.idle_s(clock()) == proven_s


def test_a_clock_that_goes_back_restarts_it(clock: Moments) -> None:
    found = idle_for(clock, 300)
    back = clock() - timedelta(seconds=1)
    assert found.idle_s(back) is None
    assert found.looked(back, "idle", 0).idle_s(back) == 0


def test_evidence_that_is_too_old_is_none(clock: Moments) -> None:
    found = idle_for(clock, 300)
    assert found.idle_s(clock.pass_s(15)) == 300
    assert found.idle_s(clock.pass_s(0.5)) is None


def test_the_runtimes_own_word_can_only_shorten_it(clock: Moments) -> None:
    begin = clock()
    found = idle_for(clock, 300)
    now = clock.pass_s(5)
    assert found.looked(now, "idle", 0, idle_since=begin - timedelta(hours=1)).idle_s(now) == 305
    assert found.looked(now, "idle", 0, idle_since=begin + timedelta(seconds=295)).idle_s(now) == 10
    assert found.looked(now, "idle", 0, idle_since=now + timedelta(hours=1)).idle_s(now) == 0


def test_a_reading_of_an_unhealthy_runtime_is_no_evidence(clock: Moments) -> None:
    found = idle_for(clock, 300)
    reading = RuntimeReading(runtime="r", read_at=utc_text(clock.pass_s(5)), healthy=False, activity="idle")
    assert found.read(reading, 0).idle_s(clock()) is None


def test_a_reading_counts_as_a_look_at_its_own_time(clock: Moments) -> None:
    found = idle_for(clock, 300)
    reading = RuntimeReading(runtime="r", read_at=utc_text(clock.pass_s(5)), healthy=True, activity="idle")
    assert found.read(reading, 0).idle_s(clock.pass_s(2)) == 305
