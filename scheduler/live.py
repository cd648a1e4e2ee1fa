"""Evidence that is not in the log: heartbeats, and how long each host has been silent while we could hear.

Silence counts only in time in which this observer proved that it hears: its clock ran evenly and the broker answered.
A pause of the process, a suspended machine or a broker that is away adds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gpukeeper.events.readings import ClaimBeat, DeviceReading, Heartbeat, RuntimeReading

#: An interval between two ticks that is longer than this many times the tick is a pause, not silence.
_LATE_TICK_FACTOR = 3.0
#: An agent is heard while its last heartbeat is at most this many intervals old.
_FRESH_INTERVALS = 3


class HostLive(msgspec.Struct):
    """What one host's agent said last. Mutable: one writer, :class:`Live`."""

    instance_id: str = ""
    beat: Heartbeat | None = None
    #: Heartbeats heard so far.
    beats: int = 0
    #: The last one was sent before this observer listened: evidence of what was, none of life.
    old: bool = False
    #: When the server stored it.
    stored_ns: int = 0
    #: Seconds since then in which we could have heard it.
    silent_s: float = 0.0
    #: For each claim's epoch: seconds during which the agent was heard and did not list it.
    unlisted_s: dict[int, float] = msgspec.field(default_factory=dict[int, float])
    #: For each claim's epoch: the heartbeats heard when it was first seen to stand.
    standing_since: dict[int, int] = msgspec.field(default_factory=dict[int, int])

    def device(self, device_id: str) -> DeviceReading | None:
        for reading in self.beat.devices if self.beat else ():
            if reading.device == device_id:
                return reading
        return None

    def runtime(self, name: str) -> RuntimeReading | None:
        for reading in self.beat.runtimes if self.beat else ():
            if reading.runtime == name:
                return reading
        return None

    def claim(self, epoch: int) -> ClaimBeat | None:
        for claim in self.beat.claims if self.beat else ():
            if claim.epoch == epoch:
                return claim
        return None


class Live:
    """Every host's evidence, as this observer has it."""

    def __init__(self, *, tick_s: float = 1.0) -> None:
        self._tick_s = tick_s
        self.hosts: dict[str, HostLive] = {}

    def host(self, name: str) -> HostLive:
        """The evidence on ``name``, which is none where it was never heard. For reading only."""
        return self.hosts.get(name) or HostLive()

    def heard(self, beat: Heartbeat, *, from_before: bool = False, stored_ns: int = 0) -> None:
        """A heartbeat arrived. One ``from_before`` this observer listened is evidence of what was, none of life.

        :meth:`began` may find that it was stored just then. This machine's clock is not asked: it need not agree with
        the server's.
        """
        known = self.hosts.setdefault(beat.host, HostLive())
        known.instance_id = beat.instance_id
        known.beat = beat
        known.beats += 1
        known.old = from_before
        known.stored_ns = stored_ns
        known.silent_s = 0.0

    def began(self, server_now_ns: int) -> None:
        """The observer begins to decide, at this time by the server's clock: heartbeats that are recent by it count."""
        for known in self.hosts.values():
            if known.old and known.beat is not None:
                age_s = (server_now_ns - known.stored_ns) / 1e9
                known.old = age_s > known.beat.interval_s * _FRESH_INTERVALS

    def tick(self, elapsed_s: float, *, broker_healthy: bool, claims: Mapping[str, tuple[int, ...]]) -> None:
        """Let ``elapsed_s`` pass. ``claims`` are the epochs that stand in the log, by host.

        The silence of a host that was never heard counts from the first tick that names it.
        """
        if not broker_healthy or elapsed_s > self._tick_s * _LATE_TICK_FACTOR:
            return
        for name in claims:
            self.hosts.setdefault(name, HostLive())
        for name, known in self.hosts.items():
            known.silent_s += elapsed_s
            _tick_claims(known, elapsed_s, claims.get(name, ()))

    def is_fresh(self, name: str) -> bool:
        """Whether the host was heard recently enough to send it work."""
        known = self.host(name)
        return _is_heard(known) and known.beat is not None and not known.beat.stopping


def _is_heard(known: HostLive) -> bool:
    return known.beat is not None and not known.old and known.silent_s <= known.beat.interval_s * _FRESH_INTERVALS


def _tick_claims(known: HostLive, elapsed_s: float, standing: tuple[int, ...]) -> None:
    """Count how long an agent that is heard has not listed a claim that stands in its name."""
    listed = {claim.epoch for claim in known.beat.claims} if known.beat else set[int]()
    for epoch in standing:
        # The first heartbeat after a claim was seen may have been made before it: only the second one speaks of it.
        spoken = known.beats - known.standing_since.setdefault(epoch, known.beats) >= 2
        if epoch in listed or not spoken or not _is_heard(known):
            known.unlisted_s.pop(epoch, None)
        else:
            known.unlisted_s[epoch] = known.unlisted_s.get(epoch, 0.0) + elapsed_s
    for counted in (known.unlisted_s, known.standing_since):
        for epoch in [epoch for epoch in counted if epoch not in standing]:
            del counted[epoch]
