"""Continuous evidence that a runtime does nothing. Pure.

Being idle is proven by looks, one after another without a break, and only for the time between the first and the last
of them. Whatever is not a proof breaks it: work of anybody, a look that could not tell, a job of ours, a pause in which
nobody looked, a clock that was set back.
"""

from __future__ import annotations

from datetime import datetime

import msgspec

from gpukeeper.events.instants import parse_utc
from gpukeeper.events.readings import Activity, RuntimeReading

#: Three heartbeats of the default length.
GAP_MAX_S = 15.0


class Idleness(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one runtime's idleness. Every look gives a new value; the first value knows nothing."""

    #: A longer pause between two looks is a break, and older evidence than this is none.
    gap_max_s: float = GAP_MAX_S
    #: The first look of the unbroken run of idle ones; None outside such a run.
    since: datetime | None = None
    #: The last look of that run.
    seen: datetime | None = None

    def looked(
        self, at: datetime, activity: Activity, own_jobs: int, *, idle_since: datetime | None = None
    ) -> Idleness:
        """Fold one look.

        Args:
            at: when the look began, in UTC.
            activity: what it showed. Anything but ``idle`` ends the run.
            own_jobs: jobs of ours that load or run there, and those that are about to.
            idle_since: the runtime's own word on when it last worked. It can only shorten the run.
        """
        if activity != "idle" or own_jobs != 0:
            return Idleness(gap_max_s=self.gap_max_s)
        since = at
        if self.since is not None and self.seen is not None and 0 <= (at - self.seen).total_seconds() <= self.gap_max_s:
            since = self.since
        if idle_since is not None:
            since = min(max(since, idle_since), at)
        return Idleness(gap_max_s=self.gap_max_s, since=since, seen=at)

    def read(self, reading: RuntimeReading, own_jobs: int) -> Idleness:
        """Fold a reading of the runtime, such as a heartbeat's. One of an unhealthy runtime tells nothing.

        Raises:
            ValueError: a moment in the reading is not RFC 3339.
        """
        idle_since = None if reading.idle_since is None else parse_utc(reading.idle_since)
        activity: Activity = reading.activity if reading.healthy else "unknown"
        return self.looked(parse_utc(reading.read_at), activity, own_jobs, idle_since=idle_since)

    def idle_s(self, now: datetime) -> float | None:
        """For how long idleness is proven, in seconds: 0 after a single look.

        None where it is not known at all at ``now``: the last look was not idle, is too old, or lies in the future.
        """
        if self.since is None or self.seen is None or not 0 <= (now - self.seen).total_seconds() <= self.gap_max_s:
            return None
        return (self.seen - self.since).total_seconds()
