"""Waiting for what another process does, with a bound.

A process of its own sends no signal that a test could await, so its visible effects (a file, an end, a line in a
log) are looked for again and again. The bound is generous, as it only matters when the test fails.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

WITHIN_S = 20.0
_LOOK_AGAIN_S = 0.02

T = TypeVar("T")


async def until(look: Callable[[], T | None], what: str, *, within_s: float = WITHIN_S) -> T:
    """Call ``look`` until it returns something true, and return that.

    Raises:
        AssertionError: it did not within ``within_s`` seconds; the message says ``what`` was waited for.
    """
    deadline = time.monotonic() + within_s
    while not (found := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s:g} s: {what}")
        await asyncio.sleep(_LOOK_AGAIN_S)
    return found


def is_running(pid: int) -> bool:
    """Whether the process lives. One that has ended and was not yet waited for does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
