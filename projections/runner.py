"""Keeps a site folded: snapshot, tail, then live."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from gpukeeper.events.catchup import SILENT_S, catch_up
from gpukeeper.events.codec import Event, decode
from gpukeeper.events.log import Follower, Log, Stored
from gpukeeper.events.objects import Objects
from gpukeeper.projections import snapshot
from gpukeeper.projections.site import Retention, Site

_log = structlog.get_logger("gpukeeper.projection")


class SiteProjection:
    """The site as the log says, as of :attr:`Site.seq`.

    Args:
        log: the log that is folded.
        objects: where snapshots are; None folds from sequence 1 and stores none.
        retention: None takes that of the newest snapshot, which suits a reader that stores none of its own.
        on_event: called after each event was folded. Must not block.
    """

    def __init__(
        self,
        log: Log,
        *,
        objects: Objects | None = None,
        retention: Retention | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self._log = log
        self._objects = objects
        self._retention = retention
        self._on_event = on_event
        self._follower: Follower | None = None
        self.site = Site(self._retention)
        #: Sequence of the snapshot it started from, 0 when it folded everything.
        self.started_at = 0

    async def start(self, *, silent_s: float = SILENT_S) -> None:
        """Restore, then fold everything that the log holds by now, for as long as it takes.

        Raises:
            LogUnavailable: the log did not answer, or handed on nothing for ``silent_s``.
            Exception: what folding raised.
        """
        if self._objects is not None:
            restored = await snapshot.load(self._objects, self._log, self._retention)
            if restored is not None:
                self.site = restored
                self.started_at = restored.seq
        # The newest event that is there: the last sequence may be of one that has aged out, which nobody is handed.
        last = await self._log.last(">")
        until = 0 if last is None else last.seq
        self._follower = await self._log.follow(self._fold, after=self.site.seq)
        try:
            await catch_up(self._follower, until, silent_s=silent_s)
        except BaseException:
            await self._follower.stop()
            raise
        _log.debug("projection_caught_up", seq=until, from_snapshot=self.started_at)

    def _fold(self, stored: Stored) -> None:
        event = decode(stored)
        self.site.apply(event)
        if self._on_event is not None:
            self._on_event(event)

    async def wait_folded(self, seq: int, timeout_s: float = 30.0) -> None:
        """Wait until ``seq`` is folded.

        Raises:
            WaitTimedOut: it was not within ``timeout_s``.
        """
        assert self._follower is not None, "start() first"
        await self._follower.wait_seen(seq, timeout_s)

    @property
    def broken(self) -> asyncio.Future[None]:
        """Carries the error when folding can never go on."""
        assert self._follower is not None, "start() first"
        return self._follower.broken

    async def save(self) -> str | None:
        """Store a snapshot, where there is a place for it."""
        return None if self._objects is None else await snapshot.save(self._objects, self.site)

    async def stop(self) -> None:
        """Fold no more. May be called twice."""
        if self._follower is not None:
            await self._follower.stop()
