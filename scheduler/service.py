"""A scheduler process: it leads or waits to, hears heartbeats, answers, and has its desk decide.

Three lanes run side by side, each on subjects of its own kind: *accept* answers submissions, *route* sends jobs to
devices, *control* does everything that is rare (commands, lapses, orphans, waits, expiries, once a second). A lane
decides again only when everything it appended has been folded, so it never acts on a state that lacks its own acts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import msgspec
import nats.errors
import structlog

import gpukeeper
from gpukeeper.events import subjects
from gpukeeper.events.catchup import unless_set
from gpukeeper.events.clock import new_id, now_ns, now_rfc3339
from gpukeeper.events.codec import Event, Submitted, decode
from gpukeeper.events.connection import Connection
from gpukeeper.events.device import Claimed
from gpukeeper.events.errors import LogUnavailable, WaitTimedOut
from gpukeeper.events.host import Joined, Left
from gpukeeper.events.jetstream import JetStreamLog
from gpukeeper.events.job import Admitted, PlacementVerified, Progress, Started
from gpukeeper.events.log import Appended, Follower, Stored
from gpukeeper.events.objects import JetStreamObjects
from gpukeeper.events.proposal import Proposal
from gpukeeper.events.readings import Heartbeat
from gpukeeper.events.recorder import Recorder, Stamp
from gpukeeper.events.route import Routed
from gpukeeper.events.services import Services, serve
from gpukeeper.events.site import LeaderElected
from gpukeeper.events.tasks import end_all
from gpukeeper.projections.registries import registry_problems
from gpukeeper.projections.runner import SiteProjection
from gpukeeper.projections.site import Retention
from gpukeeper.scheduler.ask import AskService
from gpukeeper.scheduler.config import SchedulerConfig
from gpukeeper.scheduler.desk import Desk
from gpukeeper.scheduler.lane import Decide, run_lane
from gpukeeper.scheduler.lease import Lease
from gpukeeper.scheduler.live import Live
from gpukeeper.scheduler.reap import Probe

_log = structlog.get_logger("gpukeeper.scheduler")

#: Facts after which no job can go where it could not go before.
_NO_ROOM = (Routed, Claimed, Admitted, PlacementVerified, Started, Progress)

#: Facts with which the registry of a host becomes another one; what it lists was told before.
_REGISTRIES = (Joined, Left)

_TICK_S = 1.0
_PROBE_TIMEOUT_S = 1.0


class SchedulerService:
    """One scheduler process. Several may run; the one with the lease decides."""

    def __init__(self, connection: Connection, config: SchedulerConfig) -> None:
        self._connection = connection
        self._config = config
        self.instance_id = new_id()
        source = f"/site/{config.site}/scheduler/{self.instance_id}"
        log = JetStreamLog(connection)
        self._log = log
        self._recorder = Recorder(log, Stamp(source=source, new_id=new_id, now=now_rfc3339))
        self._beats = JetStreamLog(connection, stream=subjects.BEATS_STREAM)
        self.projection = SiteProjection(
            log,
            objects=JetStreamObjects(connection, subjects.SNAPSHOTS_BUCKET),
            retention=Retention(config.forget_after_s, config.forget_above),
            on_event=self._on_event,
        )
        self._lease = Lease(connection, self.instance_id, wanted_ttl_s=config.lease_ttl_s)
        self.live = Live(tick_s=_TICK_S)
        payloads = JetStreamObjects(connection, subjects.PAYLOADS_BUCKET)
        self._ask = AskService(self.projection, self.live, log, payloads)
        self._desk = Desk(
            log=log,
            recorder=self._recorder,
            projection=self.projection,
            live=self.live,
            config=config,
            now_s=self._server_now_s,
            probe=self._probe,
            broker_answers=self._broker_answers,
        )
        self._wake_accept = asyncio.Event()
        self._wake_route = asyncio.Event()
        self._wake_control = asyncio.Event()
        self._snapshot_seq = 0
        #: What is wrong between the hosts' registries, as it was logged last.
        self._told_problems: tuple[str, ...] = ()
        #: A host has joined or left since that was looked for.
        self._registries_changed = True
        #: Heartbeats up to here were stored before this scheduler listened.
        self._beats_before = 0
        #: How far the server's clock is ahead of ours, by the last heartbeat that was heard as it was stored.
        self._server_ahead_ns = 0
        #: Set when it leads and has folded everything.
        self.leading = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Work until ``stop``, or until folding is impossible.

        Raises:
            GpukeeperError: the log cannot be followed any more; a restart folds anew.
        """
        await unless_set(stop, self.projection.start())
        if stop.is_set():
            await self.projection.stop()
            return
        self._snapshot_seq = self.projection.started_at
        self._beats_before = await self._beats.last_seq()
        self._ask.start(answer_bytes_max=self._connection.client.max_payload)
        follower = await self._beats.follow(self._on_beat, after=0, newest_only=True)
        service = await self._serve()
        _log.info("scheduler_started", instance=self.instance_id, seq=self.projection.site.seq)
        try:
            await self._run_lanes(stop, follower)
        finally:
            await self._lease.give_up()
            await service.stop()
            await self._ask.stop()
            await follower.stop()
            await self.projection.stop()
            _log.info("scheduler_stopped", instance=self.instance_id, seq=self.projection.site.seq)

    async def _run_lanes(self, stop: asyncio.Event, follower: Follower) -> None:
        tasks = [
            asyncio.create_task(self._lead(), name="lease"),
            asyncio.create_task(self._lane("accept", self._wake_accept, self._desk.decide_accepts), name="accept"),
            asyncio.create_task(self._lane("route", self._wake_route, self._desk.decide_routes), name="route"),
            asyncio.create_task(self._lane("control", self._wake_control, self._desk.decide_control), name="control"),
            asyncio.create_task(self._tick(), name="tick"),
            asyncio.create_task(self._ask.run(), name="ask"),
        ]
        ends = {
            asyncio.ensure_future(stop.wait()),
            asyncio.ensure_future(_join(self.projection.broken)),
            asyncio.ensure_future(_join(follower.broken)),
            asyncio.ensure_future(_join(self._connection.closed)),
            *tasks,
        }
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()
            if stop.is_set():
                await self._save()
        finally:
            self.leading.clear()
            await end_all(ends)

    # --- what is heard

    def _on_event(self, event: Event) -> None:
        self._ask.heard(event)
        if isinstance(event.data, Submitted):
            self._wake_accept.set()
            return
        if not isinstance(event.data, _NO_ROOM):
            self._wake_route.set()
        if isinstance(event.data, _REGISTRIES):
            self._registries_changed = True
        site = self.projection.site
        if site.commands or site.lapses:
            self._wake_control.set()

    def _on_beat(self, stored: Stored) -> None:
        beat = decode(stored).data
        if isinstance(beat, Heartbeat):
            from_before = stored.seq <= self._beats_before
            self.live.heard(beat, from_before=from_before, stored_ns=stored.stored_ns)
            if not from_before:
                self._server_ahead_ns = stored.stored_ns - now_ns()
            self._wake_route.set()

    async def _serve(self) -> Services:
        async def status(_: bytes) -> bytes:
            site = self.projection.site
            return msgspec.json.encode(
                {
                    "instance_id": self.instance_id,
                    "leading": self.leading.is_set(),
                    "seq": site.seq,
                    "queue_depth": len(site.queue),
                    "live_jobs": len(site.live),
                    "unanswered_submissions": len(site.submissions),
                }
            )

        return await serve(
            self._connection,
            name="gpuq-scheduler",
            description="decides where and when jobs run",
            endpoints={"status": (subjects.SCHEDULER_STATUS, status)},
            questions={"ask-job": (subjects.ASK_JOB, self._ask.ask)},
            metadata={"instance_id": self.instance_id},
        )

    # --- leading

    async def _lead(self) -> None:
        """Take or renew the lease three times in its life."""
        while True:
            held = await self._lease.keep()
            if held and not self.leading.is_set():
                await self._take_over()
            elif self.leading.is_set() and not held:
                self.leading.clear()
                _log.warning("lease_lost", instance=self.instance_id)
            await asyncio.sleep(self._lease.ttl_s / 3)

    async def _take_over(self) -> None:
        fact = LeaderElected(
            instance_id=self.instance_id, lease_revision=self._lease.revision, version=gpukeeper.__version__
        )
        outcome = await self._recorder.record(
            Proposal(subject=subjects.SITE, fact=fact, expected=None, aggregate="site")
        )
        if not isinstance(outcome, Appended):
            # Tried again at the next renewal, while the lease is still ours.
            _log.warning("election_not_recorded", outcome=str(outcome))
            return
        try:
            await self.projection.wait_folded(outcome.seq)
        except WaitTimedOut as error:
            _log.warning("election_not_folded", error=error.message)
            return
        # The election was stored just now: that is the server's time.
        self._server_ahead_ns = self.projection.site.stored_ns - now_ns()
        self.live.began(self.projection.site.stored_ns)
        self.leading.set()
        for wake in (self._wake_accept, self._wake_route, self._wake_control):
            wake.set()
        _log.info("leading", instance=self.instance_id, seq=outcome.seq)

    # --- the lanes

    def _lane(self, name: str, wake: asyncio.Event, decide: Decide) -> Coroutine[Any, Any, None]:
        return run_lane(name, wake=wake, leading=self.leading, decide=decide, commit=self._desk.commit)

    # --- once a second

    async def _tick(self) -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            elapsed_s, before = now - before, now
            if not self.leading.is_set():
                continue
            try:
                await self._desk.look_around(elapsed_s)
            except (LogUnavailable, WaitTimedOut) as error:
                _log.warning("tick_waits_for_log", error=error.message)
            self._wake_route.set()
            self._wake_control.set()
            self._tell_problems()
            if self.projection.site.seq - self._snapshot_seq >= self._config.snapshot_every_events:
                await self._save()

    def _tell_problems(self) -> None:
        """Log what only the whole site shows to be wrong, when it changes."""
        if not self._registries_changed:
            return
        self._registries_changed = False
        problems = registry_problems(self.projection.site)
        if problems != self._told_problems:
            self._told_problems = problems
            _log.warning("registry_problems", problems="; ".join(problems) or "none any more")

    def _server_now_s(self) -> float:
        """The time by the server's clock, which the ages in the fold are counted from."""
        return (now_ns() + self._server_ahead_ns) / 1e9

    async def _broker_answers(self) -> bool:
        """Whether we hear: the connection stands and the log's leader answers within a tick."""
        if not self._connection.connected:
            return False
        try:
            async with asyncio.timeout(_TICK_S):
                await self._log.last_seq()
        except (LogUnavailable, TimeoutError):
            return False
        return True

    async def _probe(self, host: str) -> Probe:
        """Ask the agent directly whether it lives."""
        try:
            await self._connection.client.request(subjects.agent_ping(host), b"", timeout=_PROBE_TIMEOUT_S)
        except nats.errors.NoRespondersError:
            return "nobody"
        except (TimeoutError, nats.errors.Error):
            return "silent"
        return "answered"

    async def _save(self) -> None:
        site = self.projection.site
        if site.seq == self._snapshot_seq or not self._connection.connected:
            return
        try:
            name = await self.projection.save()
        except LogUnavailable as error:
            _log.warning("snapshot_not_saved", error=error.message)
            return
        self._snapshot_seq = site.seq
        _log.info("snapshot_saved", snapshot=name, seq=site.seq)


async def _join(future: asyncio.Future[None]) -> None:
    await asyncio.shield(future)
