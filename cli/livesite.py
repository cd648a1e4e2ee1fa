"""The site as it is now, for commands that show it once or keep showing it: the folded log and the heartbeats."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import msgspec

from gpukeeper.cli.session import CATCH_UP_S, Session
from gpukeeper.events import subjects
from gpukeeper.events.codec import Event, decode
from gpukeeper.events.errors import WaitTimedOut
from gpukeeper.events.log import Follower, Stored
from gpukeeper.events.readings import ClaimBeat, DeviceReading, Heartbeat, RuntimeReading
from gpukeeper.projections.runner import SiteProjection
from gpukeeper.projections.site import Site

_BEATS_S = 2.0


class Heard(msgspec.Struct, frozen=True):
    """The newest heartbeat of one host, and when the server got it."""

    beat: Heartbeat
    stored_ns: int

    def claim(self, epoch: int) -> ClaimBeat | None:
        return next((claim for claim in self.beat.claims if claim.epoch == epoch), None)

    def device(self, device: str) -> DeviceReading | None:
        return next((reading for reading in self.beat.devices if reading.device == device), None)

    def runtime(self, name: str) -> RuntimeReading | None:
        return next((reading for reading in self.beat.runtimes if reading.runtime == name), None)


class LiveSite:
    """Folds the site and hears its agents. :meth:`start`, read, :meth:`stop`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._projection = SiteProjection(session.log, objects=session.snapshots, on_event=self._on_event)
        self._beats: Follower | None = None
        self._news = asyncio.Event()
        self.heard: dict[str, Heard] = {}

    @property
    def site(self) -> Site:
        return self._projection.site

    async def start(self) -> None:
        """Fold all that the log holds, and hear each agent's newest heartbeat.

        Raises:
            LogUnavailable, WaitTimedOut: the log did not answer (in time).
        """
        await self._projection.start(silent_s=CATCH_UP_S)
        await self._hear()

    async def stop(self) -> None:
        await self._projection.stop()
        if self._beats is not None:
            await self._beats.stop()

    async def changed(self, *, at_least_every_s: float = 1.0, pause_s: float = 0.2) -> None:
        """Wait for news, or for ages to grow; never sooner than ``pause_s``, so that a busy site stays readable.

        Raises:
            GpukeeperError: the site cannot be followed any more.
        """
        await asyncio.sleep(pause_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(at_least_every_s):
                await self._news.wait()
        self._news.clear()
        if self._projection.broken.done():
            self._projection.broken.result()

    async def _hear(self) -> None:
        newest = await self._session.beats_log.last(subjects.BEAT_SUBJECTS[0])
        self._beats = await self._session.beats_log.follow(self._on_beat, after=0, newest_only=True)
        if newest is not None:
            # One that ages out in this moment is no loss.
            with suppress(WaitTimedOut):
                await self._beats.wait_seen(newest.seq, _BEATS_S)

    def _on_beat(self, stored: Stored) -> None:
        beat = decode(stored).data
        if isinstance(beat, Heartbeat):
            self.heard[beat.host] = Heard(beat, stored.stored_ns)
            self._news.set()

    def _on_event(self, event: Event) -> None:
        del event
        self._news.set()
