"""Invariants 2, 5 and 10 over random owners, readings and histories: whatever is late, missing or wrong.

The rules are stated here once more, from the facts and not from the code that is tested.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import combinations

import msgspec
from hypothesis import event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from gpukeeper.capacity.admission import Admit, Ledger
from gpukeeper.capacity.decision import Question, decide
from gpukeeper.capacity.device import Device
from gpukeeper.capacity.idleness import GAP_MAX_S, Idleness
from gpukeeper.capacity.need import Need
from gpukeeper.capacity.owners import Tenant, owners_on
from gpukeeper.capacity.preview import Candidate, preview
from gpukeeper.capacity.reclaim import Owner, plan, unmanaged_mb
from gpukeeper.events.instants import parse_utc, utc_text
from gpukeeper.events.readings import Activity, DeviceReading, DeviceState, Holding, ResidentModel, RuntimeReading
from gpukeeper.events.reasons import Reason

START = parse_utc("2025-06-01T12:00:00Z")
DEVICE = "GPU-1"
GRACE_S = 300.0
MB = 1024 * 1024

#: Why an owner may stay: nothing else is ever given.
WHY = {
    Reason.OTHER_DEVICE,
    Reason.NOT_RELEASABLE,
    Reason.PINNED,
    Reason.OWNER_BUSY,
    Reason.ACTIVITY_UNKNOWN,
    Reason.IN_GRACE,
    Reason.NOT_NEEDED,
    Reason.INSUFFICIENT,
}

#: What may be wrong with an owner that could go otherwise, field by field.
FLAWS: dict[str, st.SearchStrategy[object]] = {
    "held_mb": st.sampled_from([None, 0, -10, 50_000]),
    "on_device": st.sampled_from([False, None]),
    "activity": st.sampled_from(["busy", "unknown"]),
    "idle_s": st.sampled_from([None, 0.0, 299.999, 300.0, -1.0, float("nan"), float("inf")]),
    "pinned": st.just(True),
    "releases": st.sampled_from(["none", "model", "all"]),
    "jobs_here": st.sampled_from([1, 3]),
    "loading": st.just(True),
    "stopping": st.just(True),
}


@st.composite
def owner_lists(draw: st.DrawFn, *, most: int = 9) -> tuple[Owner, ...]:
    """Most may go, or every choice would be empty; the others have mostly one flaw, so that each rule is alone."""
    found: list[Owner] = []
    for index in range(draw(st.integers(0, most))):
        by_model = draw(st.booleans())
        good = Owner(
            runtime=f"r{index}",
            model="m" if by_model else None,
            held_mb=draw(st.integers(1, 30)),
            on_device=True,
            activity="idle",
            idle_s=draw(st.sampled_from([300.0, 301.0, 900.0])),
            grace_s=GRACE_S,
            releases="model" if by_model else "all",
        )
        flaws = draw(st.sets(st.sampled_from(sorted(FLAWS)), max_size=draw(st.sampled_from([0, 0, 1, 1, 4]))))
        found.append(msgspec.structs.replace(good, **{name: draw(FLAWS[name]) for name in sorted(flaws)}))
    return tuple(found)


def may_go(owner: Owner) -> bool:
    """Invariant 5, written from the design."""
    return (
        owner.on_device is True
        and owner.held_mb is not None
        and owner.held_mb > 0
        and owner.releases == ("all" if owner.model is None else "model")
        and not owner.pinned
        and not owner.stopping
        and not owner.loading
        and owner.jobs_here == 0
        and owner.activity == "idle"
        and owner.idle_s is not None
        and owner.idle_s >= owner.grace_s
    )


def held(owners: Sequence[Owner]) -> int:
    return sum(owner.held_mb or 0 for owner in owners)


@settings(max_examples=300, deadline=None)
@given(owners=owner_lists(), shortfall_mb=st.none() | st.integers(-3, 150))
def test_only_who_may_go_is_chosen_and_everybody_is_accounted_for(
    owners: tuple[Owner, ...], shortfall_mb: int | None
) -> None:
    found = plan(shortfall_mb, owners)

    assert all(may_go(owner) for owner in found.chosen)
    assert [(each.runtime, each.model, each.held_mb) for each in found.considered] == [
        (owner.runtime, owner.model, owner.held_mb) for owner in owners
    ]
    gone = {(each.runtime, each.model) for each in found.considered if each.kept is None}
    assert gone == {(owner.runtime, owner.model) for owner in found.chosen}
    assert all(each.kept in WHY and each.detail for each in found.considered if each.kept is not None)
    for owner, each in zip(owners, found.considered, strict=True):
        if each.kept in (Reason.NOT_NEEDED, Reason.INSUFFICIENT):
            assert may_go(owner)


@settings(max_examples=300, deadline=None)
@given(owners=owner_lists(), shortfall_mb=st.sampled_from([-3, 0]) | st.integers(1, 150))
def test_the_least_that_fits_is_what_trying_everything_finds(owners: tuple[Owner, ...], shortfall_mb: int) -> None:
    free = [owner for owner in owners if may_go(owner)]
    subsets = [subset for size in range(len(free) + 1) for subset in combinations(free, size)]
    sufficient = [subset for subset in subsets if held(subset) >= shortfall_mb]
    found = plan(shortfall_mb, owners)

    event("sufficient" if sufficient else "not sufficient")
    assert found.enough == bool(sufficient)
    assert found.would_free_mb == held(found.chosen)
    if not sufficient:
        assert found.chosen == ()
    else:
        best = min((held(subset), len(subset)) for subset in sufficient)
        assert (found.would_free_mb, len(found.chosen)) == (best if shortfall_mb > 0 else (0, 0))


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9000), min_size=10, max_size=16),
    share=st.floats(0.05, 1.0),
)
def test_the_least_that_fits_is_exact_also_for_many_owners(sizes: list[int], share: float) -> None:
    owners = [
        Owner(
            runtime=f"r{index}",
            held_mb=mb,
            on_device=True,
            activity="idle",
            idle_s=400.0,
            grace_s=GRACE_S,
            releases="all",
        )
        for index, mb in enumerate(sizes)
    ]
    shortfall_mb = max(1, int(sum(sizes) * share))
    counts: dict[int, int] = {0: 0}
    for mb in sizes:
        for total, count in list(counts.items()):
            counts[total + mb] = min(count + 1, counts.get(total + mb, len(sizes)))
    total = min(total for total in counts if total >= shortfall_mb)
    found = plan(shortfall_mb, owners)

    assert (found.would_free_mb, len(found.chosen)) == (total, counts[total])


@settings(max_examples=200, deadline=None)
@given(owners=owner_lists(), shortfall_mb=st.none() | st.integers(0, 150), seed=st.integers(0, 1000))
def test_the_choice_is_the_same_in_whatever_order_the_owners_are_named(
    owners: tuple[Owner, ...], shortfall_mb: int | None, seed: int
) -> None:
    shuffled = list(owners)
    random.Random(seed).shuffle(shuffled)
    one, other = plan(shortfall_mb, owners), plan(shortfall_mb, shuffled)

    assert one.chosen == other.chosen
    assert {repr(each) for each in one.considered} == {repr(each) for each in other.considered}


looks = st.tuples(
    st.sampled_from([0.0, 1.0, 5.0, 5.0, 5.0, GAP_MAX_S, GAP_MAX_S + 0.5, 400.0, -1.0, -300.0]),
    st.sampled_from(["idle"] * 12 + ["busy", "unknown"]),
    st.sampled_from([0] * 12 + [1]),
)


@settings(max_examples=300, deadline=None)
@given(history=st.lists(looks, max_size=120), later_s=st.sampled_from([0.0, 3.0, GAP_MAX_S, GAP_MAX_S + 1, -1.0]))
def test_idleness_is_what_the_unbroken_looks_before_now_prove(
    history: list[tuple[float, Activity, int]], later_s: float
) -> None:
    at = START
    found = Idleness()
    moments: list[tuple[float, bool]] = []
    for step_s, activity, jobs in history:
        at += timedelta(seconds=step_s)
        found = found.looked(at, activity, jobs)
        moments.append(((at - START).total_seconds(), activity == "idle" and jobs == 0))
    now_s = (at - START).total_seconds() + later_s

    proven: float | None = None
    if moments and moments[-1][1] and 0 <= now_s - moments[-1][0] <= GAP_MAX_S:
        first = last = moments[-1][0]
        for moment, idle in reversed(moments[:-1]):
            if not idle or not 0 <= first - moment <= GAP_MAX_S:
                break
            first = moment
        proven = last - first
    assert found.idle_s(START + timedelta(seconds=now_s)) == proven


_STATES: tuple[DeviceState, ...] = ("healthy", "healthy", "healthy", "healthy", "lost", "unknown", "blocked")
states = st.sampled_from(_STATES)


@st.composite
def questions(draw: st.DrawFn) -> Question:
    """Mostly one flaw or none, with a need a little above what is free: there, releases are looked at."""
    flaw = draw(st.sampled_from(["", "", "reading", "drained", "blocked", "source", "resident", "need"]))
    total_mb = draw(st.sampled_from([None, 100])) if flaw == "reading" else 100
    free_mb = draw(st.none() | st.integers(0, 60)) if flaw == "reading" else draw(st.integers(0, 60))
    reserved_mb = draw(st.sampled_from([0, 10]))
    need_mb = max(0, (free_mb or 0) - reserved_mb + draw(st.integers(-20, 60)))
    return Question(
        device=Device(id=DEVICE, kind="gpu", name="card", headroom_mb=draw(st.sampled_from([0, 5]))),
        reading=DeviceReading(
            device=DEVICE,
            source="static" if flaw == "source" else "nvml",
            read_at=utc_text(START),
            state=draw(states) if flaw == "reading" else "healthy",
            total_mb=total_mb,
            used_mb=None if total_mb is None or free_mb is None else total_mb - free_mb,
            free_mb=free_mb,
        ),
        reserved_mb=reserved_mb,
        need=draw(st.sampled_from([None, Need(vram_mb=None)])) if flaw == "need" else Need(vram_mb=need_mb),
        resident=flaw == "resident",
        allow_unknown_need=draw(st.booleans()),
        drained="by ops" if flaw == "drained" else None,
        blocked="an owner stays" if flaw == "blocked" else None,
        owners=draw(owner_lists(most=6)),
    )


@settings(max_examples=300, deadline=None)
@given(question=questions())
def test_nobody_is_asked_to_let_go_where_that_could_not_let_the_job_start(question: Question) -> None:
    found = decide(question)

    assert all(may_go(owner) for owner in found.releases)
    if found.releases:
        event("releases")
        reading = question.reading
        assert isinstance(found.admission, Admit) is False
        assert reading.state == "healthy"
        assert reading.source == "nvml", "on others, no reading would show it"
        assert (question.drained, question.blocked, question.device.unschedulable) == (None, None, None)
        assert reading.free_mb is not None
        assert reading.used_mb is not None
        # Where the owners keep their promise, the same decision on the next reading is a yes.
        freed = held(found.releases)
        after = msgspec.structs.replace(
            reading,
            total_mb=max(reading.total_mb or 0, reading.free_mb + freed),
            used_mb=max(0, reading.used_mb - freed),
            free_mb=reading.free_mb + freed,
        )
        again = decide(msgspec.structs.replace(question, reading=after, owners=()))
        assert isinstance(again.admission, Admit)


@settings(max_examples=200, deadline=None)
@given(question=questions())
def test_a_preview_says_what_the_decision_does_and_changes_nothing(question: Question) -> None:
    before = repr(question)
    place = preview("m", [Candidate(host="h", runtime="r", question=question)]).places[0]
    found = decide(question)

    assert repr(question) == before
    assert (place.outcome == "starts") == isinstance(found.admission, Admit)
    assert [(each.runtime, each.model) for each in place.would_release] == [
        (owner.runtime, owner.model) for owner in found.releases
    ]
    assert all(each.kept is not None for each in place.stays)
    assert (place.reason is None) == (place.outcome in ("starts", "releases"))
    assert place.changes or place.outcome in ("starts", "releases")


class Shared(RuleBasedStateMachine):
    """A card that runtimes, strangers and our jobs share. It has a truth; the agent has readings of it.

    Runtimes work, rest, lie about what they hold and let go of less than they promised. Whatever happens: nothing is
    admitted beyond what the deciding reading shows, and nobody is asked to let go who had not rested for his grace.
    """

    def __init__(self) -> None:
        super().__init__()
        self.at = START
        self.ledger = Ledger()
        self.epoch = 0
        self.resident_mb = 0
        self.strangers_mb = 0
        self.held_mb: dict[str, int] = {}
        self.says_mb: dict[str, int | None] = {}
        self.works: dict[str, bool] = {}
        self.rests_since: dict[str, datetime] = {}
        self.pins: set[str] = set()
        self.jobs: dict[str, int] = {}
        self.idleness: dict[str, Idleness] = {}
        self.seen: dict[str, RuntimeReading | None] = {}

    @initialize(
        held=st.lists(st.integers(100, 4000), min_size=1, max_size=4),
        strangers_mb=st.integers(0, 4000),
        rested=st.booleans(),
    )
    def begin(self, held: list[int], strangers_mb: int, rested: bool) -> None:
        for index, mb in enumerate(held):
            name = f"r{index}"
            self.held_mb[name] = self.says_mb[name] = mb
            self.works[name] = False
            self.rests_since[name] = self.at
            self.jobs[name] = 0
            self.idleness[name] = Idleness()
            self.seen[name] = None
        self.strangers_mb = strangers_mb
        self.total_mb = 20_000
        self.headroom_mb = 300
        self.look_on_and_on(times=62 if rested else 1)

    def pick(self, index: int) -> str:
        return sorted(self.held_mb)[index % len(self.held_mb)]

    @property
    def used_mb(self) -> int:
        return sum(self.held_mb.values()) + self.strangers_mb + self.resident_mb

    @rule(missing=st.lists(st.integers(0, 3), max_size=1))
    def look(self, missing: list[int]) -> None:
        """Reads all, but for the runtimes that do not answer."""
        self.at += timedelta(seconds=1)
        silent = {self.pick(index) for index in missing}
        for name in self.held_mb:
            mb = self.says_mb[name]
            healthy = name not in silent
            reading = RuntimeReading(
                runtime=name,
                read_at=utc_text(self.at),
                healthy=healthy,
                activity="busy" if self.works[name] else "idle",
                resident=(ResidentModel(model="m", vram_bytes=None if mb is None else mb * MB),),
                holdings=None if mb is None else (Holding(device=DEVICE, mb=mb),),
            )
            self.seen[name] = reading
            self.idleness[name] = self.idleness[name].read(reading, self.jobs[name])
        self.reading = DeviceReading(
            device=DEVICE,
            source="nvml",
            read_at=utc_text(self.at),
            total_mb=self.total_mb,
            used_mb=self.used_mb,
            free_mb=self.total_mb - self.used_mb,
        )
        self.ledger = self.ledger.seen_in(self.reading)

    @rule(times=st.sampled_from([2, 31, 59, 62]))
    def look_on_and_on(self, times: int) -> None:
        for _ in range(times):
            self.at += timedelta(seconds=4)
            self.look([])

    @rule(seconds=st.sampled_from([10, 100, 400]))
    def nobody_looks(self, seconds: int) -> None:
        """What happens meanwhile is not known: every runtime may have worked."""
        self.at += timedelta(seconds=seconds)
        if seconds > GAP_MAX_S:
            for name in self.rests_since:
                self.rests_since[name] = self.at

    @rule(index=st.integers(0, 3))
    def a_runtime_works_for_somebody(self, index: int) -> None:
        self.works[self.pick(index)] = True
        self.look([])

    @rule(index=st.integers(0, 3))
    def a_runtime_rests(self, index: int) -> None:
        name = self.pick(index)
        self.at += timedelta(seconds=1)
        if self.works[name]:
            self.works[name] = False
            self.rests_since[name] = self.at

    @rule(index=st.integers(0, 3), mb=st.none() | st.integers(0, 9000))
    def a_runtime_is_wrong_about_what_it_holds(self, index: int, mb: int | None) -> None:
        self.says_mb[self.pick(index)] = mb

    @rule(index=st.integers(0, 3), pinned=st.booleans())
    def somebody_pins(self, index: int, pinned: bool) -> None:
        (self.pins.add if pinned else self.pins.discard)(self.pick(index))

    @rule(index=st.integers(0, 3), begins=st.booleans())
    def a_job_of_ours_uses_a_runtime(self, index: int, begins: bool) -> None:
        name = self.pick(index)
        if self.jobs[name] != int(begins):
            self.jobs[name] = int(begins)
            self.rests_since[name] = self.at + timedelta(seconds=1)
        self.look([])

    @rule(mb=st.integers(0, 4000))
    def strangers_come_and_go(self, mb: int) -> None:
        promised_mb = sum(each.mb for each in self.ledger.reservations)
        room_mb = self.total_mb - self.headroom_mb - promised_mb - self.resident_mb - sum(self.held_mb.values())
        self.strangers_mb = max(0, min(mb, room_mb))
        self.look([])

    @rule(more_mb=st.integers(-3000, 6000), keeps_promise=st.sampled_from([1.0, 1.0, 0.6, 0.0]))
    def ask(self, more_mb: int, keeps_promise: float) -> None:
        """Asks for that much more than is free."""
        reserved_mb = self.ledger.unseen_mb(self.reading)
        need_mb = max(1, (self.reading.free_mb or 0) - reserved_mb - self.headroom_mb + more_mb)
        tenants = [
            Tenant(
                runtime=name,
                releases="all",
                grace_s=GRACE_S,
                devices=(DEVICE,),
                reading=self.seen[name],
                idle_s=self.idleness[name].idle_s(self.at),
                jobs=self.jobs[name],
                pins=("m",) if name in self.pins else (),
            )
            for name in self.held_mb
        ]
        owners = owners_on(DEVICE, tenants)
        unmanaged = unmanaged_mb(self.reading, owners)
        assert unmanaged is None or 0 <= unmanaged <= (self.reading.used_mb or 0)
        found = decide(
            Question(
                device=Device(id=DEVICE, kind="gpu", name="card", headroom_mb=self.headroom_mb),
                reading=self.reading,
                reserved_mb=reserved_mb,
                need=Need(vram_mb=need_mb, source="declared"),
                owners=owners,
            )
        )
        event("admits" if isinstance(found.admission, Admit) else f"asks {min(2, len(found.releases))} to let go")
        if isinstance(found.admission, Admit):
            promised_mb = sum(each.mb for each in self.ledger.reservations if each.counts_against(self.reading))
            seen_mb = self.reading.used_mb or 0
            assert seen_mb + promised_mb + need_mb + self.headroom_mb <= self.total_mb
            self.epoch += 1
            self.ledger = self.ledger.reserve(self.epoch, DEVICE, need_mb, self.at)
        for owner in found.releases:
            name = owner.runtime
            assert name not in self.pins
            assert not self.works[name]
            assert self.jobs[name] == 0
            assert (self.at - self.rests_since[name]).total_seconds() >= GRACE_S
            self.held_mb[name] = int(self.held_mb[name] * (1 - keeps_promise))
            self.says_mb[name] = 0
        if found.releases:
            # What was let go is known only by the next reading.
            self.look([])

    @rule()
    def a_load_completes(self) -> None:
        waiting = [each for each in self.ledger.reservations if each.loaded_at is None]
        if waiting:
            self.at += timedelta(seconds=1)
            self.resident_mb += waiting[0].mb
            self.ledger = self.ledger.loaded(waiting[0].epoch, self.at).release(waiting[0].epoch)

    @rule()
    def our_models_are_unloaded(self) -> None:
        self.resident_mb = 0


TestShared = Shared.TestCase
TestShared.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)
