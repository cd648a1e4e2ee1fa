"""Looking at a runtime: a few bounded requests, each of which may fail without hiding the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from datetime import UTC, datetime
from typing import TypeVar

from gpukeeper.agents.runtimes.port import RuntimeFailure
from gpukeeper.events.readings import ResidentModel
from gpukeeper.events.reasons import Reason

T = TypeVar("T")

#: How long one look may take in all; its requests run side by side.
LOOK_TIMEOUT_S = 3.0


#: More models than any machine holds, and longer names than any registry gives: such a list is not believed.
HELD_MAX = 256
NAME_CHARS_MAX = 512


def believable(rows: Sequence[ResidentModel], path: str) -> tuple[ResidentModel, ...]:
    """The rows of a residency, which go into events.

    Raises:
        RuntimeFailure: there are too many of them, or a name is too long. What is held is unknown then.
    """
    if len(rows) > HELD_MAX:
        raise RuntimeFailure(Reason.RUNTIME_BAD_REPLY, f"{path}: {len(rows)} models at once, at most {HELD_MAX}")
    if any(len(row.model) > NAME_CHARS_MAX for row in rows):
        raise RuntimeFailure(Reason.RUNTIME_BAD_REPLY, f"{path}: a name of more than {NAME_CHARS_MAX} characters")
    return tuple(rows)


async def attempt(request: Awaitable[T], path: str, limit_s: float) -> T | RuntimeFailure:
    """The answer, or the failure as a value; RUNTIME_UNREACHABLE when nothing came in time."""
    try:
        async with asyncio.timeout(limit_s):
            return await request
    except RuntimeFailure as failure:
        return failure
    except TimeoutError:
        return RuntimeFailure(Reason.RUNTIME_UNREACHABLE, f"{path}: no answer within {limit_s:g} s")


def utc_now() -> str:
    """The time of a reading, as RFC 3339 in UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
