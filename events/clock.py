"""Ids and times, made in the shell only: decisions and folds are given them."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from ulid import ULID


def new_id() -> str:
    """A fresh ULID: unique, and sorting by time."""
    return str(ULID())


def now() -> datetime:
    """The time by this machine's clock."""
    return datetime.now(UTC)


def rfc3339(moment: datetime) -> str:
    """``moment`` as text: UTC, microseconds, ``Z``."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def now_rfc3339() -> str:
    return rfc3339(now())


def now_ns() -> int:
    return time.time_ns()


def from_ns(stored_ns: int) -> datetime:
    """The server's timestamp as a time."""
    return datetime.fromtimestamp(stored_ns / 1e9, UTC)
