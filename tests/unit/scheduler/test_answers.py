from __future__ import annotations

import pytest
from msgspec import UNSET

from gpukeeper.events.job import Rejected, Succeeded
from gpukeeper.events.readings import ClaimBeat
from gpukeeper.events.reasons import Reason
from gpukeeper.events.spec import Problem
from gpukeeper.events.work import JobResult, ObjectRef
from gpukeeper.projections.job import Phase
from gpukeeper.scheduler.answers import Missing, Unanswered, answer, holds, unknown
from support.history import History


@pytest.fixture
def h() -> History:
    history = History()
    history.joined()
    return history


def test_a_submission_is_known_before_it_is_answered() -> None:
    found = Unanswered(7)

    assert [holds(found, until) for until in ("known", "answered", "ended")] == [True, False, False]
    told = answer(found, History().site, History().live)
    assert (told.job, told.phase, told.submission_seq, told.seq) == (None, "submitted", 7, 7)


def test_nothing_holds_for_what_nobody_knows() -> None:
    assert [holds(Missing(), until) for until in ("known", "answered", "ended")] == [False, False, False]
    assert (unknown("a").code, unknown(3).code) == ("unknown_job", "unknown_submission")


def test_a_job_is_answered_from_its_acceptance_on_and_ended_by_its_end_only(h: History) -> None:
    h.accepted("a")
    assert [holds(h.job("a"), until) for until in ("known", "answered", "ended")] == [True, True, False]
    h.is_running("b")
    assert not holds(h.job("b"), "ended")
    h.succeeded("b")
    assert holds(h.job("b"), "ended")


def test_a_waiting_job_is_told_with_its_place_and_reason(h: History) -> None:
    h.accepted("a")
    h.accepted("b")
    h.waits("b")

    first, second = (answer(h.job(name), h.site, h.live) for name in ("a", "b"))
    assert (first.queue_place, second.queue_place) == (1, 2)
    assert (second.phase, second.reason, second.detail) == (Phase.WAITING, Reason.CAPACITY, "so it is")
    assert (second.seq, second.submission_seq) == (h.seq, h.job("b").submission_seq)
    assert (second.host, second.device, second.attempt) == (None, None, 0)


def test_a_running_job_is_told_with_where_it_is_and_the_newest_count_of_tokens(h: History) -> None:
    h.is_running("a")
    told = answer(h.job("a"), h.site, h.live)
    assert (told.host, told.device, told.attempt, told.queue_place, told.tokens) == ("h1", "g0", 1, None, 0)

    h.beat(claims=[ClaimBeat(job="a", epoch=h.job("a").epoch, phase="running", device="g0", slot=0, tokens=17)])
    assert answer(h.job("a"), h.site, h.live).tokens == 17


def ended_well(h: History, **fields: object) -> Succeeded:
    h.is_running("a")
    h.succeeded("a")
    return Succeeded(job="a", epoch=1, attempt=1, **fields)  # pyright: ignore[reportArgumentType]


def test_a_job_that_succeeded_is_told_with_its_result_and_that_counts_its_tokens(h: History) -> None:
    end = ended_well(h, result=JobResult(text="hi", completion_tokens=5))
    told = answer(h.job("a"), h.site, h.live, end=end)

    assert (told.phase, told.ended, told.tokens) == (Phase.SUCCEEDED, True, 5)
    assert told.result == JobResult(text="hi", completion_tokens=5)
    assert (told.result_ref, told.omitted) == (UNSET, UNSET)


def test_a_result_in_the_object_store_is_told_with_its_reference_and_as_such_where_it_could_be_had(h: History) -> None:
    ref = ObjectRef(object="o", size=9, digest="d")
    end = ended_well(h, result_ref=ref)

    had = answer(h.job("a"), h.site, h.live, end=end, stored_result=JobResult(text="long"))
    assert (had.result, had.result_ref, had.omitted) == (JobResult(text="long"), ref, UNSET)
    gone = answer(h.job("a"), h.site, h.live, end=end)
    assert (gone.result, gone.result_ref, gone.omitted) == (UNSET, ref, ("result",))


def test_an_end_that_has_aged_out_is_named(h: History) -> None:
    ended_well(h)
    assert answer(h.job("a"), h.site, h.live).omitted == ("result",)


def test_a_rejected_submission_is_told_with_its_problems(h: History) -> None:
    submission = h.submitted(raw=b"{")
    problems = (Problem(path="model", message="required, but missing"),)
    end = Rejected(job="r", submission_seq=submission, producer="cli", reason=Reason.INVALID, problems=problems)
    h.fact(end)

    told = answer(h.job("r"), h.site, h.live, end=end)
    assert (told.phase, told.ended, told.reason) == (Phase.REJECTED, True, Reason.INVALID)
    assert told.detail == "model: required, but missing"
    assert told.problems == problems
    assert answer(h.job("r"), h.site, h.live).omitted == ("problems",)


def test_an_end_other_than_success_is_told_without_a_result(h: History) -> None:
    h.accepted("a")
    h.cancelled("a")
    told = answer(h.job("a"), h.site, h.live)

    assert (told.ended, told.phase, told.reason, told.detail) == (True, Phase.CANCELLED, "cancelled", "op: enough")
    assert (told.result, told.omitted) == (UNSET, UNSET)
