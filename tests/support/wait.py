"""Bounded looking for what another process does: it gives no signal that a test could await."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

#: Far more than any step takes: it only matters for a test that fails.
WITHIN_S = 30.0
_PAUSE_S = 0.02


def until_found(look: Callable[[], T | None], what: str, *, within_s: float = WITHIN_S) -> T:
    """Call ``look`` until it finds something true, and return that.

    Raises:
        AssertionError: it did not within ``within_s`` seconds; names ``what`` was looked for.
    """
    give_up_at = time.monotonic() + within_s
    while not (found := look()):
        if time.monotonic() > give_up_at:
            raise AssertionError(f"not within {within_s:g} s: {what}")
        time.sleep(_PAUSE_S)
    return found


async def until_answered(ask: Callable[[], Awaitable[T | None]], what: str, *, within_s: float = WITHIN_S) -> T:
    """Like :func:`until_found`, for a question that is awaited."""
    give_up_at = time.monotonic() + within_s
    while not (found := await ask()):
        if time.monotonic() > give_up_at:
            raise AssertionError(f"not within {within_s:g} s: {what}")
        await asyncio.sleep(_PAUSE_S)
    return found
