"""Durations, ages and sizes as people read them."""

from __future__ import annotations

import pytest

from gpukeeper.cli import quantities


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "?"),
        (-3, "0.00 s"),
        (0.4213, "0.42 s"),
        (12.34, "12.3 s"),
        (185, "3 min 05 s"),
        (7620, "2 h 07 min"),
        (356_400, "4 d 03 h"),
    ],
)
def test_durations(seconds: float | None, words: str) -> None:
    assert quantities.duration(seconds) == words


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.5, "0.5 s"), (60, "1 min"), (90, "90 s"), (86_400, "24 h"), (259_200, "3 d")]
)
def test_limits(seconds: float, words: str) -> None:
    assert quantities.limit(seconds) == words


def test_sizes_and_memory() -> None:
    assert [quantities.size(count) for count in (0, 65_536, 2_097_152)] == ["0 bytes", "64.0 KiB", "2.0 MiB"]
    assert [quantities.megabytes(count) for count in (None, 812, 24_576)] == ["?", "812 MB", "24.0 GB"]


def test_moments_are_utc_with_milliseconds() -> None:
    assert quantities.moment(1_760_883_302_123_456_789) == "2025-10-19T14:15:02.123Z"
