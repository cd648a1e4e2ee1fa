"""When a container counts as crash-looping: it was seen to be started again too often within a window. Pure.

The engine counts how often it started a container again by itself (``RestartCount``). It begins anew when somebody
starts the container by hand, and so does the count here: a fall, or another id, is a new life.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec


class Observation(msgspec.Struct, frozen=True):
    """One look: when, in seconds of any clock that only goes forward, and what the engine said."""

    at_s: float
    restart_count: int
    status: str
    #: Which container it was: one that was removed and made again has another id.
    id: str = ""


class CrashLoop(msgspec.Struct, frozen=True, kw_only=True):
    """The finding: so many restarts were seen within the window."""

    restarts: int
    window_s: float
    #: The engine's count at the last look.
    restart_count: int

    @property
    def words(self) -> str:
        return f"it was restarted {self.restarts} times within {self.window_s:g} s ({self.restart_count} in all)"


def crash_loop(
    observations: Sequence[Observation], *, restarts: int, window_s: float, now_s: float
) -> CrashLoop | None:
    """Whether the restarts that were seen in the last ``window_s`` seconds are ``restarts`` or more.

    Args:
        observations: looks at one container's name, the oldest first.
        restarts: how many make a loop.
        window_s: how far back counts, in seconds.
        now_s: the moment to judge, on the clock of the observations.

    A rise counts from the look that saw it. Looks that lie further apart than the window tell that it was
    restarted, not when: such a rise counts as one.
    """
    seen = sum(
        later.restart_count - earlier.restart_count if later.at_s - earlier.at_s <= window_s else 1
        for earlier, later in pairwise(observations)
        if later.id == earlier.id and later.restart_count > earlier.restart_count and later.at_s > now_s - window_s
    )
    if seen < restarts or not observations:
        return None
    return CrashLoop(restarts=seen, window_s=window_s, restart_count=observations[-1].restart_count)


def remember(
    observations: Sequence[Observation], newest: Observation, *, restarts: int, window_s: float
) -> tuple[Observation, ...]:
    """``observations`` with ``newest``, without what :func:`crash_loop` needs no more: its length is bounded.

    A new life (another id, or a lower count) begins afresh. Of looks that saw the same count only the first and the
    last are kept.
    """
    if observations and (newest.id != observations[-1].id or newest.restart_count < observations[-1].restart_count):
        return (newest,)
    kept = list(observations)
    if len(kept) >= 2 and kept[-1].restart_count == kept[-2].restart_count == newest.restart_count:
        kept.pop()
    kept.append(newest)
    # A rise needs its two looks; more rises than make a loop change nothing.
    first = max(0, len(kept) - 2 * (restarts + 1))
    while first + 1 < len(kept) and kept[first + 1].at_s <= newest.at_s - window_s:
        first += 1
    return tuple(kept[first:])
