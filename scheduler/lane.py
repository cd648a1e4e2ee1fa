"""One lane of the scheduler: decide, append, fold, and again, for as long as there is something to decide."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn

import structlog

from gpukeeper.events.errors import LogUnavailable, WaitTimedOut
from gpukeeper.events.proposal import Proposal

_log = structlog.get_logger("gpukeeper.scheduler")

Decide = Callable[[], Sequence[Proposal]]
#: Appends, waits until what was appended is folded, and returns whether anything was.
Commit = Callable[[Sequence[Proposal]], Awaitable[bool]]

_LOG_AWAY_S = 1.0
#: After a round that appended nothing, unless something is stored meanwhile.
PAUSE_S_MIN = 0.02
PAUSE_S_MAX = 1.0


async def run_lane(
    name: str, *, wake: asyncio.Event, leading: asyncio.Event, decide: Decide, commit: Commit
) -> NoReturn:
    """Run until cancelled. ``wake`` says that there may be something new to decide on, ``leading`` that we decide."""
    while True:
        await wake.wait()
        await leading.wait()
        pause_s = PAUSE_S_MIN
        while leading.is_set():
            wake.clear()
            if not (proposals := decide()):
                break
            try:
                appended = await commit(proposals)
            except (LogUnavailable, WaitTimedOut) as error:
                # Nothing is lost: the next look decides on what the log then says.
                _log.warning("lane_waits_for_log", lane=name, error=error.message)
                await asyncio.sleep(_LOG_AWAY_S)
                continue
            if appended:
                pause_s = PAUSE_S_MIN
                continue
            # All of it was stale or refused. Deciding the same on the same state would be refused again.
            await _set_within(wake, pause_s)
            pause_s = min(pause_s * 2, PAUSE_S_MAX)


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for ``event``, at most so long. Returns whether it came."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
