"""The shell around the decisions: fold, decide, append with the expected sequence, fold one's own events, again.

Three lanes run side by side, each on subjects of its own kind: *accept* answers submissions, *route* sends jobs to
devices, *control* does everything that is rare (commands, lapses, orphans, waits, expiries, once a second). A lane
decides again only when everything it appended has been folded, so it never acts on a state that lacks its own acts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
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
from gpukeeper.events.jetstream import JetStreamLog
from gpukeeper.events.job import Accepted, Admitted, PlacementVerified, Progress, Rejected, Resubmitted, Started
from gpukeeper.events.log import Appended, Follower, Refused, Stored, Unanswered
from gpukeeper.events.objects import JetStreamObjects
from gpukeeper.events.proposal import Proposal
from gpukeeper.events.readings import Heartbeat
from gpukeeper.events.recorder import Recorder, Stamp
from gpukeeper.events.route import Routed
from gpukeeper.events.services import Services, serve
from gpukeeper.events.site import LeaderElected
from gpukeeper.projections.runner import SiteProjection
from gpukeeper.projections.site import Retention
from gpukeeper.scheduler.accept import Known, decide_submissions, known_from
from gpukeeper.scheduler.config import SchedulerConfig
from gpukeeper.scheduler.control import decide_commands, decide_expiries
from gpukeeper.scheduler.lane import Decide, run_lane
from gpukeeper.scheduler.lease import Lease
from gpukeeper.scheduler.live import Live
from gpukeeper.scheduler.reap import Probe, decide_lapses, decide_orphans, decide_withdrawals, suspects
from gpukeeper.scheduler.route import decide_routes, decide_waits

_log = structlog.get_logger("gpukeeper.scheduler")

#: Facts after which no job can go where it could not go before.
_NO_ROOM = (Routed, Claimed, Admitted, PlacementVerified, Started, Progress)

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
        self._known: dict[str, Known] = {}
        self._wake_accept = asyncio.Event()
        self._wake_route = asyncio.Event()
        self._wake_control = asyncio.Event()
        self._snapshot_seq = 0
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
        follower = await self._beats.follow(self._on_beat, after=0, newest_only=True)
        service = await self._serve()
        _log.info("scheduler_started", instance=self.instance_id, seq=self.projection.site.seq)
        try:
            await self._run_lanes(stop, follower)
        finally:
            await self._lease.give_up()
            await service.stop()
            await follower.stop()
            await self.projection.stop()
            _log.info("scheduler_stopped", instance=self.instance_id, seq=self.projection.site.seq)

    async def _run_lanes(self, stop: asyncio.Event, follower: Follower) -> None:
        tasks = [
            asyncio.create_task(self._lead(), name="lease"),
            asyncio.create_task(self._lane("accept", self._wake_accept, self._decide_accepts), name="accept"),
            asyncio.create_task(self._lane("route", self._wake_route, self._decide_routes), name="route"),
            asyncio.create_task(self._lane("control", self._wake_control, self._decide_control), name="control"),
            asyncio.create_task(self._tick(), name="tick"),
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
            for task in ends:
                task.cancel()
            await asyncio.wait(ends)

    # --- what is heard

    def _on_event(self, event: Event) -> None:
        if isinstance(event.data, Submitted):
            self._wake_accept.set()
            return
        if not isinstance(event.data, _NO_ROOM):
            self._wake_route.set()
        site = self.projection.site
        if site.commands or site.lapses:
            self._wake_control.set()

    def _on_beat(self, stored: Stored) -> None:
        beat = decode(stored).data
        if isinstance(beat, Heartbeat):
            self.live.heard(beat, age_s=(now_ns() - stored.stored_ns) / 1e9)
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
            metadata={"instance_id": self.instance_id},
        )

    # --- leading

    async def _lead(self) -> None:
        """Take or renew the lease three times in its life."""
        while True:
            held_before = self._lease.held
            held = await self._lease.keep()
            if held and not self.leading.is_set():
                await self._take_over()
            elif held_before and not held:
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
            _log.warning("election_not_recorded", outcome=str(outcome))
            return
        await self.projection.wait_folded(outcome.seq)
        self.leading.set()
        for wake in (self._wake_accept, self._wake_route, self._wake_control):
            wake.set()
        _log.info("leading", instance=self.instance_id, seq=outcome.seq)

    # --- the lanes

    def _lane(self, name: str, wake: asyncio.Event, decide: Decide) -> Coroutine[Any, Any, None]:
        return run_lane(name, wake=wake, leading=self.leading, decide=decide, commit=self._commit)

    async def _commit(self, proposals: Sequence[Proposal]) -> bool:
        """Append, and fold what was appended. Returns whether anything was."""
        if len(proposals) == 1:
            outcomes = [await self._recorder.record(proposals[0])]
        else:
            outcomes = await asyncio.gather(*(self._recorder.record(proposal) for proposal in proposals))
        newest = 0
        lost = 0
        for proposal, outcome in zip(proposals, outcomes, strict=True):
            if isinstance(outcome, Appended):
                newest = max(newest, outcome.seq)
            else:
                lost += 1
                await self._on_lost(proposal, outcome)
        if lost:
            # What it was lost to must be folded too, or the next decision would rest on the same state.
            last = await self._log.last(">")
            newest = max(newest, 0 if last is None else last.seq)
        if newest:
            await self.projection.wait_folded(newest)
        return lost < len(proposals)

    async def _on_lost(self, proposal: Proposal, outcome: Refused | Unanswered) -> None:
        """Somebody else wrote first, or the log takes nothing: the lane looks again before it decides again."""
        code = outcome.code if isinstance(outcome, Refused) else "unanswered"
        _log.info("append_lost", subject=proposal.subject, type=proposal.fact.TYPE, code=code, detail=outcome.detail)
        fact = proposal.fact
        if (
            code == "stale"
            and isinstance(fact, Accepted | Rejected | Resubmitted)
            and fact.job not in self.projection.site.jobs
        ):
            await self._learn(fact.job, fact.submission_seq)

    async def _learn(self, job_id: str, submission_seq: int) -> None:
        """The id was used by a job that the fold has forgotten: read from the log what stands there."""
        history = [decode(stored) for stored in await self._log.read(subjects.job(job_id))]
        known = known_from(history, submission_seq)
        if known is not None:
            self._known[job_id] = known

    def _decide_accepts(self) -> Sequence[Proposal]:
        site = self.projection.site
        if not site.submissions:
            self._known.clear()
            return ()
        return decide_submissions(site, self.live, self._config, self._known)

    def _decide_routes(self) -> Sequence[Proposal]:
        return decide_routes(self.projection.site, self.live, self._config, now_ns() / 1e9)

    def _decide_control(self) -> Sequence[Proposal]:
        site = self.projection.site
        return (*decide_orphans(site), *decide_commands(site))

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
                await self._look_around(elapsed_s)
            except (LogUnavailable, WaitTimedOut) as error:
                _log.warning("tick_waits_for_log", error=error.message)
            if self.projection.site.seq - self._snapshot_seq >= self._config.snapshot_every_events:
                await self._save()

    async def _look_around(self, elapsed_s: float) -> None:
        site = self.projection.site
        claims = {host: tuple(epochs) for host, epochs in _claims_by_host(self.projection).items()}
        healthy = await self._broker_answers() if claims or site.routed else True
        self.live.tick(elapsed_s, broker_healthy=healthy, claims=claims)
        silent = suspects(site, self.live, self._config)
        probes = dict(zip(silent, await asyncio.gather(*(self._probe(host) for host in silent)), strict=True))
        now_s = now_ns() / 1e9
        proposals = [
            *decide_lapses(site, self.live, self._config, probes),
            *decide_withdrawals(site, self.live, self._config, probes),
            *decide_expiries(site, now_s),
        ]
        if proposals:
            await self._commit(proposals)
        if waits := decide_waits(site, self.live, self._config, now_s):
            await self._commit(waits)
        self._wake_route.set()
        self._wake_control.set()

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


def _claims_by_host(projection: SiteProjection) -> dict[str, list[int]]:
    claims: dict[str, list[int]] = {}
    for device in projection.site.devices.values():
        if device.claims:
            claims.setdefault(device.host, []).extend(claim.epoch for claim in device.claims)
    for key, jobs in projection.site.routed.items():
        if jobs:
            claims.setdefault(key.partition("/")[0], [])
    return claims


async def _join(future: asyncio.Future[None]) -> None:
    await asyncio.shield(future)
