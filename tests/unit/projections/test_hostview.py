from __future__ import annotations

import pytest

from gpukeeper.events import subjects
from gpukeeper.events.codec import Event
from gpukeeper.events.device import Claimed
from gpukeeper.projections.hostview import HostView
from support.history import CLOCKS, History


def view_of(h: History, host: str = "h1", *, after: HostView | None = None) -> HostView:
    """What an agent folds: only the subjects that it follows."""
    view = after or HostView(host)
    for event in h.events:
        if follows(host, event):
            view.apply(event)
    return view


def follows(host: str, event: Event) -> bool:
    patterns = subjects.followed_by_agent(host)
    return any(subjects.matches(pattern, event.stored.subject) for pattern in patterns)


def same(one: HostView, other: HostView) -> bool:
    """Whether two views say the same, though one was folded from fewer events."""
    ours, theirs = ({**vars(view), "seq": None} for view in (one, other))
    return ours == theirs and list(one.routes) == list(other.routes)


@pytest.fixture
def h() -> History:
    history = History()
    history.joined(slots=4)
    history.joined("h2")
    return history


def test_a_route_to_the_host_is_pending_with_all_that_an_attempt_needs(h: History) -> None:
    h.accepted("a")
    job_seq = h.job("a").seq
    seq = h.routed("a")

    pending = view_of(h).routes["a"]

    assert (pending.seq, pending.job, pending.device, pending.runtime) == (seq, "a", "g0", "ollama")
    assert (pending.job_seq, pending.submission_seq, pending.attempt) == (job_seq, h.job("a").submission_seq, 1)
    assert pending.clocks == CLOCKS


def test_routes_to_other_hosts_are_not_ours(h: History) -> None:
    h.is_routed("a", name="h2")

    assert not view_of(h).routes
    assert list(view_of(h, "h2").routes) == ["a"]


def test_a_route_is_pending_until_it_is_claimed_or_withdrawn(h: History) -> None:
    h.is_claimed("a")
    h.is_routed("b")
    h.unrouted("b")
    h.is_routed("c")

    assert list(view_of(h).routes) == ["c"]


def test_a_withdrawal_or_a_claim_of_an_earlier_route_leaves_the_present_one(h: History) -> None:
    first = h.is_routed("a")
    h.unrouted("a")
    second = h.routed("a")
    h.unrouted("a", route_seq=first)
    h.claimed("a", route_seq=first)

    assert view_of(h).routes["a"].seq == second


def test_a_job_that_is_sent_again_waits_behind_those_sent_before(h: History) -> None:
    h.is_routed("a")
    h.is_routed("b")
    h.routed("a")

    assert list(view_of(h).routes) == ["b", "a"]


def test_claims_stand_until_they_are_released_or_lapse(h: History) -> None:
    epochs = [h.is_claimed(name, slot=slot) for slot, name in enumerate("abc")]
    h.released("a")
    h.lapsed("b")

    claims = view_of(h).claims["g0"]

    assert list(claims) == [epochs[2]]
    assert (claims[epochs[2]].job, claims[epochs[2]].slot, claims[epochs[2]].instance_id) == ("c", 2, "h1-1")


def test_the_sequences_of_its_subjects_follow_every_event_on_them_whatever_it_is(h: History) -> None:
    device_seq = h.stored("gpuq.ev.device.h1.g0", b"garbage")
    other_seq = h.stored("gpuq.ev.device.h1.g9", b"garbage")
    runtime_seq = h.stored("gpuq.ev.runtime.h1.ollama", b"garbage")
    host_seq = h.stored("gpuq.ev.host.h1", b"garbage")

    view = view_of(h)

    assert view.device_seq == {"g0": device_seq, "g9": other_seq}
    assert view.runtime_seq == {"ollama": runtime_seq}
    assert view.host_seq == host_seq


def test_the_host_speaks_through_the_instance_that_joined_last(h: History) -> None:
    joined = h.joined(instance="h1-2")
    left = h.left(instance="h1-1")

    view = view_of(h)

    assert (view.instance_id, view.joined_seq, view.host_seq) == ("h1-2", joined, left)


def test_suspicions_come_and_go_with_what_the_log_says_of_health(h: History) -> None:
    h.suspected()
    assert view_of(h).suspects["ollama"].model == "m"
    h.health(suspect="cpu_fallback: still")
    assert view_of(h).suspects["ollama"].model == "m"
    h.health()
    assert not view_of(h).suspects


def test_a_fact_of_another_device_on_its_subject_is_not_believed(h: History) -> None:
    fact = Claimed(host="h1", device="g7", slot=0, job="a", attempt=1, route_seq=1, boot_id="b", instance_id="i")
    seq = h.fact(fact, subject="gpuq.ev.device.h1.g0")

    view = view_of(h)

    assert view.claims == {"g0": {}}
    assert view.device_seq["g0"] == seq


def test_events_seen_again_change_nothing(h: History) -> None:
    h.is_claimed("a")
    h.is_routed("b")
    view = view_of(h)

    assert same(view_of(h, after=view), view_of(h))
    assert view.seq == h.seq


def busy(h: History) -> None:
    """A bit of everything, with notes and routes in another order than acceptances."""
    h.is_claimed("a")
    h.is_running("b", slot=1)
    for name in "cdef":
        h.accepted(name)
    for name in "edc":
        h.routed(name)
    h.waits("d")
    h.suspected()
    h.registered(runtime_name="second")
    h.changed("blocked")
    h.routed("f", "h2")
    h.succeeded("b")
    h.released("b")
    h.left("h2")
    h.left("h1", instance="an earlier one")


@pytest.mark.parametrize("host", ["h1", "h2", "h3"])
def test_a_view_from_the_sites_snapshot_is_the_view_folded_from_the_first_event(h: History, host: str) -> None:
    busy(h)

    assert same(HostView.from_site(h.site, host), view_of(h, host))


def test_a_view_from_a_snapshot_folds_on_from_where_the_snapshot_ends(h: History) -> None:
    busy(h)
    view = HostView.from_site(h.site, "h1")
    h.claimed("e")
    h.is_routed("g")
    h.unrouted("c")

    assert same(view_of(h, after=view), view_of(h))


def test_a_view_from_a_snapshot_leaves_out_routes_of_jobs_that_have_moved_on(h: History) -> None:
    """Folded from the first event they are there, and lose at the job's sequence."""
    h.is_routed("a")
    h.cancelled("a")
    h.is_routed("b")
    h.routed("b", "h2")

    assert list(view_of(h).routes) == ["a", "b"]
    assert list(HostView.from_site(h.site, "h1").routes) == ["b"]
    assert not HostView.from_site(h.site, "h2").routes


def test_a_route_whose_claim_is_over_is_not_pending_again_after_a_restart(h: History) -> None:
    h.is_claimed("a")
    h.released("a")

    assert same(HostView.from_site(h.site, "h1"), view_of(h))
    assert not view_of(h).routes
