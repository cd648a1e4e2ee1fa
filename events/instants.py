"""Moments as text: RFC 3339 in UTC with a ``Z``, always with microseconds, so that text order is time order."""

from __future__ import annotations

from datetime import UTC, datetime


def utc_text(at: datetime) -> str:
    """``at`` as ``2025-01-31T12:00:00.000000Z``. A moment without a time zone is an error, never a guess.

    Raises:
        ValueError: ``at`` has no time zone.
    """
    if at.tzinfo is None:
        raise ValueError(f"{at.isoformat()} has no time zone")
    return at.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def parse_utc(text: str) -> datetime:
    """The moment that an RFC 3339 ``text`` names.

    Raises:
        ValueError: it is not RFC 3339, or names no time zone.
    """
    at = datetime.fromisoformat(text)
    if at.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    return at
