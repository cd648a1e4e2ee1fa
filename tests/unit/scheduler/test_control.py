from __future__ import annotations

from collections.abc import Callable

import pytest

from gpukeeper.events.ids import TOKEN_RULE, is_token
from gpukeeper.events.job import Cancelled, CancelRequested, Expired
from gpukeeper.events.operator import Cancel
from gpukeeper.events.proposal import Proposal
from gpukeeper.events.reasons import Reason
from gpukeeper.events.site import CommandRefused
from gpukeeper.projections.job import Phase
from gpukeeper.scheduler.accept import decide_submissions
from gpukeeper.scheduler.control import decide_commands, decide_expiries
from support.history import History, clocks


@pytest.fixture
def h() -> History:
    history = History()
    history.joined()
    return history


def answer(h: History) -> Proposal:
    (proposal,) = decide_commands(h.site)
    return proposal


# --- cancelling

Deed = Callable[[History], object]
NOT_EXECUTED: dict[str, Deed] = {
    "waiting": lambda h: h.accepted("a"),
    "routed": lambda h: h.is_routed("a"),
    "claimed": lambda h: h.is_claimed("a"),
    "denied": lambda h: (h.is_claimed("a"), h.denied("a")),
}
EXECUTED: dict[str, Deed] = {
    "admitted": lambda h: h.is_admitted("a"),
    "placed": lambda h: (h.is_admitted("a"), h.placed("a")),
    "running": lambda h: h.is_running("a"),
}


@pytest.mark.parametrize("bring", NOT_EXECUTED.values(), ids=NOT_EXECUTED)
def test_a_job_that_nobody_executes_is_cancelled_at_once(h: History, bring: Deed) -> None:
    bring(h)
    seq = h.cancel_wanted("a", actor="mo", reason="wrong model")
    proposal = answer(h)

    assert proposal.fact == Cancelled(job="a", actor="mo", reason="wrong model", command_seq=seq)
    assert (proposal.subject, proposal.expected, proposal.actor) == ("gpuq.ev.job.a", h.job("a").seq, "mo")
    assert proposal.causationid == f"e{seq}"
    h.proposed(proposal)
    assert h.job("a").phase is Phase.CANCELLED
    assert decide_commands(h.site) == []


@pytest.mark.parametrize("bring", EXECUTED.values(), ids=EXECUTED)
def test_whoever_executes_a_job_is_asked_to_end_it(h: History, bring: Deed) -> None:
    """C9: its slot stays taken until the runtime has stopped."""
    bring(h)
    seq = h.cancel_wanted("a", actor="mo", reason="enough")
    proposal = answer(h)

    assert proposal.fact == CancelRequested(job="a", command_seq=seq, actor="mo", reason="enough")
    assert proposal.expected == h.job("a").seq
    h.proposed(proposal)
    assert not h.job("a").ended
    assert decide_commands(h.site) == []


def test_an_end_that_came_first_refuses_the_command(h: History) -> None:
    h.is_running("a")
    h.succeeded("a")
    seq = h.cancel_wanted("a")
    proposal = answer(h)

    assert proposal.fact == CommandRefused(
        command_seq=seq,
        actor="op",
        reason=Reason.ALREADY_ENDED,
        detail="the job has succeeded already; ends are final",
        job="a",
    )
    assert (proposal.subject, proposal.expected) == ("gpuq.ev.site", None)
    h.proposed(proposal)
    assert decide_commands(h.site) == []


def test_an_unknown_job_refuses_the_command(h: History) -> None:
    h.cancel_wanted("nobody")
    fact = answer(h).fact

    assert isinstance(fact, CommandRefused)
    assert (fact.reason, fact.job) == (Reason.UNKNOWN_JOB, "nobody")
    assert "'nobody'" in fact.detail


def test_a_command_for_a_submission_that_is_not_answered_yet_waits_for_it(h: History) -> None:
    """Sent right after the submission, it must not be told that there is no such job."""
    h.submitted(id="a")
    h.cancel_wanted("a")
    assert decide_commands(h.site) == []

    h.proposed(*decide_submissions(h.site, h.live, h.config, {}))
    h.proposed(answer(h))
    assert h.job("a").phase is Phase.CANCELLED


def test_a_command_that_came_before_any_such_submission_is_refused(h: History) -> None:
    h.cancel_wanted("a")
    h.submitted(id="a")

    assert isinstance(answer(h).fact, CommandRefused)


def test_commands_that_wait_for_a_submission_hold_up_no_others(h: History) -> None:
    h.accepted("b")
    h.submitted(id="a")
    h.cancel_wanted("a")
    h.cancel_wanted("b")

    assert [proposal.aggregate for proposal in decide_commands(h.site)] == ["b"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"stop it!", "malformed"),
        (
            b'{"specversion":"1.0","id":"c","source":"/t","type":"gpuq.operator.dance.v1","subject":"a","time":"t",'
            b'"data":{}}',
            "gpuq.operator.dance.v1",
        ),
        (
            b'{"specversion":"1.0","id":"c","source":"/t","type":"gpuq.job.cancelled.v1","subject":"a","time":"t",'
            b'"data":{"job":"a","actor":"mo"}}',
            "does not belong on gpuq.cmd.mo",
        ),
    ],
)
def test_a_command_that_is_none_is_refused_in_words(h: History, body: bytes, words: str) -> None:
    h.accepted("a")
    seq = h.stored("gpuq.cmd.mo", body)
    fact = answer(h).fact

    assert isinstance(fact, CommandRefused)
    assert (fact.reason, fact.command_seq, fact.actor, fact.job) == (Reason.INVALID_COMMAND, seq, "mo", None)
    assert words in fact.detail
    h.proposed(answer(h))
    assert decide_commands(h.site) == []
    assert h.job("a").phase is Phase.WAITING


@pytest.mark.parametrize("name", ["\ufffd", "\x1b[31mmo", "*", "m" * 3_900])
def test_a_command_of_an_actor_with_an_impossible_name_is_refused_and_the_name_is_cleaned(
    h: History, name: str
) -> None:
    h.accepted("a")
    seq = h.fact(Cancel(job="a"), subject=f"gpuq.cmd.{name}")
    proposal = answer(h)

    fact = proposal.fact
    assert isinstance(fact, CommandRefused)
    assert (fact.reason, fact.command_seq, fact.job) == (Reason.INVALID_COMMAND, seq, None)
    assert is_token(fact.actor)
    assert proposal.actor == fact.actor
    assert TOKEN_RULE in fact.detail
    assert "\x1b" not in fact.detail
    h.proposed(proposal)
    assert h.job("a").phase is Phase.WAITING
    assert not h.site.commands


def test_two_commands_for_one_job_are_answered_one_after_the_other(h: History) -> None:
    h.accepted("a")
    h.accepted("b")
    for name in "aab":
        h.cancel_wanted(name)

    assert [proposal.aggregate for proposal in decide_commands(h.site)] == ["a", "b"]
    h.proposed(*decide_commands(h.site))
    fact = answer(h).fact
    assert isinstance(fact, CommandRefused)
    assert fact.reason is Reason.ALREADY_ENDED


def test_no_more_commands_are_answered_in_one_look_than_asked_for(h: History) -> None:
    for number in range(5):
        h.cancel_wanted(f"nobody{number}")

    assert len(decide_commands(h.site, limit=3)) == 3


# --- the queue clock


def expired(h: History, now_s: float | None = None) -> list[Expired]:
    found = [proposal.fact for proposal in decide_expiries(h.site, h.now_s if now_s is None else now_s)]
    return [fact for fact in found if isinstance(fact, Expired)]


def test_a_job_that_waited_longer_than_its_queue_clock_ends_and_names_it(h: History) -> None:
    h.accepted("a", clocks=clocks(queue=60), waiting=Reason.CAPACITY, detail="no free slot")
    h.after(59)
    assert expired(h) == []

    h.after(1.5)
    (proposal,) = decide_expiries(h.site, h.now_s)
    assert (proposal.subject, proposal.expected) == ("gpuq.ev.job.a", h.job("a").seq)
    fact = proposal.fact
    assert isinstance(fact, Expired)
    assert (fact.clock, fact.limit_s, fact.source, fact.elapsed_s) == ("queue", 60, "job deadlines.queue_s", 60.5)
    assert fact.detail == "not started in time; it waited for: capacity no free slot"
    h.proposed(proposal)
    assert h.job("a").phase is Phase.EXPIRED
    assert expired(h) == []


def test_a_job_that_is_on_its_way_expires_too(h: History) -> None:
    """Else a route that nobody takes up would be waited for without end."""
    h.accepted("a", clocks=clocks(queue=60))
    h.routed("a")
    h.after(60)

    assert [fact.job for fact in expired(h)] == ["a"]


@pytest.mark.parametrize("bring", EXECUTED.values(), ids=EXECUTED)
def test_a_job_that_was_admitted_has_left_the_queue_and_its_clock(h: History, bring: Deed) -> None:
    bring(h)
    h.after(10**6)

    assert expired(h) == []


def test_denials_do_not_stop_the_queue_clock(h: History) -> None:
    h.accepted("a", clocks=clocks(queue=60))
    h.after(40).denied("a")
    h.after(20)

    assert [fact.job for fact in expired(h)] == ["a"]


def test_a_job_that_had_run_and_is_back_has_its_whole_time_in_the_queue_again(h: History) -> None:
    """It left the queue in time; what it ran does not count as waiting."""
    h.accepted("a", clocks=clocks(queue=60))
    h.routed("a")
    h.claimed("a")
    h.admitted("a")
    h.placed("a")
    h.started("a")
    h.after(5000).preempted("a")
    assert expired(h) == []

    h.after(60)
    assert [fact.elapsed_s for fact in expired(h)] == [60.0]


GIVEN_BACK: dict[str, Deed] = {
    "waiting": lambda h: (h.is_running("a"), h.cancel_requested("a", command_seq=77), h.preempted("a")),
    "routed": lambda h: (h.is_running("a"), h.cancel_requested("a", command_seq=77), h.preempted("a"), h.routed("a")),
}


@pytest.mark.parametrize("bring", GIVEN_BACK.values(), ids=GIVEN_BACK)
def test_a_job_that_was_given_back_though_its_end_was_promised_is_ended(h: History, bring: Deed) -> None:
    bring(h)
    (proposal,) = decide_expiries(h.site, h.now_s)

    assert proposal.fact == Cancelled(job="a", actor="op", reason="enough", command_seq=77)
    assert (proposal.subject, proposal.expected, proposal.actor) == ("gpuq.ev.job.a", h.job("a").seq, "op")
    h.proposed(proposal)
    assert h.job("a").phase is Phase.CANCELLED


def test_whoever_executes_a_job_keeps_the_promise_of_its_end(h: History) -> None:
    h.is_running("a")
    h.cancel_requested("a")

    assert decide_expiries(h.site, h.now_s) == []


def test_no_more_jobs_expire_in_one_look_than_asked_for(h: History) -> None:
    for number in range(5):
        h.accepted(f"j{number}", clocks=clocks(queue=1))
    h.after(2)

    assert len(decide_expiries(h.site, h.now_s, limit=3)) == 3


def test_the_same_state_gives_the_same_decisions(h: History) -> None:
    h.accepted("a", clocks=clocks(queue=1))
    h.is_running("b")
    h.after(2)
    for name in ("a", "b", "nobody"):
        h.cancel_wanted(name)

    assert decide_commands(h.site) == decide_commands(h.site)
    assert decide_expiries(h.site, h.now_s) == decide_expiries(h.site, h.now_s)
    assert len(decide_commands(h.site)) == 3
