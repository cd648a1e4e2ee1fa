from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gpukeeper.events.codec import Event
from gpukeeper.events.ids import is_token, job_id_at
from gpukeeper.events.job import Accepted, Rejected, Resubmitted
from gpukeeper.events.proposal import Proposal
from gpukeeper.events.reasons import Reason
from gpukeeper.events.spec import Submission, parse_submission
from gpukeeper.projections.site import Retention
from gpukeeper.scheduler.accept import Known, decide_submissions, known_from
from gpukeeper.scheduler.config import DeadlinePolicy, KindConfig, Kinds, SchedulerConfig
from support.history import History


@pytest.fixture
def h() -> History:
    history = History()
    history.joined()
    return history


def answers(h: History, known: dict[str, Known] | None = None, *, limit: int = 64) -> list[Proposal]:
    return decide_submissions(h.site, h.live, h.config, known or {}, limit=limit)


def answer(h: History, known: dict[str, Known] | None = None) -> Proposal:
    (proposal,) = answers(h, known)
    return proposal


def accepted(h: History, **fields: Any) -> Accepted:
    """Submit, and expect an acceptance."""
    h.submitted(**fields)
    fact = answer(h).fact
    assert isinstance(fact, Accepted), fact
    return fact


def rejected(h: History, **fields: Any) -> Rejected:
    """Submit, and expect a refusal that names one field."""
    h.submitted(**fields)
    fact = answer(h).fact
    assert isinstance(fact, Rejected), fact
    assert len(fact.problems) == 1
    return fact


def digest_of(**fields: Any) -> str:
    parsed = parse_submission(json.dumps({"model": "m", "prompt": "p"} | fields).encode())
    assert isinstance(parsed, Submission)
    return parsed.digest


# --- acceptance


def test_a_submission_is_accepted_under_the_id_it_chose_resting_on_an_empty_subject(h: History) -> None:
    seq = h.submitted(id="a", producer="web", priority=7, need={"vram_mb": 100}, origin="h1", place="gpu")
    proposal = answer(h)

    assert (proposal.subject, proposal.expected, proposal.actor) == ("gpuq.ev.job.a", 0, "web")
    assert (proposal.aggregate, proposal.correlationid, proposal.causationid) == ("a", "a", None)
    fact = proposal.fact
    assert isinstance(fact, Accepted)
    assert (fact.job, fact.submission_seq, fact.producer, fact.task, fact.model) == ("a", seq, "web", "generate", "m")
    assert (fact.priority, fact.vram_mb, fact.origin, fact.place) == (7, 100, "h1", "gpu")
    assert (fact.waiting, fact.detail, fact.on_capacity) == (None, "", "wait")


def test_a_submission_without_an_id_gets_one_from_its_place_in_the_log(h: History) -> None:
    fact = accepted(h)

    (waiting,) = h.site.submissions.values()
    assert fact.job == job_id_at(waiting.seq, waiting.stored_ns)


def test_a_cloud_event_is_named_as_the_cause(h: History) -> None:
    event = {"specversion": "1.0", "id": "ce-1", "source": "/x", "type": "gpuq.job.submitted.v1"}
    h.submitted(raw=json.dumps(event | {"data": {"model": "m", "prompt": "p"}}).encode())

    assert answer(h).causationid == "ce-1"


def test_an_accepted_submission_is_answered_once(h: History) -> None:
    h.submitted(id="a")
    h.proposed(*answers(h))

    assert answers(h) == []
    assert list(h.site.queue) == ["a"]


def test_submissions_are_answered_in_the_order_in_which_they_came(h: History) -> None:
    for name in "cab":
        h.submitted(id=name)

    assert [proposal.aggregate for proposal in answers(h)] == ["c", "a", "b"]
    assert [proposal.aggregate for proposal in answers(h, limit=2)] == ["c", "a"]


def test_priority_and_what_happens_without_capacity_come_from_the_kind_unless_the_job_says() -> None:
    kinds = Kinds(inference=KindConfig(priority=4, on_capacity="reject"))
    h = History(config=SchedulerConfig(kinds=kinds))
    h.joined()

    assert (accepted(h).priority, accepted(History(config=h.config)).on_capacity) == (4, "reject")
    own = History(config=h.config)
    own.joined()
    fact = accepted(own, priority=0, on_capacity="wait")
    assert (fact.priority, fact.on_capacity) == (0, "wait")


def test_each_clock_names_where_its_limit_was_configured() -> None:
    config = SchedulerConfig(
        deadlines=DeadlinePolicy(load_s=33.0), deadline_sources={"load_s": "/etc/gpuq.toml [scheduler.deadlines]"}
    )
    h = History(config=config)

    clocks = accepted(h, deadlines={"queue_s": 5}).clocks

    assert (clocks.queue.limit_s, clocks.queue.source) == (5, "job deadlines.queue_s")
    assert (clocks.load.limit_s, clocks.load.source) == (33, "/etc/gpuq.toml [scheduler.deadlines]")
    assert (clocks.first_byte.limit_s, clocks.first_byte.set_by) == (300, "the built-in default")
    assert (clocks.idle.limit_s, clocks.run.limit_s) == (300, 21_600)


# --- why it cannot begin at once


def test_with_no_host_known_a_submission_is_accepted_and_waits_for_a_route() -> None:
    fact = accepted(History(), host=None, need={"vram_mb": 10**9})

    assert (fact.waiting, fact.detail) == (Reason.NO_ROUTE, "no host offers it yet")


def test_with_every_slot_taken_it_waits_for_capacity(h: History) -> None:
    h.is_claimed("busy")
    fact = accepted(h)

    assert (fact.waiting, fact.detail) == (Reason.CAPACITY, "no free slot")


def test_with_no_agent_alive_it_waits_for_a_route_and_says_why(h: History) -> None:
    h.joined("h2")
    h.left("h2")
    h.silence(60)
    fact = accepted(h)

    assert fact.waiting is Reason.NO_ROUTE
    assert fact.detail == "its agent has stopped; its agent is silent for 60 s"


# --- refusals


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        (b"{", ""),
        (b"[]", ""),
        (b"\xff", ""),
        (b'{"prompt":"p"}', "model"),
        (b'{"model":"m"}', ""),
        (b'{"model":"m","prompt":"p","prio":1}', "prio"),
        (b'{"model":"m","prompt":"p","need":{"vram_mb":-1}}', "need.vram_mb"),
        (b'{"model":"m","messages":[{"role":"boss"}]}', "messages[0].role"),
        (b'{"specversion":"1.0","type":"gpuq.job.submitted.v1","data":{"model":"m","prompt":5}}', "data.prompt"),
        (b'{"model":"m","prompt":"p","device":"g0"}', "device"),
    ],
)
def test_what_is_malformed_is_refused_with_the_field(h: History, raw: bytes, path: str) -> None:
    seq = h.submitted(raw=raw, producer="web")
    proposal = answer(h)

    fact = proposal.fact
    assert isinstance(fact, Rejected)
    assert (fact.reason, fact.submission_seq, fact.producer) == (Reason.INVALID, seq, "web")
    assert [problem.path for problem in fact.problems] == [path]
    assert fact.job == job_id_at(seq, h.at_ns)
    assert (proposal.subject, proposal.expected) == (f"gpuq.ev.job.{fact.job}", 0)


@pytest.mark.parametrize("name", ["\ufffd", "\x1b[31mweb", "*", "w" * 3_900])
def test_a_producer_with_an_impossible_name_is_told_so_under_its_cleaned_name(h: History, name: str) -> None:
    seq = h.submitted(producer=name, id="a")
    proposal = answer(h)

    fact = proposal.fact
    assert isinstance(fact, Rejected)
    assert (fact.reason, fact.submission_seq) == (Reason.INVALID, seq)
    assert [problem.path for problem in fact.problems] == ["producer"]
    assert is_token(fact.producer)
    assert proposal.actor == fact.producer
    assert is_token(fact.job)
    h.proposed(proposal)
    assert not h.site.submissions


@pytest.mark.parametrize(
    ("pull", "taken"),
    [((), False), (("qwen3:8b",), True), (("qwen3:*",), True), (("llama*", "*"), True), (("q",), False)],
)
def test_a_model_that_no_runtime_lists_is_accepted_where_one_may_fetch_it(
    h: History, pull: tuple[str, ...], taken: bool
) -> None:
    h.registered(pull=pull)
    h.submitted(id="a", model="qwen3:8b")

    fact = answer(h).fact

    assert isinstance(fact, Accepted if taken else Rejected)
    if isinstance(fact, Rejected):
        assert (fact.reason, "may fetch it" in fact.problems[0].message) == (Reason.UNKNOWN_MODEL, True)


@pytest.mark.parametrize(
    ("fields", "reason", "path", "words"),
    [
        ({"kind": "critique"}, Reason.UNKNOWN_KIND, "kind", "known: inference"),
        ({"host": "h9"}, Reason.UNKNOWN_HOST, "host", "known: h1"),
        ({"runtime": "vllm"}, Reason.UNKNOWN_RUNTIME, "runtime", "known: ollama"),
        ({"host": "h1", "runtime": "vllm"}, Reason.UNKNOWN_RUNTIME, "runtime", "known: ollama"),
        ({"model": "mm"}, Reason.UNKNOWN_MODEL, "model", "close: m"),
        ({"model": "qwen3:8b"}, Reason.UNKNOWN_MODEL, "model", "known: m"),
        ({"host": "h1", "device": "g9"}, Reason.UNKNOWN_DEVICE, "device", "its devices: g0"),
        ({"place": "cpu"}, Reason.UNKNOWN_DEVICE, "place", "no cpu device runs this model"),
        ({"need": {"vram_mb": 24_001}}, Reason.NEED_EXCEEDS_DEVICES, "need.vram_mb", "h1/g0 with 24000 MB"),
    ],
)
def test_what_no_place_could_ever_run_is_refused_with_the_field_at_fault(
    h: History, fields: dict[str, Any], reason: Reason, path: str, words: str
) -> None:
    fact = rejected(h, **({"id": "a"} | fields))

    assert (fact.reason, fact.problems[0].path, fact.requested_id) == (reason, path, "a")
    assert words in fact.problems[0].message
    assert fact.job != "a"


def test_a_refusal_leaves_the_chosen_id_free(h: History) -> None:
    h.submitted(id="a", kind="critique")
    h.proposed(*answers(h))

    assert accepted(h, id="a").job == "a"


def test_c23_a_need_larger_than_every_device_is_refused_and_one_that_waits_for_memory_is_not(h: History) -> None:
    """82 GiB against 48 GiB is refused at submission; against 96 GiB that are in use, it is not."""
    h.joined("h2", total_mb=48 * 1024, headroom_mb=1024)
    asked = 82 * 1024
    assert "h2/g0 with 48128 MB" in rejected(h, need={"vram_mb": asked}).problems[0].message

    h.joined("h3", total_mb=96 * 1024)
    h.proposed(*answers(h))
    assert accepted(h, need={"vram_mb": asked}).waiting is None


def test_headroom_is_not_given_out(h: History) -> None:
    h.appeared(total_mb=10_000, headroom_mb=500)

    assert rejected(h, need={"vram_mb": 9501}).reason is Reason.NEED_EXCEEDS_DEVICES
    h.proposed(*answers(h))
    assert accepted(h, need={"vram_mb": 9500}).vram_mb == 9500


def test_a_device_whose_capacity_is_unknown_could_hold_anything(h: History) -> None:
    h.joined("h2", total_mb=None)

    assert accepted(h, need={"vram_mb": 999_999}).waiting is None


def test_a_runtime_that_does_not_say_what_it_has_could_have_any_model(h: History) -> None:
    h.joined("h2", models=None)

    assert accepted(h, model="unheard-of").waiting is None


@pytest.mark.parametrize(("listed", "asked"), [("m:latest", "m"), ("m", "m:latest"), ("m:latest", "m:latest")])
def test_a_model_is_the_same_with_and_without_latest(listed: str, asked: str) -> None:
    h = History()
    h.joined(models=(listed,))

    assert accepted(h, model=asked).model == asked


def test_a_host_whose_agent_has_announced_nothing_yet_is_no_reason_to_refuse() -> None:
    h = History()
    h.joined(devices=(), runtimes=())

    assert accepted(h).waiting is Reason.NO_ROUTE
    h.proposed(*answers(h))
    h.joined(devices=())
    assert accepted(h).waiting is Reason.NO_ROUTE


def test_a_runtime_of_an_agent_that_is_about_to_join_is_waited_for() -> None:
    """An agent tells of its runtimes first, and joins then: what comes in between must not be refused for good."""
    h = History()
    h.registered("h1", "coming")

    told = accepted(h, runtime="coming")
    h.proposed(*answers(h))
    unknown = rejected(h, runtime="nobody")

    assert (told.waiting, unknown.reason) == (Reason.NO_ROUTE, Reason.UNKNOWN_RUNTIME)
    assert "known: none" in unknown.problems[0].message


def test_a_runtime_that_left_the_registry_of_its_host_is_unknown(h: History) -> None:
    h.joined(runtimes=("other",))

    assert rejected(h, runtime="ollama").reason is Reason.UNKNOWN_RUNTIME


def test_a_device_that_its_runtime_does_not_use_is_no_place_for_it() -> None:
    h = History()
    h.joined(devices=("g0", "g1"))
    h.registered(devices=("g1",))

    assert rejected(h, host="h1", device="g0").reason is Reason.UNKNOWN_DEVICE


# --- the same id again


def test_the_same_id_with_the_same_body_is_the_same_job(h: History) -> None:
    h.submitted(id="a")
    h.proposed(*answers(h))
    seq = h.submitted(raw=b' {"prompt": "p", "id": "a", "model": "m"}', producer="retry")
    proposal = answer(h)

    assert proposal.fact == Resubmitted(job="a", submission_seq=seq, producer="retry")
    assert (proposal.subject, proposal.expected) == ("gpuq.ev.job.a", h.job("a").seq)
    h.proposed(proposal)
    assert answers(h) == []
    assert len(h.site.jobs) == 1


def test_the_same_id_and_body_after_the_jobs_end_is_still_that_job(h: History) -> None:
    h.submitted(id="a")
    h.proposed(*answers(h))
    h.cancelled("a")
    h.submitted(id="a")

    assert isinstance(answer(h).fact, Resubmitted)
    h.proposed(*answers(h))
    assert answers(h) == []


def test_the_same_id_with_another_body_is_refused_under_a_handle_of_its_own(h: History) -> None:
    h.submitted(id="a")
    h.proposed(*answers(h))
    fact = rejected(h, id="a", prompt="other")

    assert (fact.reason, fact.problems[0].path, fact.problems[0].value) == (Reason.DUPLICATE_ID, "id", "a")
    assert fact.requested_id == "a"
    assert fact.job != "a"


def test_two_submissions_of_one_id_are_answered_one_after_the_other(h: History) -> None:
    h.submitted(id="a")
    h.submitted(id="a", prompt="other")
    h.submitted(id="b")

    assert [proposal.aggregate for proposal in answers(h)] == ["a", "b"]
    h.proposed(*answers(h))
    assert isinstance(answer(h).fact, Rejected)


def forgetful() -> History:
    """A site that has forgotten the job ``a``, which is in the log."""
    h = History(Retention(above=1))
    h.joined()
    h.submitted(id="a")
    h.proposed(*answers(h))
    h.cancelled("a")
    h.accepted("b")
    h.cancelled("b")
    assert "a" not in h.site.jobs
    return h


def history_of(h: History, job_id: str) -> list[Event]:
    return [event for event in h.events if event.stored.subject == f"gpuq.ev.job.{job_id}"]


def learned(h: History, job_id: str, submission_seq: int) -> Known:
    """What the shell learns from the log when its append was refused."""
    known = known_from(history_of(h, job_id), submission_seq)
    assert known is not None
    return known


def test_a_forgotten_job_is_the_same_job_once_its_history_was_read() -> None:
    h = forgetful()
    seq = h.submitted(id="a")
    assert answer(h).expected == 0, "as far as the fold knows; the log refuses it"

    known = learned(h, "a", seq)
    assert known.digest == digest_of(id="a")
    proposal = answer(h, {"a": known})

    assert isinstance(proposal.fact, Resubmitted)
    h.proposed(proposal)
    assert not h.site.submissions


def test_a_forgotten_job_with_another_body_is_refused() -> None:
    h = forgetful()
    seq = h.submitted(id="a", prompt="other")
    known = learned(h, "a", seq)

    proposal = answer(h, {"a": known})

    assert isinstance(proposal.fact, Rejected)
    assert proposal.fact.reason is Reason.DUPLICATE_ID


def test_a_forgotten_job_that_comes_twice_is_learned_anew_each_time_its_subject_moves() -> None:
    """What was learned is as old as the answer that was appended since: resting on it would be refused for ever."""
    h = forgetful()
    first, second = h.submitted(id="a"), h.submitted(id="a")
    known = learned(h, "a", first)
    h.proposed(answer(h, {"a": known}))
    with pytest.raises(AssertionError, match="expects"):
        h.proposed(answer(h, {"a": known}))

    again = learned(h, "a", second)
    h.proposed(answer(h, {"a": again}))

    assert not h.site.submissions


def test_an_id_that_belongs_to_no_accepted_job_is_taken_all_the_same() -> None:
    h = History()
    h.stored("gpuq.ev.job.a", b"garbage")
    seq = h.submitted(id="a")
    known = learned(h, "a", seq)

    assert known == Known("", 1)
    assert isinstance(answer(h, {"a": known}).fact, Rejected)


def test_nothing_is_learned_where_nothing_stands() -> None:
    assert known_from([], 1) is None


def test_nothing_is_learned_from_the_answer_that_another_scheduler_gave_to_this_very_submission(h: History) -> None:
    """Else it would be taken for a stranger's id, and one submission would become two jobs."""
    seq = h.submitted(id="a")
    h.proposed(*answers(h))

    assert known_from(history_of(h, "a"), seq) is None
    assert known_from(history_of(h, "a"), seq + 1) == learned(h, "a", seq + 1)


# --- handles that somebody has chosen for an id of theirs


@pytest.mark.parametrize("raw", [b"malformed", b'{"model":"m","prompt":"p"}'], ids=["refused", "accepted"])
def test_a_derived_handle_that_is_taken_gives_way_to_the_next_one(h: History, raw: bytes) -> None:
    """Else the answer would be refused by the log for ever, and every submission behind it would wait."""
    seq = h.submitted(raw=raw)
    derived = job_id_at(seq, h.at_ns)
    h.accepted(derived)

    proposal = answer(h)

    assert proposal.aggregate == f"{derived}-2"
    h.proposed(proposal)
    assert not h.site.submissions


def test_a_derived_handle_that_a_forgotten_job_has_gives_way_too(h: History) -> None:
    seq = h.submitted(raw=b"malformed")
    derived = job_id_at(seq, h.at_ns)
    known = {derived: Known("", 5), f"{derived}-2": Known("", 6)}

    assert answer(h, known).aggregate == f"{derived}-3"


# --- purity


def test_the_same_state_gives_the_same_answers(h: History) -> None:
    h.submitted(id="a")
    h.submitted(raw=b"malformed")
    h.submitted(model="other")

    assert answers(h) == answers(h)


def test_an_answer_fits_into_a_message(h: History) -> None:
    h.joined("h2", models=tuple(f"model-{number}" for number in range(5000)))
    fact = rejected(h, model="x" * 256)

    assert len(msgspec.json.encode(fact)) < 4096


def test_a_device_that_its_host_no_longer_has_is_no_place_though_a_runtime_names_it(h: History) -> None:
    h.registered(devices=("g0", "g1"))
    h.joined(devices=("g1",), total_mb=8000)
    h.registered(devices=("g0", "g1"))

    assert rejected(h, need={"vram_mb": 20_000}).reason is Reason.NEED_EXCEEDS_DEVICES
