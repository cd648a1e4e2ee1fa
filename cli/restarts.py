"""When a program that died is started again, and when no longer. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Wait ``first_s``, doubling up to ``longest_s``; more than ``deaths_max`` within ``window_s`` is the end."""

    first_s: float = 0.2
    longest_s: float = 5.0
    deaths_max: int = 8
    window_s: float = 60.0


def restart_delay_s(deaths: Sequence[float], now: float, policy: RestartPolicy) -> float | None:
    """How long to wait after the latest of ``deaths`` (times on the clock of ``now``); None: give up.

    Deaths before the window count no longer, so a program that lived that long starts with the shortest wait.
    """
    recent = sum(1 for death in deaths if now - death <= policy.window_s)
    if recent > policy.deaths_max:
        return None
    return min(policy.first_s * 2 ** max(recent - 1, 0), policy.longest_s)
