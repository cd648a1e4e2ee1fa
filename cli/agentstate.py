"""Whether what an agent said last still counts. Pure."""

from __future__ import annotations

from gpukeeper.cli.livesite import Heard
from gpukeeper.projections.host import Host

#: An agent that missed this many beats in a row is called silent.
_BEATS_MISSED_MAX = 3


def agent_state(host: Host, heard: Heard | None, *, now_ns: int) -> str:
    """``live``, ``stopping``, ``silent`` (what it said last no longer counts) or ``left``."""
    if host.left:
        return "left"
    if heard is None or heard.beat.instance_id != host.instance_id:
        return "silent"
    if age_s(heard.stored_ns, now_ns) > _BEATS_MISSED_MAX * heard.beat.interval_s:
        return "silent"
    return "stopping" if heard.beat.stopping else "live"


def age_s(from_ns: int, now_ns: int) -> float:
    """Never negative: this machine's clock and the server's may be apart."""
    return round(max(now_ns - from_ns, 0) / 1e9, 3)
