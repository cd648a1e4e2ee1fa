"""From the queue to devices: who goes where now, and why the others wait."""

from __future__ import annotations

import msgspec

from gpukeeper.events import subjects
from gpukeeper.events.job import Unroutable, Waiting
from gpukeeper.events.proposal import Proposal
from gpukeeper.events.reasons import Reason
from gpukeeper.events.route import Routed
from gpukeeper.projections.job import Job
from gpukeeper.projections.site import Site
from gpukeeper.scheduler.config import SchedulerConfig
from gpukeeper.scheduler.estimate import TOO_LITTLE_MEMORY
from gpukeeper.scheduler.feasible import NO_HOST_YET, Infeasible, Option, Want, options
from gpukeeper.scheduler.live import Live
from gpukeeper.scheduler.rank import DRAINED, NO_FREE_SLOT, Ranked, best_first, rank

#: How many candidates a `routed` fact shows.
_CANDIDATES_SHOWN_MAX = 16


class Verdict(msgspec.Struct, frozen=True):
    """Why a job is not going anywhere now."""

    reason: Reason
    detail: str


def want_of(job: Job) -> Want:
    return Want(job.model, job.runtime, job.host, job.device, job.place, job.vram_mb, job.gpus)


class Router:
    """One look over the queue. Slots that it gives out are gone for the rest of the look."""

    def __init__(self, site: Site, live: Live, config: SchedulerConfig, now_s: float) -> None:
        self._site = site
        self._live = live
        self._weights = config.weights
        self._now_s = now_s
        self._free = {key: site.free_slots(device) for key, device in site.devices.items()}
        self._options: dict[Want, list[Option] | Infeasible] = {}

    def any_free(self) -> bool:
        return any(free > 0 for free in self._free.values())

    def choose(self, job: Job) -> list[Ranked] | Verdict:
        """Every candidate, the place to send ``job`` to now first, or why there is none."""
        want = want_of(job)
        found = self._options.get(want)
        if found is None:
            found = self._options[want] = options(self._site, want)
        if isinstance(found, Infeasible):
            return Verdict(Reason.NO_ROUTE, f"{found.path} {found.value!r}: {found.detail}")
        if not found:
            return Verdict(Reason.NO_ROUTE, NO_HOST_YET)
        unordered = [self._rank(job, option) for option in found]
        ranked = best_first(unordered, job.origin)
        return ranked if ranked[0].immediate else _verdict(ranked)

    def _rank(self, job: Job, option: Option) -> Ranked:
        """Of a job that takes several devices: by the first of those that can begin now, or by what holds it up."""
        ranked = [
            rank(
                self._site,
                self._live,
                self._weights,
                job,
                option if each is option.device else msgspec.structs.replace(option, device=each),
                self._free.get(each.key, 0),
                self._now_s,
            )
            for each in option.pool
        ]
        if option.gpus == 1:
            return ranked[0]
        ready = [one for one in ranked if one.immediate][: option.gpus]
        if len(ready) == option.gpus:
            return msgspec.structs.replace(ready[0], more=tuple(one.option.device for one in ready[1:]))
        return next(one for one in ranked if not one.immediate)

    def take(self, ranked: Ranked) -> None:
        for device in (ranked.option.device, *ranked.more):
            self._free[device.key] -= 1


def _verdict(ranked: list[Ranked]) -> Verdict:
    """Waiting for a slot beats waiting for a repair: the mildest reason is the one that will end the wait."""
    reasons = [one.candidate.unavailable or "" for one in ranked]
    shown = "; ".join(
        f"{one.candidate.host}/{one.candidate.device} {one.candidate.runtime}: {why}"
        for one, why in list(zip(ranked, reasons, strict=True))[:4]
    )
    if any(why == NO_FREE_SLOT for why in reasons):
        return Verdict(Reason.CAPACITY, "every device that could take it is in use")
    if any(why.startswith(TOO_LITTLE_MEMORY) for why in reasons):
        return Verdict(Reason.CAPACITY, shown)
    if any(why.startswith("it denied the job") for why in reasons):
        return Verdict(Reason.DENIED, shown)
    if any(why.startswith(DRAINED) for why in reasons):
        return Verdict(Reason.DRAINED, shown)
    return Verdict(Reason.NO_ROUTE, shown)


def decide_routes(site: Site, live: Live, config: SchedulerConfig, now_s: float, *, limit: int = 64) -> list[Proposal]:
    """Send waiting jobs to devices that can begin now, in queue order; what cannot go lets others pass."""
    if not len(site.queue):
        return []
    router = Router(site, live, config, now_s)
    proposals: list[Proposal] = []
    #: Wants that found nothing: the same want further back finds nothing either.
    hopeless: set[Want] = set()
    for job_id in site.queue:
        if len(proposals) >= limit or not router.any_free():
            break
        job = site.jobs[job_id]
        want = want_of(job)
        if want in hopeless or job.cancel is not None:
            # Whose end was promised goes nowhere any more.
            continue
        choice = router.choose(job)
        if isinstance(choice, Verdict):
            if not job.denials:
                hopeless.add(want)
            continue
        router.take(choice[0])
        proposals.append(_route(job, choice))
    return proposals


def _route(job: Job, ranked: list[Ranked]) -> Proposal:
    assert job.clocks is not None, "a waiting job was accepted with its clocks"
    place = ranked[0].candidate
    fact = Routed(
        job=job.id,
        host=place.host,
        device=place.device,
        runtime=place.runtime,
        submission_seq=job.submission_seq,
        job_seq=job.seq,
        more_devices=tuple(device.id for device in ranked[0].more),
        attempt=job.attempt + 1,
        clocks=job.clocks,
        score=place.score,
        why="immediate, " + ("the only candidate" if len(ranked) == 1 else f"best of {len(ranked)}"),
        candidates=tuple(one.candidate for one in ranked[:_CANDIDATES_SHOWN_MAX]),
    )
    return Proposal(
        subject=subjects.route(place.host, job.id),
        fact=fact,
        expected=job.route_seq(place.host),
        aggregate=job.id,
        correlationid=job.id,
    )


def _tells_more(job: Job, verdict: Verdict) -> bool:
    """Whether a job that was told to wait for a slot waits for memory by now. Not the other way round: slots come and
    go with every job that passes."""
    return TOO_LITTLE_MEMORY in verdict.detail and TOO_LITTLE_MEMORY not in job.detail


def decide_waits(site: Site, live: Live, config: SchedulerConfig, now_s: float, *, limit: int = 64) -> list[Proposal]:
    """Say why jobs wait where the reason changed, and answer those that did not want to wait."""
    router = Router(site, live, config, now_s)
    seen: dict[Want, Verdict | None] = {}
    proposals: list[Proposal] = []
    for job_id in site.queue:
        if len(proposals) >= limit:
            break
        job = site.jobs[job_id]
        want = want_of(job)
        if job.denials or want not in seen:
            choice = router.choose(job)
            verdict = choice if isinstance(choice, Verdict) else None
            if not job.denials:
                seen[want] = verdict
        else:
            verdict = seen[want]
        if verdict is None:
            continue
        if job.on_capacity == "reject":
            fact = Unroutable(job=job.id, reason=verdict.reason, detail=verdict.detail)
        elif job.reason != verdict.reason or _tells_more(job, verdict):
            fact = Waiting(job=job.id, reason=verdict.reason, detail=verdict.detail)
        else:
            continue
        proposals.append(
            Proposal(
                subject=subjects.job(job.id),
                fact=fact,
                expected=job.seq,
                aggregate=job.id,
                correlationid=job.id,
            )
        )
    return proposals
