"""A clock that tests move."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


class Moments:
    """A clock that stands still until it is moved. Call it for the time."""

    def __init__(self) -> None:
        self.at = datetime(2025, 6, 1, 12, 0, 0, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.at

    def pass_s(self, seconds: float) -> datetime:
        """Move on and return the new time."""
        self.at += timedelta(seconds=seconds)
        return self.at
