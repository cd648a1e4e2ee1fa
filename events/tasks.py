"""Ending tasks for sure."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

_AGAIN_S = 1.0


async def end_all(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel ``tasks`` and wait until all have ended; what they came to is the caller's to look at.

    A cancel is repeated where it had no effect: before Python 3.12 ``asyncio.wait_for``, which the NATS client uses for
    every request, loses one that arrives together with the result, and the task would go on for ever.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_S)
