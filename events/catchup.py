"""Waiting for a reader to catch up: as long as it gets on, for as long as it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from gpukeeper.events.errors import LogUnavailable, WaitTimedOut
from gpukeeper.events.log import Follower

T = TypeVar("T")

#: A reader that is handed nothing for this long, though there is more to come, is not going to get there.
SILENT_S = 60.0
_LOOKS = 6


async def catch_up(follower: Follower, seq: int, *, silent_s: float = SILENT_S) -> None:
    """Wait until ``seq``, of a followed subject, was handed on.

    Raises:
        LogUnavailable: nothing was handed on for ``silent_s``.
        Exception: whatever broke the follower, as soon as it does.
    """
    loop = asyncio.get_running_loop()
    seen, moved_at = follower.seen, loop.time()
    while follower.seen < seq:
        waiting = asyncio.ensure_future(follower.wait_seen(seq, silent_s / _LOOKS))
        try:
            await asyncio.wait({waiting, follower.broken}, return_when=asyncio.FIRST_COMPLETED)
            if follower.broken.done():
                follower.broken.result()
            await waiting
        except WaitTimedOut:
            if follower.seen > seen:
                seen, moved_at = follower.seen, loop.time()
            elif loop.time() - moved_at >= silent_s:
                raise LogUnavailable(
                    f"the log brought nothing for {silent_s:g} s on the way to {seq}", seq=seq, seen=seen
                ) from None
        finally:
            waiting.cancel()


async def unless_set(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What ``work`` returns or raises; None when ``stop`` was set first. ``work`` is then cancelled and has ended."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        stopped.cancel()
        task.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)
