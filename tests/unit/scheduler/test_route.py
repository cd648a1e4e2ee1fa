from __future__ import annotations

import pytest

from gpukeeper.events.job import Unroutable, Waiting
from gpukeeper.events.proposal import Proposal
from gpukeeper.events.reasons import Reason
from gpukeeper.events.route import Routed
from gpukeeper.scheduler.config import SchedulerConfig, ScoreWeights
from gpukeeper.scheduler.route import decide_routes, decide_waits
from support.history import History, clocks


@pytest.fixture
def h() -> History:
    """One host with one device of one slot."""
    history = History()
    history.joined()
    return history


def routes(h: History, *, limit: int = 64) -> list[Proposal]:
    return decide_routes(h.site, h.live, h.config, h.now_s, limit=limit)


def sent(h: History) -> dict[str, str]:
    """Where each job is sent now."""
    return {fact.job: f"{fact.host}/{fact.device}" for fact in facts(h)}


def facts(h: History) -> list[Routed]:
    found = [proposal.fact for proposal in routes(h)]
    return [fact for fact in found if isinstance(fact, Routed)]


def waits(h: History) -> dict[str, tuple[str, str]]:
    """The reasons that are told now."""
    found = [p.fact for p in decide_waits(h.site, h.live, h.config, h.now_s)]
    return {fact.job: (fact.reason, fact.detail) for fact in found if isinstance(fact, Waiting)}


def why_not(h: History, host: str = "h1", device: str = "g0") -> str | None:
    """What a route to elsewhere says about this place."""
    (fact,) = facts(h)
    (candidate,) = [c for c in fact.candidates if (c.host, c.device) == (host, device)]
    return candidate.unavailable


# --- what a route says


def test_a_waiting_job_is_sent_with_all_that_its_agent_needs(h: History) -> None:
    h.accepted("a", clocks=clocks(load=5))
    (proposal,) = routes(h)
    job = h.job("a")

    assert (proposal.subject, proposal.expected, proposal.aggregate) == ("gpuq.ev.route.h1.a", 0, "a")
    fact = proposal.fact
    assert isinstance(fact, Routed)
    assert (fact.job, fact.host, fact.device, fact.runtime) == ("a", "h1", "g0", "ollama")
    assert (fact.submission_seq, fact.job_seq, fact.attempt) == (job.submission_seq, job.seq, 1)
    assert fact.clocks == clocks(load=5)
    assert fact.why == "immediate, the only candidate"
    assert fact.score == sum(fact.candidates[0].terms.values())


def test_a_second_route_to_a_host_rests_on_the_first_and_is_the_next_attempt(h: History) -> None:
    h.is_routed("a")
    seq = h.unrouted("a")
    (proposal,) = routes(h)

    assert proposal.expected == seq
    assert isinstance(proposal.fact, Routed)
    assert proposal.fact.attempt == 2


def test_a_job_that_was_sent_is_not_sent_again(h: History) -> None:
    h.accepted("a")
    h.proposed(*routes(h))

    assert routes(h) == []


def test_a_job_whose_end_was_promised_goes_nowhere_and_lets_others_pass(h: History) -> None:
    h.is_running("a")
    h.cancel_requested("a")
    h.preempted("a")
    h.released("a")
    h.accepted("b")

    assert list(sent(h)) == ["b"]


def test_candidates_are_shown_best_first_and_bounded(h: History) -> None:
    for number in range(30):
        h.joined(f"x{number}", models=("m",) if number % 2 else ("other",))
    h.silence(16)
    for number in range(0, 30, 3):
        h.beat(f"x{number}")
    h.accepted("a")

    (fact,) = facts(h)

    assert len(fact.candidates) == 16
    assert fact.candidates[0].host == fact.host
    available = [candidate.unavailable is None for candidate in fact.candidates]
    assert available == sorted(available, reverse=True)


# --- order


def test_the_higher_priority_goes_first_and_then_who_came_first(h: History) -> None:
    h.accepted("a")
    h.accepted("b", priority=5)
    h.accepted("c", priority=5)

    assert list(sent(h)) == ["b"]
    h.appeared(slots=2)
    assert list(sent(h)) == ["b", "c"]


def test_c53_a_head_that_can_never_fit_does_not_block_what_fits(h: History) -> None:
    """The device was larger when the head was accepted."""
    h.accepted("head", priority=9, vram_mb=30_000)
    h.accepted("small", vram_mb=10_000)

    assert list(sent(h)) == ["small"]
    assert waits(h)["head"][0] == "no_route"
    assert "need.vram_mb '30000'" in waits(h)["head"][1]


def test_a_head_whose_only_host_is_busy_does_not_block_another_that_may_go_elsewhere(h: History) -> None:
    h.joined("h2")
    h.is_running("busy")
    h.accepted("head", host="h1", priority=9)
    h.accepted("b")

    assert sent(h) == {"b": "h2/g0"}


def test_one_slot_is_never_promised_twice_in_one_look(h: History) -> None:
    h.joined("h2", slots=2)
    for name in "abcdef":
        h.accepted(name)

    assert sorted(sent(h).values()) == ["h1/g0", "h2/g0", "h2/g0"]
    h.proposed(*routes(h))
    assert routes(h) == []


def test_a_slot_that_is_claimed_or_promised_is_not_free(h: History) -> None:
    h.is_routed("promised")
    h.accepted("a")
    assert routes(h) == []

    h.claimed("promised")
    assert routes(h) == []

    h.admitted("promised")
    h.succeeded("promised")
    assert list(sent(h)) == ["a"]


def test_no_more_is_decided_in_one_look_than_asked_for(h: History) -> None:
    h.appeared(slots=10)
    for name in "abcdef":
        h.accepted(name)

    assert [proposal.aggregate for proposal in routes(h, limit=4)] == ["a", "b", "c", "d"]


def test_many_jobs_that_want_the_same_hopeless_thing_are_not_each_looked_at_anew(h: History) -> None:
    """A want that found nothing finds nothing further back; a job that may go there still does."""
    h.appeared(slots=2)
    for number in range(50):
        h.accepted(f"w{number}", model="gone")
    h.accepted("a")

    assert list(sent(h)) == ["a"]


# --- choice


def two_hosts() -> History:
    h = History()
    h.joined("h1")
    h.joined("h2")
    return h


def test_a_place_where_the_model_is_resident_is_preferred() -> None:
    h = two_hosts()
    h.beat("h2", resident=("m:latest",))
    h.accepted("a", origin="h1")

    (fact,) = facts(h)

    assert fact.host == "h2"
    assert fact.candidates[0].terms["warm"] == ScoreWeights().warm
    assert fact.candidates[1].terms["fits"] == ScoreWeights().fits


def test_a_place_that_would_have_to_evict_another_model_is_avoided() -> None:
    h = two_hosts()
    h.beat("h1", resident=("other",))
    h.accepted("a", origin="h1")

    (fact,) = facts(h)

    assert fact.host == "h2"
    assert fact.candidates[1].terms["evicts"] == ScoreWeights().evicts


def test_a_place_that_would_have_to_fetch_the_model_comes_after_one_that_has_it() -> None:
    h = two_hosts()
    h.registered("h1", pull=("m*",))
    h.health("h1", models=("other",))
    h.accepted("a", origin="h1")

    (fact,) = facts(h)

    assert fact.host == "h2"
    assert fact.candidates[1].terms["provision"] == ScoreWeights().provision
    assert "provision" not in fact.candidates[0].terms


@pytest.mark.parametrize("models", [("m",), ("m:latest",), None])
def test_a_model_that_is_there_or_may_be_need_not_be_fetched(h: History, models: tuple[str, ...] | None) -> None:
    h.registered(pull=("*",))
    h.health(models=models)
    h.accepted("a")

    (fact,) = facts(h)

    assert "provision" not in fact.candidates[0].terms


def test_a_model_that_only_one_host_may_fetch_goes_there() -> None:
    h = two_hosts()
    h.registered("h2", pull=("qwen3:*",))
    h.accepted("a", origin="h1", model="qwen3:8b")

    assert sent(h) == {"a": "h2/g0"}


def test_an_idle_device_is_preferred_to_one_that_already_works() -> None:
    h = two_hosts()
    h.appeared("h1", slots=2)
    h.is_running("busy", name="h1")
    h.accepted("a", origin="h1")

    assert sent(h) == {"a": "h2/g0"}


def test_a_device_with_jobs_on_their_way_is_avoided() -> None:
    h = two_hosts()
    h.appeared("h1", slots=4)
    h.is_routed("b", name="h1")
    h.is_routed("c", name="h1")
    h.accepted("a", origin="h1")

    (fact,) = facts(h)

    assert fact.host == "h2"
    assert fact.candidates[1].terms["queued"] == 2 * ScoreWeights().queued


@pytest.mark.parametrize(("origin", "host"), [("h1", "h1"), ("h2", "h2"), (None, "h1"), ("elsewhere", "h1")])
def test_on_a_tie_the_host_that_took_the_job_is_chosen(origin: str | None, host: str) -> None:
    h = two_hosts()
    h.accepted("a", origin=origin)

    assert sent(h) == {"a": f"{host}/g0"}


def test_a_better_place_elsewhere_wins_over_the_host_that_took_the_job() -> None:
    h = two_hosts()
    h.beat("h2", resident=("m",))
    h.accepted("a", origin="h1")

    assert sent(h) == {"a": "h2/g0"}


def test_the_weights_are_those_of_the_configuration() -> None:
    h = History(config=SchedulerConfig(weights=ScoreWeights(warm=-1000)))
    h.joined("h1")
    h.joined("h2")
    h.beat("h1", resident=("m",))
    h.accepted("a", origin="h1")

    assert sent(h) == {"a": "h2/g0"}


@pytest.mark.parametrize(
    ("wish", "place"),
    [
        ({"host": "h2"}, "h2/g0"),
        ({"host": "h2", "device": "g1"}, "h2/g1"),
        ({"place": "cpu"}, "h2/g1"),
        ({"runtime": "second"}, "h2/g0"),
        ({"vram_mb": 20_000}, "h2/g0"),
    ],
)
def test_a_job_goes_only_where_it_asked_to(wish: dict[str, object], place: str) -> None:
    h = History()
    h.joined("h1", total_mb=10_000)
    h.joined("h2", devices=("g0", "g1"), runtimes=("ollama", "second"))
    h.appeared("h2", "g1", kind="cpu", total_mb=10_000)
    h.accepted("a", **wish)

    assert sent(h) == {"a": place}


# --- who is not chosen, and why


def test_a_suspect_runtime_is_not_chosen_until_it_is_trusted_again() -> None:
    h = two_hosts()
    h.suspected("h1")
    h.accepted("a", origin="h1")
    assert why_not(h) == "runtime ollama is suspect: cpu_fallback: 0.0% is in VRAM"

    h.health("h1")
    assert sent(h) == {"a": "h1/g0"}


def test_a_suspicion_outlasts_news_about_health_that_still_names_it() -> None:
    h = two_hosts()
    h.suspected("h1")
    h.health("h1", models=("m", "n"), suspect="cpu_fallback: 0.0% is in VRAM")
    h.accepted("a", origin="h1")

    assert sent(h) == {"a": "h2/g0"}


def test_a_runtime_that_does_not_answer_is_not_chosen() -> None:
    h = two_hosts()
    h.health("h1", healthy=False, detail="connection refused")
    h.accepted("a", origin="h1")

    assert why_not(h) == "runtime ollama does not answer: connection refused"


def test_c45_a_silent_host_is_not_chosen_whatever_it_said_last() -> None:
    h = two_hosts()
    h.silence(16)
    h.beat("h2")
    h.accepted("a", origin="h1")

    assert why_not(h) == "its agent is silent for 16 s"


def test_a_host_that_joined_and_was_never_heard_is_not_chosen() -> None:
    h = two_hosts()
    h.joined("h3", heard=False)
    h.accepted("a", origin="h3")

    assert why_not(h, "h3") == "its agent is never heard"


def test_a_heartbeat_from_before_the_observer_listened_is_no_sign_of_life() -> None:
    """A scheduler that starts is handed the last heartbeat there is, however old."""
    h = two_hosts()
    h.beat("h1", from_before=True)
    h.accepted("a", origin="h1")
    assert sent(h) == {"a": "h2/g0"}

    h.beat("h1")
    assert sent(h) == {"a": "h1/g0"}


def test_a_host_that_is_stopping_or_has_stopped_is_not_chosen() -> None:
    h = two_hosts()
    h.beat("h1", stopping=True)
    h.accepted("a", origin="h1")
    assert sent(h) == {"a": "h2/g0"}

    h.left("h1")
    assert why_not(h) == "its agent has stopped"


@pytest.mark.parametrize("state", ["lost", "blocked", "unknown"])
def test_c19_a_device_that_is_not_healthy_is_not_chosen_and_the_others_go_on(state: str) -> None:
    h = History()
    h.joined(devices=("g0", "g1"))
    h.changed(state, detail="GPU is lost")
    h.accepted("a")

    assert why_not(h) == f"the device is {state}: GPU is lost"


def test_c17_a_device_that_may_not_be_scheduled_is_not_chosen() -> None:
    h = two_hosts()
    h.appeared("h1", unschedulable="a MIG parent: use its slices")
    h.accepted("a", origin="h1")

    assert why_not(h) == "a MIG parent: use its slices"


def test_a_device_that_denied_a_job_is_asked_again_later_each_time(h: History) -> None:
    h.accepted("a")
    waited_s: list[int] = []
    for _ in range(7):
        h.denied("a")
        denied_s = h.now_s
        while not routes(h):
            h.after(1)
        waited_s.append(round(h.now_s - denied_s))

    assert waited_s == [5, 10, 20, 40, 60, 60, 60]


def test_a_device_that_denied_a_job_says_why_and_when_it_is_asked_again() -> None:
    h = two_hosts()
    h.accepted("a", origin="h1")
    h.denied("a")

    assert why_not(h) == "it denied the job; asked again in 5 s: insufficient: too little"


def test_a_device_that_denied_a_thousand_times_is_still_asked() -> None:
    h = two_hosts()
    h.accepted("a", host="h1")
    for _ in range(1500):
        h.denied("a")

    assert routes(h) == []
    h.after(61)
    assert sent(h) == {"a": "h1/g0"}


def test_a_denial_on_one_device_keeps_nobody_else_from_it(h: History) -> None:
    h.is_claimed("a")
    h.denied("a")
    h.released("a")
    h.accepted("b")

    assert sent(h) == {"b": "h1/g0"}


# --- why it waits


def test_a_reason_is_told_when_it_changes_and_not_again(h: History) -> None:
    h.is_running("busy")
    h.accepted("a")
    assert waits(h) == {"a": ("capacity", "every device that could take it is in use")}

    h.proposed(*decide_waits(h.site, h.live, h.config, h.now_s))
    assert waits(h) == {}

    h.silence(16)
    assert waits(h) == {"a": ("no_route", "h1/g0 ollama: its agent is silent for 16 s")}
    h.proposed(*decide_waits(h.site, h.live, h.config, h.now_s))
    h.silence(16)
    assert waits(h) == {}, "the same reason, though the words differ"


def test_a_reason_rests_on_the_jobs_sequence(h: History) -> None:
    h.is_running("busy")
    h.accepted("a")
    (proposal,) = decide_waits(h.site, h.live, h.config, h.now_s)

    assert (proposal.subject, proposal.expected) == ("gpuq.ev.job.a", h.job("a").seq)


def test_a_job_that_could_begin_now_has_no_reason_to_wait(h: History) -> None:
    h.accepted("a")

    assert waits(h) == {}


def test_with_no_host_yet_it_waits_for_one() -> None:
    h = History()
    h.accepted("a")

    assert waits(h) == {"a": ("no_route", "no host offers it yet")}


def test_waiting_for_a_slot_is_said_before_waiting_for_a_repair() -> None:
    h = two_hosts()
    h.left("h1")
    h.is_running("busy", name="h2")
    h.accepted("a")

    assert waits(h)["a"][0] == "capacity"


def test_each_place_is_named_with_its_reason_where_nothing_is_left() -> None:
    h = two_hosts()
    h.left("h1")
    h.suspected("h2")
    h.accepted("a")

    assert waits(h)["a"] == (
        "no_route",
        "h1/g0 ollama: its agent has stopped; h2/g0 ollama: runtime ollama is suspect: cpu_fallback: 0.0% is in VRAM",
    )


def test_c23_a_job_that_was_denied_keeps_the_words_of_the_denial(h: History) -> None:
    """What its agent measured says more than that it waits."""
    h.is_claimed("a")
    h.denied("a")
    h.released("a")

    assert waits(h) == {}
    assert (h.job("a").reason, h.job("a").detail) == ("denied", "insufficient: too little")


def test_the_reason_of_a_denied_job_does_not_change_with_every_job_that_takes_the_slot(h: History) -> None:
    h.is_claimed("a")
    h.denied("a")
    h.released("a")
    told: list[str] = []
    for number in range(4):
        h.is_running(f"short{number}")
        told += [reason for reason, _ in waits(h).values()]
        h.succeeded(f"short{number}")
        h.released(f"short{number}")
        told += [reason for reason, _ in waits(h).values()]

    assert told == []


def test_a_denied_job_waits_for_capacity_once_it_might_be_asked_again(h: History) -> None:
    h.is_claimed("a")
    h.denied("a")
    h.released("a")
    h.after(6).is_running("busy")

    assert waits(h)["a"][0] == "capacity"


def test_one_jobs_denial_is_no_reason_for_another_that_wants_the_same(h: History) -> None:
    h.is_claimed("a")
    h.denied("a")
    h.released("a")
    h.is_running("busy")
    h.accepted("b")

    assert waits(h) == {"b": ("capacity", "every device that could take it is in use")}


def test_every_reason_is_in_the_closed_list(h: History) -> None:
    h.is_running("busy")
    h.accepted("a")
    h.accepted("b", model="gone")

    assert {Reason(reason) for reason, _ in waits(h).values()} <= set(Reason)


# --- jobs that do not want to wait


def unroutable(h: History) -> dict[str, Reason]:
    found = [p.fact for p in decide_waits(h.site, h.live, h.config, h.now_s)]
    return {fact.job: fact.reason for fact in found if isinstance(fact, Unroutable)}


def test_c42_a_job_that_asked_for_a_clear_answer_gets_one_at_once(h: History) -> None:
    h.is_running("busy")
    h.accepted("a", on_capacity="reject")

    assert unroutable(h) == {"a": Reason.CAPACITY}
    h.proposed(*decide_waits(h.site, h.live, h.config, h.now_s))
    assert h.job("a").ended


def test_a_job_that_asked_for_a_clear_answer_is_answered_though_its_reason_is_known(h: History) -> None:
    h.is_running("busy")
    h.accepted("a", on_capacity="reject", waiting=Reason.CAPACITY)

    assert unroutable(h) == {"a": Reason.CAPACITY}


def test_a_job_that_asked_for_a_clear_answer_begins_where_it_can(h: History) -> None:
    h.accepted("a", on_capacity="reject")

    assert unroutable(h) == {}
    assert list(sent(h)) == ["a"]


def test_a_denied_job_that_does_not_want_to_wait_is_told_so(h: History) -> None:
    h.accepted("a", on_capacity="reject")
    h.routed("a")
    h.claimed("a")
    h.denied("a")
    h.released("a")

    assert unroutable(h) == {"a": Reason.DENIED}


def test_a_denied_job_is_judged_by_its_own_denials_though_one_before_it_may_begin_there(h: History) -> None:
    h.accepted("b", priority=9)
    h.accepted("a", on_capacity="reject")
    h.denied("a")

    assert unroutable(h) == {"a": Reason.DENIED}


# --- purity


def test_the_same_state_gives_the_same_decisions_and_is_left_as_it_was() -> None:
    h = two_hosts()
    h.beat("h2", resident=("m",))
    for number, fields in enumerate([{}, {"vram_mb": 99_999}, {"host": "h1"}, {"on_capacity": "reject"}, {}]):
        h.accepted(f"j{number}", **fields)
    heard = {name: repr(known) for name, known in h.live.hosts.items()}

    assert routes(h) == routes(h)
    first, second = (decide_waits(h.site, h.live, h.config, h.now_s) for _ in range(2))
    assert first == second
    assert {name: repr(known) for name, known in h.live.hosts.items()} == heard
