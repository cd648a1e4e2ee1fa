"""Moments as text."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from gpukeeper.events.instants import parse_utc, utc_text


def test_a_moment_is_written_in_utc_with_a_z_and_microseconds() -> None:
    at = datetime(2025, 6, 1, 14, 0, tzinfo=timezone(timedelta(hours=2)))

    assert utc_text(at) == "2025-06-01T12:00:00.000000Z"
    assert parse_utc(utc_text(at)) == at


def test_text_order_is_time_order() -> None:
    first = datetime(2025, 6, 1, 12, 0, 0, 0, tzinfo=UTC)
    moments = [first + timedelta(microseconds=each) for each in (0, 1, 999_999, 1_000_000)]

    assert sorted(map(utc_text, moments)) == [utc_text(each) for each in moments]


def test_a_moment_without_a_time_zone_is_an_error_and_never_a_guess() -> None:
    with pytest.raises(ValueError, match="time zone"):
        utc_text(datetime(2025, 6, 1, tzinfo=UTC).replace(tzinfo=None))
    with pytest.raises(ValueError, match="time zone"):
        parse_utc("2025-06-01T12:00:00")
