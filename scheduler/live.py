"""Evidence that is not in the log: heartbeats, and how long each host has been silent while we could hear.

Silence counts only in time in which this observer proved that it hears: its clock ran evenly and the broker answered.
A pause of the process, a suspended machine or a broker that is away adds nothing.
"""

from __future__ import annotations

import msgspec

from gpukeeper.events.readings import ClaimBeat, DeviceReading, Heartbeat, RuntimeReading

#: An interval between two ticks that is longer than this many times the tick is a pause, not silence.
_LATE_TICK_FACTOR = 3.0


class HostLive(msgspec.Struct):
    """What one host's agent said last. Mutable: one writer, :class:`Live`."""

    instance_id: str = ""
    beat: Heartbeat | None = None
    #: The beat was old when it came: from before this observer listened.
    stale: bool = False
    #: Seconds since then in which we could have heard it.
    silent_s: float = 0.0
    #: For each claim's epoch: seconds during which the agent was heard and did not list it.
    unlisted_s: dict[int, float] = msgspec.field(default_factory=dict[int, float])

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
        """The evidence on ``name``; its silence starts counting now if it was never heard."""
        return self.hosts.setdefault(name, HostLive())

    def heard(self, beat: Heartbeat, *, age_s: float = 0.0) -> None:
        """A heartbeat arrived, stored ``age_s`` ago.

        One from before this observer listened is evidence of what was, not that the agent lives: no work goes there
        on its word, and its silence counts from now.
        """
        known = self.host(beat.host)
        known.instance_id = beat.instance_id
        known.beat = beat
        known.silent_s = 0.0
        known.stale = age_s > beat.interval_s * 3

    def tick(self, elapsed_s: float, *, broker_healthy: bool, claims: dict[str, tuple[int, ...]]) -> None:
        """Let ``elapsed_s`` pass. ``claims`` are the epochs that stand in the log, by host."""
        if not broker_healthy or elapsed_s > self._tick_s * _LATE_TICK_FACTOR:
            return
        for name in claims:
            self.host(name)
        for name, known in self.hosts.items():
            known.silent_s += elapsed_s
            standing = claims.get(name, ())
            listed = {claim.epoch for claim in known.beat.claims} if known.beat else set[int]()
            hears = known.beat is not None and known.silent_s <= known.beat.interval_s * 2
            for epoch in standing:
                if epoch in listed or not hears:
                    known.unlisted_s.pop(epoch, None)
                else:
                    known.unlisted_s[epoch] = known.unlisted_s.get(epoch, 0.0) + elapsed_s
            for epoch in [e for e in known.unlisted_s if e not in standing]:
                del known.unlisted_s[epoch]

    def is_fresh(self, name: str) -> bool:
        """Whether the host was heard recently enough to send it work."""
        known = self.hosts.get(name)
        if known is None or known.beat is None or known.beat.stopping or known.stale:
            return False
        return known.silent_s <= known.beat.interval_s * 3
