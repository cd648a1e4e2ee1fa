"""Where decisions are committed: decide, append with the expected sequence, learn what was lost, fold one's own events.

Everything of a scheduler but leading, listening and answering; time, probes and the broker's health are given to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from gpukeeper.events import subjects
from gpukeeper.events.codec import decode
from gpukeeper.events.job import Accepted, Rejected, Resubmitted
from gpukeeper.events.log import Appended, Log, Outcome, Refused
from gpukeeper.events.proposal import Proposal
from gpukeeper.events.recorder import Recorder
from gpukeeper.projections.runner import SiteProjection
from gpukeeper.projections.site import Site
from gpukeeper.scheduler.accept import Known, decide_submissions, known_from
from gpukeeper.scheduler.config import SchedulerConfig
from gpukeeper.scheduler.control import decide_commands, decide_expiries
from gpukeeper.scheduler.live import Live
from gpukeeper.scheduler.reap import Probe, decide_lapses, decide_orphans, decide_withdrawals, suspects
from gpukeeper.scheduler.route import decide_routes, decide_waits

_log = structlog.get_logger("gpukeeper.scheduler")


class Desk:
    """Decides on one folded site and commits what it decided.

    Args:
        log: where it appends.
        recorder: how it appends.
        projection: the site, folded from that log.
        live: what was heard of the hosts.
        config: the policy.
        now_s: seconds since the epoch.
        probe: asks an agent directly whether it lives, within a bound.
        broker_answers: whether we hear, as of now, within a bound.
    """

    def __init__(
        self,
        *,
        log: Log,
        recorder: Recorder,
        projection: SiteProjection,
        live: Live,
        config: SchedulerConfig,
        now_s: Callable[[], float],
        probe: Callable[[str], Awaitable[Probe]],
        broker_answers: Callable[[], Awaitable[bool]],
    ) -> None:
        self._log = log
        self._recorder = recorder
        self._projection = projection
        self._live = live
        self._config = config
        self._now_s = now_s
        self._probe = probe
        self._broker_answers = broker_answers
        #: Ids of jobs that the fold has forgotten, while submissions wait that may be theirs.
        self._known: dict[str, Known] = {}

    @property
    def site(self) -> Site:
        return self._projection.site

    # --- deciding

    def decide_accepts(self) -> Sequence[Proposal]:
        if not self.site.submissions:
            self._known.clear()
            return ()
        return decide_submissions(self.site, self._live, self._config, self._known)

    def decide_routes(self) -> Sequence[Proposal]:
        return decide_routes(self.site, self._live, self._config, self._now_s())

    def decide_control(self) -> Sequence[Proposal]:
        return (*decide_orphans(self.site), *decide_commands(self.site))

    async def look_around(self, elapsed_s: float) -> None:
        """Once a tick: count silence, ask who is silent, and do everything that time alone brings about.

        Raises:
            LogUnavailable, WaitTimedOut: the log does not answer; the next look decides anew.
        """
        site = self.site
        claims = _claims_by_host(site)
        healthy = await self._broker_answers() if claims else True
        self._live.tick(elapsed_s, broker_healthy=healthy, claims=claims)
        silent = suspects(site, self._live, self._config)
        probes = dict(zip(silent, await asyncio.gather(*(self._probe(host) for host in silent)), strict=True))
        proposals = [
            *decide_lapses(site, self._live, self._config, probes),
            *decide_withdrawals(site, self._live, self._config, probes),
            *decide_expiries(site, self._now_s()),
        ]
        if proposals:
            await self.commit(proposals)
        if waits := decide_waits(site, self._live, self._config, self._now_s()):
            await self.commit(waits)

    # --- committing

    async def commit(self, proposals: Sequence[Proposal]) -> bool:
        """Append each, and return when the state holds all that came of it: whether anything was appended.

        Raises:
            LogUnavailable, WaitTimedOut: the log does not answer. Nothing is lost: the next look decides on what it
                says then.
        """
        if len(proposals) == 1:
            outcomes = [await self._recorder.record(proposals[0])]
        else:
            outcomes = await asyncio.gather(*(self._recorder.record(proposal) for proposal in proposals))
        lost = [(p, o) for p, o in zip(proposals, outcomes, strict=True) if not isinstance(o, Appended)]
        newest = max((outcome.seq for outcome in outcomes if isinstance(outcome, Appended)), default=0)
        for proposal, outcome in lost:
            await self._on_lost(proposal, outcome)
        if lost:
            # What it was lost to must be folded too, or the next decision would rest on the same state.
            last = await self._log.last(">")
            newest = max(newest, 0 if last is None else last.seq)
        if newest:
            await self._projection.wait_folded(newest)
        return len(lost) < len(proposals)

    async def _on_lost(self, proposal: Proposal, outcome: Outcome) -> None:
        """Somebody else wrote first, or the log takes nothing: the lane looks again before it decides again."""
        code = outcome.code if isinstance(outcome, Refused) else "unanswered"
        detail = "" if isinstance(outcome, Appended) else outcome.detail
        _log.info("append_lost", subject=proposal.subject, type=proposal.fact.TYPE, code=code, detail=detail)
        fact = proposal.fact
        is_answer = isinstance(fact, Accepted | Rejected | Resubmitted)
        if code == "stale" and is_answer and fact.job not in self.site.jobs:
            await self._learn(fact.job, fact.submission_seq)

    async def _learn(self, job_id: str, submission_seq: int) -> None:
        """The id was used by a job that the fold has forgotten: read from the log what stands there."""
        history = [decode(stored) for stored in await self._log.read(subjects.job(job_id))]
        known = known_from(history, submission_seq)
        if known is not None:
            self._known[job_id] = known


def _claims_by_host(site: Site) -> dict[str, tuple[int, ...]]:
    """Epochs of the claims that stand, by host; a host that only has routes is there with none."""
    claims: dict[str, tuple[int, ...]] = {}
    for device in site.devices.values():
        if device.claims:
            claims[device.host] = (*claims.get(device.host, ()), *(claim.epoch for claim in device.claims))
    for key, jobs in site.routed.items():
        if jobs:
            claims.setdefault(key.partition("/")[0], ())
    return claims
