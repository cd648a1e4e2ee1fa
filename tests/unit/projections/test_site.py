from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from gpukeeper.events import device, job, runtime, subjects
from gpukeeper.events.catalog import FACTS
from gpukeeper.events.codec import decode, encode
from gpukeeper.events.fact import Fact
from gpukeeper.events.log import Stored
from gpukeeper.events.readings import Heartbeat
from gpukeeper.events.reasons import Reason
from gpukeeper.events.site import CommandRefused
from gpukeeper.projections.folding.handlers import HANDLERS
from gpukeeper.projections.job import ENDED, CancelWish, Phase
from gpukeeper.projections.site import Retention, Site
from gpukeeper.projections.snapshot import encode_state
from support.history import History
from support.virtual_time import START_NS

Deed = Callable[[History], object]


@pytest.fixture
def h() -> History:
    """A site with one host that has one device, and one job ``a`` where a test brings it."""
    history = History()
    history.joined()
    return history


# --- submissions


def test_a_submission_waits_for_an_answer_with_the_bytes_that_were_sent() -> None:
    h = History()
    seq = h.submitted(producer="web", raw=b"anything at all")

    (waiting,) = h.site.submissions.values()

    assert (waiting.seq, waiting.producer, waiting.raw) == (seq, "web", b"anything at all")
    assert waiting.stored_ns == h.at_ns


def test_an_accepted_submission_is_a_job_in_the_queue() -> None:
    h = History()
    submission = h.submitted(id="a")
    submitted_ns = h.at_ns
    seq = h.accepted("a", submission_seq=submission, priority=3, waiting=Reason.NO_ROUTE, detail="no host")

    made = h.job("a")

    assert not h.site.submissions
    assert (made.phase, made.seq, made.accepted_seq) == (Phase.WAITING, seq, seq)
    assert (made.submitted_ns, made.accepted_ns, made.queued_ns) == (submitted_ns, h.at_ns, h.at_ns)
    assert (made.priority, made.reason, made.detail) == (3, "no_route", "no host")
    assert list(h.site.queue) == ["a"]
    assert list(h.site.live) == ["a"]


def test_the_first_answer_to_a_submission_counts_and_a_later_one_is_void() -> None:
    h = History()
    submission = h.submitted(id="a")
    handle = "1700000000-00000001"
    h.fact(
        job.Rejected(job=handle, submission_seq=submission, producer="cli", reason=Reason.UNKNOWN_MODEL, problems=())
    )

    h.accepted("a", submission_seq=submission)

    assert "a" not in h.site.jobs
    assert h.job(handle).phase is Phase.REJECTED
    assert not len(h.site.queue)


def test_a_second_acceptance_of_one_id_changes_nothing_but_the_sequence() -> None:
    h = History()
    h.accepted("a", priority=1)
    seq = h.accepted("a", priority=2)

    assert (h.job("a").priority, h.job("a").seq) == (1, seq)
    assert not h.site.submissions


def test_a_rejected_submission_is_an_ended_job_that_was_never_in_the_queue() -> None:
    h = History()
    submission = h.submitted(raw=b"nonsense")
    h.fact(
        job.Rejected(
            job="x-1",
            submission_seq=submission,
            producer="cli",
            reason=Reason.INVALID,
            problems=(
                msgspec.convert({"path": "model", "message": "required"}, job.Problem),
                msgspec.convert({"path": "", "message": "bad"}, job.Problem),
            ),
        )
    )

    assert not h.site.submissions
    assert (h.job("x-1").phase, h.job("x-1").reason) == (Phase.REJECTED, "invalid")
    assert h.job("x-1").detail == "model: required; bad"
    assert not list(h.site.queue)
    assert not h.site.live


def test_a_repeated_submission_is_answered_and_moves_only_the_jobs_sequence(h: History) -> None:
    h.is_routed("a")
    before = h.job("a")
    again = h.submitted(id="a")
    seq = h.fact(job.Resubmitted(job="a", submission_seq=again, producer="cli"))

    assert not h.site.submissions
    assert h.job("a") == msgspec.structs.replace(before, seq=seq)


# --- waiting and routes


def test_a_route_takes_a_job_out_of_the_queue_and_a_slot_of_the_device(h: History) -> None:
    h.accepted("a")
    accepted = h.job("a").seq
    seq = h.routed("a")

    routed = h.job("a")

    assert routed.phase is Phase.ROUTED
    assert routed.route is not None
    assert (routed.route.seq, routed.route.host, routed.route.device) == (seq, "h1", "g0")
    assert (routed.route.job_seq, routed.seq) == (accepted, accepted)
    assert routed.route_seq("h1") == seq
    assert not list(h.site.queue)
    assert list(h.site.routed["h1/g0"]) == ["a"]
    assert h.site.free_slots(h.device()) == 0


def test_a_second_route_of_a_job_is_ignored_but_its_subject_is_kept_up_with(h: History) -> None:
    """Two leaders: the agent that tries this route loses at the job's sequence."""
    h.joined("h2")
    h.is_routed("a")
    first = h.job("a").route
    seq = h.routed("a", "h2")

    assert h.job("a").route == first
    assert h.job("a").route_seq("h2") == seq
    assert not h.site.routed.get("h2/g0")


def test_a_withdrawn_route_puts_the_job_back_where_it_was_in_the_queue(h: History) -> None:
    h.is_routed("a")
    h.accepted("b")
    seq = h.unrouted("a")

    assert (h.job("a").phase, h.job("a").route, h.job("a").reason) == (Phase.WAITING, None, "no_route")
    assert h.job("a").route_seq("h1") == seq
    assert list(h.site.queue) == ["a", "b"]
    assert h.site.free_slots(h.device()) == 1


def test_the_withdrawal_of_an_earlier_route_leaves_the_present_one(h: History) -> None:
    first = h.is_routed("a")
    h.unrouted("a")
    h.routed("a")
    h.unrouted("a", route_seq=first)

    assert h.job("a").phase is Phase.ROUTED
    assert list(h.site.routed["h1/g0"]) == ["a"]


def test_a_changed_reason_to_wait_keeps_the_place_and_the_time_of_a_waiting_job(h: History) -> None:
    h.accepted("a")
    since_ns = h.job("a").since_ns
    seq = h.after(60).waits("a", reason=Reason.CAPACITY)

    assert (h.job("a").reason, h.job("a").detail, h.job("a").seq) == ("capacity", "so it is", seq)
    assert h.job("a").since_ns == since_ns


def test_a_reason_to_wait_that_was_decided_beside_a_route_leaves_the_route(h: History) -> None:
    h.is_routed("a")
    before = h.job("a")
    seq = h.waits("a")

    assert h.job("a") == msgspec.structs.replace(before, seq=seq)
    assert list(h.site.routed["h1/g0"]) == ["a"]


@pytest.mark.parametrize("bring", [History.is_claimed, History.is_admitted, History.is_running])
def test_a_wait_that_names_the_claim_puts_a_job_back_from_wherever_it_was(
    h: History, bring: Callable[[History], int]
) -> None:
    epoch = bring(h)
    h.waits("a", reason=Reason.HANDED_BACK, epoch=epoch)

    back = h.job("a")

    assert (back.phase, back.route, back.epoch, back.reason) == (Phase.WAITING, None, 0, "handed_back")
    assert back.since_ns == h.at_ns
    assert list(h.site.queue) == ["a"]


def test_the_queue_goes_by_priority_then_by_arrival_and_keeps_places_of_jobs_that_come_back(h: History) -> None:
    for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", 5), ("e", -1)):
        h.accepted(name, priority=priority)
    h.routed("b")
    h.routed("c")
    assert list(h.site.queue) == ["d", "a", "e"]

    h.unrouted("c")
    h.unrouted("b")

    assert list(h.site.queue) == ["b", "d", "a", "c", "e"]
    assert [h.site.queue.place(h.job(name)) for name in "bdace"] == [0, 1, 2, 3, 4]
    assert len(h.site.queue) == 5


# --- claims


def test_a_claim_takes_a_slot_and_ends_the_promise_of_its_route(h: History) -> None:
    epoch = h.is_claimed("a")

    (claim,) = h.device().claims
    assert (claim.epoch, claim.job, claim.slot, claim.instance_id) == (epoch, "a", 0, "h1-1")
    assert h.device().follows_route("a", claim.route_seq)
    assert h.device().claim(epoch) == claim
    assert h.device().claim(epoch + 1) is None
    assert h.device().seq == epoch
    assert not h.site.routed["h1/g0"]
    assert h.site.free_slots(h.device()) == 0


def test_a_claim_that_follows_an_earlier_route_leaves_the_present_route_promised(h: History) -> None:
    first = h.is_routed("a")
    h.unrouted("a")
    h.routed("a")
    h.claimed("a", route_seq=first)

    assert list(h.site.routed["h1/g0"]) == ["a"]
    assert h.site.free_slots(h.device()) == -1


def test_a_claim_of_a_job_that_has_ended_does_not_count_as_taken(h: History) -> None:
    """Its agent is about to release it."""
    h.is_running("a")
    h.succeeded("a")

    assert len(h.device().claims) == 1
    assert h.site.free_slots(h.device()) == 1


def test_a_released_claim_is_gone_and_a_job_that_has_ended_is_no_orphan(h: History) -> None:
    h.is_running("a")
    h.succeeded("a")
    h.released("a")

    assert h.device().claims == ()
    assert not h.site.lapses


@pytest.mark.parametrize("bring", [History.is_claimed, History.is_admitted, History.is_running])
def test_a_job_whose_claim_lapses_is_an_orphan_with_the_evidence(h: History, bring: Callable[[History], int]) -> None:
    epoch = bring(h)
    seq = h.lapsed("a")

    lapse = h.site.lapses["a"]

    assert (lapse.host, lapse.device, lapse.epoch, lapse.seq) == ("h1", "g0", epoch, seq)
    assert (lapse.event_id, lapse.detail) == (f"e{seq}", "no heartbeat for 30 s")
    assert lapse.last_beat is not None
    assert (lapse.last_beat.tokens, lapse.silent_s) == (3, 30.0)
    assert h.device().claims == ()


def test_a_job_whose_claim_is_released_before_its_end_is_an_orphan_too(h: History) -> None:
    h.is_running("a")
    h.released("a")

    assert h.site.lapses["a"].detail == "its agent gave the slot up"


def test_a_lapse_of_a_claim_that_the_job_does_not_live_under_makes_no_orphan(h: History) -> None:
    """Two agents claimed for it; the loser's claim ends."""
    h.joined("h2")
    h.is_claimed("a")
    loser = h.claimed("a", "h2", route_seq=1)
    h.admitted("a", epoch=h.device().claims[0].epoch)
    h.released("a", "h2", epoch=loser)

    assert not h.site.lapses


def test_a_waiting_job_is_no_orphan_of_a_claim_that_it_lost_before(h: History) -> None:
    h.is_claimed("a")
    h.denied("a")
    h.released("a")

    assert not h.site.lapses


SETTLED: dict[str, Deed] = {
    "waiting": lambda h: h.waits("a", reason=Reason.CLAIM_LAPSED, epoch=1),
    "unrouted": lambda h: h.unrouted("a"),
    "denied": lambda h: h.denied("a"),
    "cancelled": lambda h: h.cancelled("a"),
    "preempted": lambda h: h.preempted("a"),
}


@pytest.mark.parametrize("settle", SETTLED.values(), ids=SETTLED)
def test_an_orphan_is_settled_by_its_next_state(h: History, settle: Deed) -> None:
    h.is_claimed("a")
    h.lapsed("a")
    assert "a" in h.site.lapses

    settle(h)

    assert not h.site.lapses


def test_an_admission_under_a_claim_that_had_lapsed_is_an_orphan_from_the_start(h: History) -> None:
    """The agent slept, its claim lapsed and the route was withdrawn; then it woke and took the right to execute."""
    epoch = h.is_claimed("a")
    h.lapsed("a")
    h.unrouted("a")
    assert not h.site.lapses
    seq = h.admitted("a")

    assert h.job("a").phase is Phase.ADMITTED
    lapse = h.site.lapses["a"]
    assert (lapse.epoch, lapse.seq, lapse.detail) == (epoch, seq, "it was admitted under a claim that had ended")


def test_an_admission_settles_an_orphan_that_another_claim_takes_up(h: History) -> None:
    h.joined("h2")
    h.is_claimed("a")
    other = h.claimed("a", "h2", route_seq=1)
    h.lapsed("a", epoch=h.device().claims[0].epoch)
    assert "a" in h.site.lapses
    h.admitted("a", "h2", epoch=other)

    assert not h.site.lapses


# --- running


def test_an_admission_names_the_claim_that_executes_the_job(h: History) -> None:
    epoch = h.is_admitted("a")

    admitted = h.job("a")

    assert (admitted.phase, admitted.epoch, admitted.slot) == (Phase.ADMITTED, epoch, 0)
    assert (admitted.instance_id, admitted.attempt) == ("h1-1", 1)


def test_an_admission_on_a_route_that_was_withdrawn_meanwhile_takes_the_job_out_of_the_queue(h: History) -> None:
    h.is_claimed("a")
    h.unrouted("a")
    assert list(h.site.queue) == ["a"]
    h.admitted("a")

    assert not list(h.site.queue)


def test_a_denial_puts_the_job_back_and_is_counted_by_device(h: History) -> None:
    h.joined("h2")
    h.is_claimed("a")
    h.denied("a")
    h.released("a")
    h.routed("a", "h2")
    h.claimed("a", "h2")
    h.denied("a", "h2")
    h.routed("a")
    h.claimed("a")
    h.after(60).denied("a")

    denied = h.job("a")

    assert (denied.phase, denied.reason, denied.detail) == (Phase.WAITING, "denied", "insufficient: too little")
    assert [(d.host, d.count) for d in denied.denials] == [("h2", 1), ("h1", 2)]
    assert denied.denials[-1].at_ns == h.at_ns


def test_every_device_that_denied_is_remembered_once(h: History) -> None:
    h.accepted("a")
    for number in (*range(20), 3):
        h.denied("a", f"x{number}")

    assert sorted((d.host, d.count) for d in h.job("a").denials) == sorted(
        (f"x{number}", 2 if number == 3 else 1) for number in range(20)
    )


def test_a_job_passes_placed_and_running_and_counts_tokens(h: History) -> None:
    h.is_admitted("a")
    h.placed("a")
    assert (h.job("a").phase, h.job("a").detail) == (Phase.PLACED, "all of it")
    h.started("a")
    assert (h.job("a").phase, h.job("a").since_ns) == (Phase.RUNNING, h.at_ns)
    seq = h.progressed("a", tokens=7)
    assert (h.job("a").phase, h.job("a").tokens, h.job("a").seq) == (Phase.RUNNING, 7, seq)


def test_a_failed_placement_is_a_note_that_the_jobs_end_follows(h: History) -> None:
    h.is_admitted("a")
    seq = h.misplaced("a")

    assert (h.job("a").phase, h.job("a").seq) == (Phase.ADMITTED, seq)


def test_a_preempted_job_is_back_in_the_queue_marked_and_with_its_queue_clock_begun_anew(h: History) -> None:
    h.is_running("a")
    h.after(5000).preempted("a")

    back = h.job("a")

    assert (back.phase, back.preemptions, back.reason) == (Phase.WAITING, 1, "agent_stopping")
    assert (back.queued_ns, back.epoch, back.route) == (h.at_ns, 0, None)
    assert back.accepted_ns < back.queued_ns


# --- ends


END: dict[str, tuple[Deed, str, str]] = {
    "succeeded": (lambda h: h.succeeded("a"), "", ""),
    "failed": (lambda h: h.failed("a"), "runtime_error", "it broke"),
    "cancelled": (lambda h: h.cancelled("a"), "cancelled", "op: enough"),
    "expired": (
        lambda h: h.fact(job.Expired(job="a", clock="queue", limit_s=5.0, source="gpuq.toml", elapsed_s=6.04)),
        "deadline",
        "queue clock: 6.0 s of 5 s, set by gpuq.toml",
    ),
    "unroutable": (
        lambda h: h.fact(job.Unroutable(job="a", reason=Reason.CAPACITY, detail="all in use")),
        "capacity",
        "all in use",
    ),
    "lost": (
        lambda h: h.fact(
            job.Lost(job="a", epoch=1, host="h1", device="g0", reason=Reason.OUTCOME_UNKNOWN, detail="silent")
        ),
        "outcome_unknown",
        "silent",
    ),
}


@pytest.mark.parametrize("phase", END)
def test_an_end_is_final(h: History, phase: str) -> None:
    """Whatever comes after it is in the log and changes nothing of the job but the sequence of its subject."""
    end, reason, detail = END[phase]
    h.is_running("a")
    h.lapsed("a")
    end(h)
    ended = h.job("a")
    assert (ended.phase, ended.reason, ended.detail, ended.ended) == (phase, reason, detail, True)
    assert not h.site.live
    assert not h.site.lapses

    for later in (
        h.succeeded,
        h.failed,
        h.cancelled,
        h.preempted,
        h.routed,
        h.claimed,
        h.admitted,
        h.denied,
        h.placed,
        h.started,
        h.progressed,
        h.cancel_requested,
        h.waits,
        h.unrouted,
        h.lapsed,
    ):
        later("a")
    seq = h.fact(job.LateResult(job="a", epoch=1, outcome="succeeded"))

    after = h.job("a")
    assert after == msgspec.structs.replace(ended, seq=seq, route_seqs=after.route_seqs)
    assert not list(h.site.queue)
    assert not h.site.live
    assert not h.site.lapses


def test_every_phase_that_is_an_end_is_listed_as_one() -> None:
    assert {phase for phase in Phase if phase not in ENDED} == {
        Phase.WAITING,
        Phase.ROUTED,
        Phase.ADMITTED,
        Phase.PLACED,
        Phase.RUNNING,
    }


def ended_one_by_one(retention: Retention, count: int, *, every_s: float = 10.0) -> History:
    h = History(retention)
    h.joined()
    for number in range(count):
        h.after(every_s).is_running(f"j{number}")
        h.succeeded(f"j{number}")
        h.released(f"j{number}")
    return h


def test_ended_jobs_are_forgotten_by_number_the_oldest_first() -> None:
    h = ended_one_by_one(Retention(after_s=1e6, above=3), 8)

    assert list(h.site.jobs) == ["j5", "j6", "j7"]
    assert h.site.forgotten == 5


def test_ended_jobs_are_forgotten_by_their_age_in_event_time() -> None:
    h = ended_one_by_one(Retention(after_s=25.0, above=100), 8)

    assert list(h.site.jobs) == ["j5", "j6", "j7"]


def test_jobs_that_have_not_ended_are_never_forgotten() -> None:
    h = History(Retention(after_s=1.0, above=1))
    h.joined()
    h.accepted("old")
    h.after(1000).accepted("new")
    h.cancelled("new")
    h.accepted("newer")
    h.cancelled("newer")

    assert list(h.site.jobs) == ["old", "newer"]


def test_what_comes_for_a_forgotten_job_changes_nothing(h: History) -> None:
    h.site.retention = Retention(above=1)
    h.is_running("a")
    h.succeeded("a")
    h.accepted("b")
    h.cancelled("b")
    assert "a" not in h.site.jobs
    before = encode_state(h.site)

    for later in (h.succeeded, h.admitted, h.waits, h.routed, h.unrouted, h.progressed, h.preempted, h.denied):
        later("a")
    h.released("a")

    h.site.seq, h.site.stored_ns = h.seq, h.at_ns
    assert "a" not in h.site.jobs
    assert h.device().claims == ()
    assert len(encode_state(h.site)) < len(before)


# --- commands


def test_a_command_waits_for_an_answer_with_its_actor(h: History) -> None:
    seq = h.cancel_wanted("a", actor="mo", reason="wrong model")

    command = h.site.commands[seq]

    assert (command.actor, command.job, command.reason, command.problem) == ("mo", "a", "wrong model", "")
    assert (command.event_id, command.stored_ns) == (f"e{seq}", h.at_ns)


def test_a_wish_for_the_end_answers_the_command_and_stays_with_the_job(h: History) -> None:
    h.is_running("a")
    command = h.cancel_wanted("a")
    seq = h.cancel_requested("a", command_seq=command)

    assert not h.site.commands
    assert h.job("a").phase is Phase.RUNNING
    assert h.job("a").seq == seq
    assert h.job("a").cancel == CancelWish("op", "enough", command)


def test_a_cancelled_job_answers_the_command_that_it_names(h: History) -> None:
    h.accepted("a")
    first, second = h.cancel_wanted("a"), h.cancel_wanted("a")
    h.cancelled("a", command_seq=first)

    assert list(h.site.commands) == [second]


def test_a_refusal_answers_the_command(h: History) -> None:
    seq = h.cancel_wanted("nobody")
    h.fact(CommandRefused(command_seq=seq, actor="op", reason=Reason.UNKNOWN_JOB, detail="no such job"))

    assert not h.site.commands


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"not an event", "JSON is malformed"),
        (
            b'{"specversion":"1.0","id":"c","source":"/t","type":"gpuq.operator.dance.v1","subject":"a","time":"t",'
            b'"data":{}}',
            "unknown command 'gpuq.operator.dance.v1'",
        ),
    ],
)
def test_a_command_that_cannot_be_read_waits_for_its_refusal(h: History, body: bytes, problem: str) -> None:
    seq = h.stored("gpuq.cmd.mo", body)

    assert h.site.commands[seq].job is None
    assert problem in h.site.commands[seq].problem


# --- facts that stand where they do not belong


def test_a_fact_about_a_job_that_stands_among_the_commands_does_nothing_to_the_job(h: History) -> None:
    """Who may give commands may not thereby end jobs: it is an unreadable command."""
    epoch = h.is_running("a")
    before = h.job("a")
    seq = h.fact(job.Succeeded(job="a", epoch=epoch, attempt=1), subject=subjects.command("mo"))

    assert h.job("a") == before
    assert h.site.commands[seq].problem == "gpuq.job.succeeded.v1 does not belong on gpuq.cmd.mo"
    assert h.site.unreadable == 1


@pytest.mark.parametrize(
    ("fact", "subject"),
    [
        (job.Cancelled(job="a", actor="x"), "gpuq.ev.job.b"),
        (job.Cancelled(job="a", actor="x"), "gpuq.ev.site"),
        (job.Cancelled(job="a.b", actor="x"), "gpuq.ev.job.a.b"),
        (device.Changed(host="h1", device="g0", state="lost"), "gpuq.ev.device.h2.g0"),
        (runtime.HealthChanged(host="h1", runtime="ollama", healthy=False), "gpuq.ev.job.a"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_fact_on_the_subject_of_another_thing_is_counted_and_not_believed(
    h: History, fact: Fact, subject: str
) -> None:
    h.accepted("a")
    before = h.job("a"), h.device(), h.site.hosts["h1"]
    h.fact(fact, subject=subject)

    assert (msgspec.structs.replace(h.job("a"), seq=before[0].seq), h.device(), h.site.hosts["h1"]) == before
    assert h.site.unreadable == 1


# --- devices and hosts


def test_a_device_appears_as_its_agent_describes_it() -> None:
    h = History()
    seq = h.fact(
        device.Appeared(
            host="h1",
            device="g0",
            kind="gpu",
            name="A100",
            slots=2,
            headroom_mb=500,
            unschedulable="a MIG parent",
            parent="GPU-0",
        )
    )

    appeared = h.device()

    assert (appeared.slots, appeared.total_mb, appeared.headroom_mb) == (2, None, 500)
    assert (appeared.unschedulable, appeared.parent, appeared.name) == ("a MIG parent", "GPU-0", "A100")
    assert (appeared.key, appeared.state, appeared.seq) == ("h1/g0", "healthy", seq)


def test_a_device_that_appears_again_keeps_its_claims_and_is_healthy(h: History) -> None:
    h.is_claimed("a")
    h.changed("lost", detail="fell off the bus")
    assert (h.device().state, h.device().detail) == ("lost", "fell off the bus")
    h.appeared(total_mb=48_000)

    assert (h.device().state, h.device().detail, h.device().total_mb) == ("healthy", "", 48_000)
    assert [claim.job for claim in h.device().claims] == ["a"]


def test_a_host_is_there_from_its_joining_to_its_leaving(h: History) -> None:
    joined = h.site.hosts["h1"]
    assert (joined.left, joined.instance_id, joined.devices, joined.runtimes) == (False, "h1-1", ("g0",), ("ollama",))
    assert joined.joined_seq == joined.seq
    seq = h.left()

    assert (h.site.hosts["h1"].left, h.site.hosts["h1"].seq) == (True, seq)


def test_the_goodbye_of_an_earlier_instance_does_not_end_the_present_one(h: History) -> None:
    h.joined(instance="h1-2")
    seq = h.left(instance="h1-1")

    assert not h.site.hosts["h1"].left
    assert h.site.hosts["h1"].seq == seq


def test_a_runtime_is_registered_healthy_with_its_models_and_loses_nothing_to_a_load(h: History) -> None:
    h.registered(url="http://y", devices=("g0",), loads_models=False, pull=("qwen3:*",))
    h.health(healthy=False, models=None, detail="refused")
    seq = h.fact(runtime.ModelLoaded(host="h1", runtime="ollama", model="m", job="a", epoch=1, load_s=1.0))

    known = h.site.hosts["h1"].runtime("ollama")

    assert known is not None
    assert (known.url, known.devices, known.loads_models) == ("http://y", ("g0",), False)
    assert known.pull == ("qwen3:*",)
    assert (known.healthy, known.models, known.detail, known.seq) == (False, None, "refused", seq)
    assert h.site.hosts["h1"].runtime("other") is None


def test_runtimes_of_a_host_stand_in_the_order_of_their_names(h: History) -> None:
    for name in ("zeta", "alpha", "mid"):
        h.registered(runtime_name=name)

    assert [one.name for one in h.site.hosts["h1"].registry] == ["alpha", "mid", "ollama", "zeta"]


def test_a_suspicion_stays_until_health_is_told_without_one(h: History) -> None:
    h.suspected()
    known = h.site.hosts["h1"].runtime("ollama")
    assert known is not None
    assert known.suspect == "cpu_fallback: 0.0% is in VRAM"
    assert known.suspicion is not None
    assert (known.suspicion.model, known.suspicion.device) == ("m", "g0")

    h.health(models=("m", "n"), suspect="cpu_fallback: 0.0% is in VRAM")
    known = h.site.hosts["h1"].runtime("ollama")
    assert known is not None
    assert known.suspicion is not None
    assert (known.models, known.suspicion.model) == (("m", "n"), "m")

    h.health()
    known = h.site.hosts["h1"].runtime("ollama")
    assert known is not None
    assert known.suspicion is None


def test_the_leader_is_the_one_elected_last(h: History) -> None:
    h.elected("s1")
    h.elected("s2")

    assert h.site.leader == "s2"


# --- what nobody here knows


UNKNOWN = b'{"specversion":"1.0","id":"u","source":"/t","type":"gpuq.x.y.v9","subject":"a","time":"t","data":{}}'


@pytest.mark.parametrize(("body", "counter"), [(UNKNOWN, "unknown"), (b"\xff", "unreadable")])
def test_what_nobody_here_can_read_is_counted_and_kept_up_with(h: History, body: bytes, counter: str) -> None:
    """Decisions rest on the last sequence of a subject: one that stood still would be refused for ever."""
    h.is_routed("a")
    route_seq = h.stored("gpuq.ev.route.h1.a", body)
    job_seq = h.stored("gpuq.ev.job.a", body)
    device_seq = h.stored("gpuq.ev.device.h1.g0", body)
    runtime_seq = h.stored("gpuq.ev.runtime.h1.ollama", body)
    host_seq = h.stored("gpuq.ev.host.h1", body)
    for subject in ("gpuq.ev.job.nobody", "gpuq.ev.device.h9.g9", "gpuq.ev.runtime.h1.x", "gpuq.ev.host.h9"):
        h.stored(subject, body)
    for subject in ("gpuq.ev.site", "gpuq.ev.route.h1.nobody", "gpuq.ev.newthing.a.b"):
        h.stored(subject, body)

    assert h.job("a").phase is Phase.ROUTED
    assert (h.job("a").seq, h.job("a").route_seq("h1"), h.device().seq) == (job_seq, route_seq, device_seq)
    known = h.site.hosts["h1"].runtime("ollama")
    assert known is not None
    assert (known.seq, h.site.hosts["h1"].seq) == (runtime_seq, host_seq)
    assert list(h.site.hosts) == ["h1"]
    assert getattr(h.site, counter) == 12


def test_every_fact_that_is_stored_in_the_log_is_folded_or_left_alone_on_purpose() -> None:
    assert set(FACTS) - set(HANDLERS) == {Heartbeat}


# --- sequences


def test_an_event_that_was_folded_already_changes_nothing(h: History) -> None:
    h.is_running("a")
    h.accepted("b")
    before = encode_state(h.site)

    for event in (*h.events, *reversed(h.events)):
        h.site.apply(event)

    assert encode_state(h.site) == before


def test_an_event_from_before_the_state_changes_nothing_whatever_it_says(h: History) -> None:
    h.is_running("a")
    before = encode_state(h.site)
    body = encode(job.Succeeded(job="a", epoch=1, attempt=1), event_id="x", source="/t", subject="a", time="t")

    h.site.apply(decode(Stored(h.seq, START_NS, "gpuq.ev.job.a", body)))

    assert encode_state(h.site) == before


def test_a_site_knows_how_far_it_is_folded(h: History) -> None:
    h.accepted("a")

    assert (h.site.seq, h.site.stored_ns) == (h.seq, h.at_ns)


def copy_of(site: Site) -> Site:
    return Site.restore(msgspec.msgpack.decode(encode_state(site), type=type(site.state())))


PROMISES: dict[str, Deed] = {
    "claimed": lambda h: h.is_claimed("a"),
    "lapsed": lambda h: (h.is_claimed("a"), h.lapsed("a")),
    "released": lambda h: (h.is_claimed("a"), h.released("a")),
    "stale claim": lambda h: (h.is_routed("a"), h.unrouted("a"), h.routed("a"), h.claimed("a", route_seq=1)),
    "out of order": lambda h: (h.accepted("b"), h.accepted("a"), h.routed("a"), h.routed("b")),
    "two claims": lambda h: (h.is_claimed("a"), h.claimed("a", slot=1, route_seq=1), h.claimed("a", slot=2)),
    "first claim stale": lambda h: (h.is_routed("a"), h.claimed("a", route_seq=1), h.claimed("a", slot=1)),
}


@pytest.mark.parametrize("bring", PROMISES.values(), ids=PROMISES)
def test_what_is_promised_is_the_same_after_a_restart(h: History, bring: Deed) -> None:
    """These indexes are derived, not stored; decisions rest on them all the same."""
    bring(h)
    restored = copy_of(h.site)

    def promised(site: Site) -> dict[str, list[str]]:
        return {key: list(jobs) for key, jobs in site.routed.items() if jobs}

    assert promised(restored) == promised(h.site)
    assert list(restored.queue) == list(h.site.queue)
    assert list(restored.live) == list(h.site.live)
    assert restored.free_slots(h.device()) == h.site.free_slots(h.device())


def test_a_restored_site_folds_on_as_if_it_had_never_stopped(h: History) -> None:
    h.is_running("a")
    h.is_routed("b")
    restored = copy_of(h.site)
    done = len(h.events)
    h.succeeded("a")
    h.released("a")
    h.claimed("b")
    h.cancel_wanted("b")
    h.submitted()
    for event in h.events[done:]:
        restored.apply(event)

    assert encode_state(restored) == encode_state(h.site)
