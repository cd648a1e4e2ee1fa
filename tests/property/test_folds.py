"""Invariants 1, 3 and 7 of the folds, over histories that could be and over histories that could not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpukeeper.events import subjects
from gpukeeper.events.codec import decode
from gpukeeper.events.fact import Fact
from gpukeeper.events.job import ENDS, LateResult, Resubmitted, is_note
from gpukeeper.events.reasons import Reason
from gpukeeper.projections.hostview import HostView
from gpukeeper.projections.job import Phase
from gpukeeper.projections.site import Retention, Site, SiteState
from gpukeeper.projections.snapshot import encode_state
from support.history import History

RETENTION = Retention(after_s=40.0, above=4)


def restored(site: Site) -> Site:
    """Through the bytes of a snapshot and back."""
    return Site.restore(msgspec.msgpack.decode(encode_state(site), type=SiteState))


def derived(site: Site) -> dict[str, Any]:
    """What is not stored, and what decisions rest on all the same."""
    return {
        "queue": list(site.queue),
        "live": list(site.live),
        "routed": {key: list(jobs) for key, jobs in sorted(site.routed.items()) if jobs},
        "free": {key: site.free_slots(device) for key, device in site.devices.items()},
    }


def folded(h: History, cuts: set[int], *, again: int = 0) -> Site:
    """Fold from the stored bytes, with a snapshot at each cut, and the last ``again`` events handed over twice."""
    site = Site(h.site.retention)
    for event in h.events:
        site.apply(decode(event.stored))
        if event.seq in cuts:
            site = restored(site)
        for earlier in h.events[max(0, event.seq - again) : event.seq]:
            site.apply(earlier)
    return site


def check_folds_agree(h: History, cuts: set[int], again: int) -> None:
    expected, of_it = encode_state(h.site), derived(h.site)
    for site in (folded(h, set()), folded(h, cuts), folded(h, cuts, again=again), restored(h.site)):
        assert encode_state(site) == expected
        assert derived(site) == of_it


# --- histories that could not be

JOBS, HOSTS, DEVICES = st.sampled_from("abc"), st.sampled_from(["h1", "h2"]), st.sampled_from(["g0", "g1"])
NUMBERS = st.integers(0, 30)
Deed = Callable[[History], object]


def deeds() -> st.SearchStrategy[Deed]:
    """Anything at any time, about anything."""

    def of(method: Callable[..., object], **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Deed]:
        def deed(given: dict[str, Any]) -> Deed:
            return lambda h: method(h, **given)

        return st.fixed_dictionaries(arguments).map(deed)

    place = {"name": HOSTS, "device_id": DEVICES}
    epoch, route_seq = st.none() | NUMBERS, st.none() | NUMBERS
    job_only = (
        History.placed,
        History.misplaced,
        History.started,
        History.progressed,
        History.succeeded,
        History.failed,
        History.preempted,
    )
    return st.one_of(
        of(History.submitted, id=JOBS),
        of(History.accepted, job_id=JOBS, priority=st.integers(-1, 1)),
        of(History.waits, job_id=JOBS, epoch=epoch),
        of(History.routed, job_id=JOBS, **place),
        of(History.unrouted, job_id=JOBS, name=HOSTS, route_seq=route_seq),
        of(History.claimed, job_id=JOBS, **place, route_seq=route_seq, slot=st.integers(0, 1)),
        of(History.admitted, job_id=JOBS, **place, epoch=epoch),
        of(History.denied, job_id=JOBS, **place),
        *(of(method, job_id=JOBS) for method in job_only),
        of(History.cancel_wanted, job_id=JOBS),
        of(History.cancel_requested, job_id=JOBS, command_seq=NUMBERS),
        of(History.cancelled, job_id=JOBS, command_seq=NUMBERS),
        of(History.released, job_id=JOBS, **place, epoch=epoch),
        of(History.lapsed, job_id=JOBS, **place, epoch=epoch),
        of(History.appeared, **place, slots=st.integers(0, 2)),
        of(History.changed, state=st.sampled_from(["lost", "healthy"]), **place),
        of(History.joined, name=HOSTS, instance=st.none() | st.just("other")),
        of(History.left, name=HOSTS),
        of(History.health, name=HOSTS, suspect=st.none() | st.just("still")),
        of(History.suspected, name=HOSTS),
        of(History.elected),
        of(History.after, seconds=st.sampled_from([1.0, 15.0, 60.0])),
        of(
            History.stored,
            subject=st.sampled_from(
                (
                    "gpuq.ev.job.a",
                    "gpuq.ev.route.h1.a",
                    "gpuq.ev.device.h1.g0",
                    "gpuq.ev.runtime.h1.ollama",
                    "gpuq.ev.host.h1",
                    "gpuq.ev.site",
                    "gpuq.cmd.op",
                    "gpuq.ev.x",
                    "gpuq.ev.job.a.b",
                )
            ),
            body=st.sampled_from(
                [
                    b"",
                    b'{"specversion":"1.0","id":"i","source":"s","type":"new.v1","subject":"s","time":"t","data":1}',
                    b'{"specversion":"1.0","id":"i","source":"s","type":"gpuq.job.succeeded.v1","subject":"s",'
                    b'"time":"t","data":{"job":"b","epoch":1,"attempt":1}}',
                ]
            ),
        ),
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(deeds(), min_size=20, max_size=80), st.sets(st.integers(1, 60), max_size=4), st.integers(0, 5))
def test_any_history_folds_to_the_same_bytes_however_it_is_cut_and_repeated(
    deeds: list[Deed], cuts: set[int], again: int
) -> None:
    h = History(RETENTION)
    for deed in deeds:
        deed(h)

    check_folds_agree(h, cuts, again)


@settings(max_examples=150, deadline=None)
@given(st.lists(deeds(), min_size=40, max_size=80))
def test_whatever_is_in_the_log_an_ended_job_stays_ended_and_the_indexes_stay_in_step(deeds: list[Deed]) -> None:
    h = History(Retention())
    ended: dict[str, Phase] = {}
    for deed in deeds:
        deed(h)
        for job in h.site.jobs.values():
            assert ended.get(job.id, job.phase) == job.phase
            if job.ended:
                ended[job.id] = job.phase
        check_indexes(h.site)


def check_indexes(site: Site) -> None:
    assert set(site.queue) == {job.id for job in site.jobs.values() if job.phase is Phase.WAITING}
    assert set(site.live) == {job.id for job in site.jobs.values() if not job.ended}
    for key, jobs in site.routed.items():
        for job_id in jobs:
            route = site.jobs[job_id].route
            assert route is not None
            assert f"{route.host}/{route.device}" == key
    assert set(site.lapses) <= set(site.live) - set(site.queue)
    for host in site.hosts:
        HostView.from_site(site, host)


# --- histories that could be


class Lives(RuleBasedStateMachine):
    """Schedulers and agents that keep the rules: one decision an event, claims and admissions as the log allows.

    Two leaders may route one job twice, agents may sleep and wake late, claims lapse at any time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.h = History(RETENTION)
        self.number = 0
        #: What each agent believes: the attempt of an epoch, with the job's sequence that it knows.
        self.attempts: dict[int, tuple[str, str, int, int]] = {}

    @initialize()
    def begin(self) -> None:
        self.h.joined("h1", slots=2)
        self.h.joined("h2")

    # --- the schedulers

    @rule(priority=st.integers(0, 2))
    def submit(self, priority: int) -> None:
        self.number += 1
        self.h.accepted(f"j{self.number}", priority=priority)

    def in_phase(self, *phases: Phase) -> list[str]:
        return [job.id for job in self.h.site.jobs.values() if job.phase in phases]

    @precondition(lambda self: self.in_phase(Phase.WAITING))
    @rule(data=st.data(), host=HOSTS)
    def route(self, data: st.DataObject, host: str) -> None:
        if self.h.site.free_slots(self.h.device(host)) > 0:
            self.h.routed(data.draw(st.sampled_from(self.in_phase(Phase.WAITING))), host)

    @precondition(lambda self: self.in_phase(Phase.ROUTED))
    @rule(data=st.data())
    def a_second_leader_routes(self, data: st.DataObject) -> None:
        self.h.routed(data.draw(st.sampled_from(self.in_phase(Phase.ROUTED))), "h2")

    @precondition(lambda self: self.in_phase(Phase.WAITING, Phase.ROUTED))
    @rule(data=st.data())
    def say_why_it_waits(self, data: st.DataObject) -> None:
        self.h.waits(data.draw(st.sampled_from(self.in_phase(Phase.WAITING, Phase.ROUTED))))

    @precondition(lambda self: self.in_phase(Phase.ROUTED))
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        job = self.h.job(data.draw(st.sampled_from(self.in_phase(Phase.ROUTED))))
        assert job.route is not None
        self.h.unrouted(job.id, job.route.host, route_seq=job.route.seq)

    @precondition(lambda self: self.in_phase(Phase.WAITING, Phase.ROUTED))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.h.cancelled(data.draw(st.sampled_from(self.in_phase(Phase.WAITING, Phase.ROUTED))))

    @precondition(lambda self: self.in_phase(Phase.ADMITTED, Phase.PLACED, Phase.RUNNING))
    @rule(data=st.data())
    def ask_for_the_end(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.in_phase(Phase.ADMITTED, Phase.PLACED, Phase.RUNNING)))
        self.h.cancel_requested(job)

    @precondition(lambda self: any(d.claims for d in self.h.site.devices.values()))
    @rule(data=st.data())
    def lapse(self, data: st.DataObject) -> None:
        claims = [(d.host, c) for d in self.h.site.devices.values() for c in d.claims]
        host, claim = data.draw(st.sampled_from(claims))
        self.h.lapsed(claim.job, host, epoch=claim.epoch)

    @precondition(lambda self: self.h.site.lapses)
    @rule(data=st.data())
    def settle_an_orphan(self, data: st.DataObject) -> None:
        job = self.h.job(data.draw(st.sampled_from(list(self.h.site.lapses))))
        if job.phase is Phase.ROUTED:
            assert job.route is not None
            self.h.unrouted(job.id, job.route.host, route_seq=job.route.seq)
        elif job.phase is Phase.RUNNING:
            self.h.failed(job.id, reason=Reason.OUTCOME_UNKNOWN)
        else:
            self.h.waits(job.id, reason=Reason.CLAIM_LAPSED, epoch=self.h.site.lapses[job.id].epoch)

    @rule(seconds=st.sampled_from([1.0, 20.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.h.after(seconds)

    # --- the agents

    @rule(data=st.data(), host=HOSTS)
    def claim(self, data: st.DataObject, host: str) -> None:
        view = HostView(host)
        for event in self.h.events:
            if any(subjects.matches(p, event.stored.subject) for p in subjects.followed_by_agent(host)):
                view.apply(event)
        device = self.h.device(host)
        free = set(range(device.slots)) - {claim.slot for claim in device.claims}
        if free and view.routes:
            route = view.routes[data.draw(st.sampled_from(list(view.routes)))]
            epoch = self.h.claimed(route.job, host, slot=min(free), route_seq=route.seq)
            self.attempts[epoch] = (route.job, host, route.seq, route.job_seq)

    def history(self, job: str, after: int = 0) -> list[tuple[int, Fact]]:
        return [
            (event.seq, event.data)
            for event in self.h.events
            if event.stored.subject == subjects.job(job) and event.seq > after and isinstance(event.data, Fact)
        ]

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), give_up=st.booleans())
    def go_on(self, data: st.DataObject, give_up: bool) -> None:
        """The next step of an attempt, where nothing but notes and wishes came between."""
        epoch = data.draw(st.sampled_from(list(self.attempts)))
        job, host, _, known = self.attempts[epoch]
        later = self.history(job, known)
        stands = any(claim.epoch == epoch for claim in self.h.device(host).claims)
        moved_on = any(not is_note(fact) and fact.TYPE != "gpuq.job.cancel_requested.v1" for _, fact in later)
        phase = self.h.site.jobs[job].phase if job in self.h.site.jobs else None
        if moved_on or phase is None:
            del self.attempts[epoch]
            if stands:
                self.h.released(job, host, epoch=epoch)
            return
        steps: dict[Phase, Callable[[], int]] = {
            Phase.WAITING: lambda: self.h.admitted(job, host, epoch=epoch),
            Phase.ROUTED: lambda: self.h.admitted(job, host, epoch=epoch),
            Phase.ADMITTED: lambda: self.h.placed(job),
            Phase.PLACED: lambda: self.h.started(job),
            Phase.RUNNING: lambda: self.h.succeeded(job),
        }
        seq = self.h.failed(job) if give_up else steps[phase]()
        self.attempts[epoch] = (job, host, 0, seq)
        if give_up or phase is Phase.RUNNING:
            del self.attempts[epoch]
            if stands:
                self.h.released(job, host, epoch=epoch)

    # --- what must hold

    @invariant()
    def no_slot_has_two_claims(self) -> None:
        for device in self.h.site.devices.values():
            slots = [claim.slot for claim in device.claims]
            assert len(slots) == len(set(slots)) <= device.slots

    @invariant()
    def a_job_ends_once_and_only_notes_follow(self) -> None:
        for number in range(1, self.number + 1):
            facts = [fact for _, fact in self.history(f"j{number}")]
            ends = [place for place, fact in enumerate(facts) if isinstance(fact, ENDS)]
            assert len(ends) <= 1
            if ends:
                assert all(isinstance(fact, LateResult | Resubmitted) for fact in facts[ends[0] + 1 :])

    @invariant()
    def nothing_live_is_left_without_somebody_who_moves_it_on(self) -> None:
        """A job past the queue has a route that waits for its claim, a claim that stands, or is an orphan."""
        site = self.h.site
        for job_id in site.live:
            job = site.jobs[job_id]
            if job.phase is Phase.WAITING or job_id in site.lapses:
                continue
            assert job.route is not None
            device = self.h.device(job.route.host)
            if job.phase is Phase.ROUTED:
                promised = job_id in site.routed.get(device.key, ())
                assert promised or device.follows_route(job_id, job.route.seq)
            else:
                assert device.claim(job.epoch) is not None

    @invariant()
    def indexes_are_in_step(self) -> None:
        check_indexes(self.h.site)

    @invariant()
    def a_restart_loses_nothing(self) -> None:
        again = restored(self.h.site)
        assert encode_state(again) == encode_state(self.h.site)
        assert derived(again) == derived(self.h.site)

    def teardown(self) -> None:
        check_folds_agree(self.h, {5, 17, 40}, again=3)


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
