from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from gpukeeper.agents.attempt import Attempt, Stop
from gpukeeper.agents.runtimes.port import RuntimeFailure
from gpukeeper.events import device as device_facts
from gpukeeper.events import job as facts
from gpukeeper.events import subjects
from gpukeeper.events.memory import Fault
from gpukeeper.events.objects import digest_of, put_body
from gpukeeper.events.readings import ResidentModel
from gpukeeper.events.reasons import Reason
from gpukeeper.events.runtime import Suspect
from gpukeeper.events.work import JobResult, Work
from gpukeeper.projections.job import Phase
from support.bench import Bench, WatchedLog
from support.history import clocks
from support.scripted import MB, done
from support.virtual_time import VirtualLoop, in_virtual_time

WHOLE = ["Admitted", "PlacementVerified", "Started", "Succeeded"]


async def wish(bench: Bench, job_id: str = "a", *, reason: str = "enough") -> int:
    return await bench.put(facts.CancelRequested(job=job_id, command_seq=7, actor="mo", reason=reason))


async def lapse(bench: Bench, attempt: Attempt) -> None:
    """Somebody ended the claim, and the agent hears of it."""
    await bench.put(
        device_facts.ClaimLapsed(
            host="h1",
            device="g0",
            epoch=attempt.epoch,
            job=attempt.route.job,
            reason=Reason.CLAIM_LAPSED,
            detail="silent",
        )
    )
    attempt.stop(Stop.FENCED)


# --- an attempt that goes well


@in_virtual_time
async def test_an_attempt_claims_admits_loads_verifies_starts_ends_and_releases() -> None:
    bench = Bench()
    attempt = await bench.run()

    assert await bench.told() == WHOLE
    assert await bench.device_told() == ["Claimed", "Released"]
    assert await bench.runtime_told() == ["ModelLoaded"]
    assert (bench.runtime.loads, bench.runtime.runs) == (["m"], ["m"])
    admitted, succeeded = await bench.one(facts.Admitted), await bench.one(facts.Succeeded)
    assert (admitted.epoch, admitted.route_seq, admitted.instance_id) == (attempt.epoch, attempt.route.seq, "h1-1")
    assert (admitted.need_mb, admitted.need_source, admitted.usable_mb) == (5000, "reported", 24_000)
    assert admitted.reading is not None
    assert admitted.residency is not None
    assert not admitted.resident
    assert succeeded.result == JobResult(text="hello")
    assert succeeded.epoch == attempt.epoch


@in_virtual_time
async def test_the_folds_agree_that_the_job_succeeded_and_the_slot_is_free() -> None:
    bench = Bench()
    await bench.run()
    site = await bench.site()

    assert site.jobs["a"].phase is Phase.SUCCEEDED
    assert site.devices["h1/g0"].claims == ()
    assert not site.lapses


@in_virtual_time
async def test_a_model_that_is_resident_is_not_loaded_again() -> None:
    bench = Bench()
    bench.runtime.holds("m:latest")
    await bench.run()

    assert await bench.told() == WHOLE
    assert bench.runtime.loads == []
    assert await bench.runtime_told() == []
    assert (await bench.one(facts.Admitted)).resident


@in_virtual_time
async def test_a_declared_need_is_taken_at_its_word() -> None:
    bench = Bench()
    await bench.run(need={"vram_mb": 6000})

    admitted = await bench.one(facts.Admitted)
    assert (admitted.need_mb, admitted.need_source) == (6000, "declared")


@in_virtual_time
async def test_heartbeats_say_how_far_the_attempt_is() -> None:
    bench = Bench()
    attempt = bench.attempt(await bench.send())
    assert attempt.beats() == []
    task = asyncio.create_task(attempt.run())
    phases: list[str] = []
    while not task.done():
        phases += [beat.phase for beat in attempt.beats() if beat.phase not in phases]
        await asyncio.sleep(0.0005)
    await task

    assert phases == ["claimed", "loading", "loaded", "placed", "running"]
    (beat,) = attempt.beats()
    assert (beat.job, beat.device, beat.slot, beat.epoch, beat.tokens) == ("a", "g0", 0, attempt.epoch, 2)
    assert beat.last_progress_at is not None


@in_virtual_time
async def test_tokens_go_out_as_they_come_and_end_with_the_attempt() -> None:
    bench = Bench()
    await bench.run()

    chunks = [msgspec.json.decode(body) for subject, body in bench.published if subject == "gpuq.out.a"]
    assert [(c["offset"], c.get("text", "")) for c in chunks] == [(0, "hel"), (3, "lo"), (5, "")]
    assert [c.get("done", False) for c in chunks] == [False, False, True]


@in_virtual_time
async def test_the_work_is_handed_to_the_runtime_as_it_was_submitted() -> None:
    bench = Bench()
    await bench.run(prompt="say it", max_tokens=9)

    (work,) = bench.runtime.works
    assert (work.prompt, work.max_tokens) == ("say it", 9)


@in_virtual_time
async def test_timings_are_told() -> None:
    bench = Bench()
    await bench.run()

    timings = (await bench.one(facts.Succeeded)).timings
    assert timings.load_s is not None
    assert timings.first_byte_s is not None
    assert timings.run_s is not None


# --- losing the claim or the right to execute


@in_virtual_time
async def test_a_claim_on_a_device_that_moved_on_is_lost_and_leaves_no_trace() -> None:
    bench = Bench()
    attempt = bench.attempt(await bench.send())
    await bench.put(device_facts.Changed(host="h1", device="g0", state="healthy"))
    await attempt.run()

    assert attempt.epoch == 0
    assert await bench.told() == []
    assert await bench.device_told() == ["Changed"]


@in_virtual_time
async def test_the_next_claim_rests_on_what_the_lost_one_found() -> None:
    bench = Bench()
    first = bench.attempt(await bench.send())
    await bench.put(device_facts.Changed(host="h1", device="g0", state="healthy"))
    await first.run()
    bench.room.give_slot(first.slot)
    unfolded = bench.attempt(first.route)
    await unfolded.run()
    bench.room.give_slot(unfolded.slot)
    # What somebody else wrote there comes back through the log.
    bench.room.view.device_seq["g0"] = first.slot.subject.seq
    await bench.attempt(first.route).run()

    assert unfolded.epoch == 0, "nothing is claimed on what is not folded yet"
    assert await bench.told() == WHOLE


@pytest.mark.parametrize(
    "meanwhile",
    [
        facts.Cancelled(job="a", actor="mo"),
        facts.Expired(job="a", clock="queue", limit_s=1, source="s", elapsed_s=2),
        facts.Admitted(
            job="a",
            host="h2",
            device="g0",
            slot=0,
            epoch=3,
            attempt=1,
            route_seq=2,
            runtime="ollama",
            instance_id="h2-1",
            resident=False,
        ),
    ],
    ids=lambda fact: type(fact).__name__,
)
@in_virtual_time
async def test_a_job_that_moved_on_before_its_admission_is_not_executed(meanwhile: facts.Fact) -> None:
    bench = Bench()
    attempt = bench.attempt(await bench.send())
    await bench.put(meanwhile)
    await attempt.run()

    assert await bench.told() == [type(meanwhile).__name__]
    assert await bench.device_told() == ["Claimed", "Released"]
    assert bench.runtime.loads == bench.runtime.runs == []
    assert bench.room.ledger.reservations == ()


@in_virtual_time
async def test_notes_that_came_before_the_admission_are_stepped_over() -> None:
    bench = Bench()
    attempt = bench.attempt(await bench.send())
    await bench.put(facts.Waiting(job="a", reason=Reason.CAPACITY))
    await bench.put(facts.Resubmitted(job="a", submission_seq=9, producer="cli"))
    await attempt.run()

    assert await bench.told() == ["Waiting", "Resubmitted", *WHOLE]


@in_virtual_time
async def test_a_job_that_went_back_to_the_queue_in_between_is_not_taken_out_of_it_by_an_old_route() -> None:
    bench = Bench()
    attempt = bench.attempt(await bench.send())
    await bench.put(facts.Waiting(job="a", reason=Reason.HANDED_BACK, epoch=5))
    await attempt.run()

    assert await bench.told() == ["Waiting"]


# --- denials

Prepare = Callable[[Bench], object]


def unreachable(bench: Bench) -> None:
    bench.runtime.healthy, bench.runtime.error, bench.runtime.resident = False, "connection refused", None


def silent_about_residency(bench: Bench) -> None:
    bench.runtime.resident, bench.runtime.error = None, "/api/ps: 500"


def lost_card(bench: Bench) -> None:
    bench.card.state, bench.card.error = "lost", "GPU is lost"


def unread_card(bench: Bench) -> None:
    bench.card.state, bench.card.error = "unknown", "timed out"


def no_figures(bench: Bench) -> None:
    bench.card.total_mb = None


def full_card(bench: Bench) -> None:
    bench.card.used_mb = 21_000


def unknown_size(bench: Bench) -> None:
    bench.runtime.size_mb = None


@pytest.mark.parametrize(
    ("prepare", "reason", "words"),
    [
        (unreachable, Reason.RUNTIME_UNREACHABLE, "ollama: connection refused"),
        (silent_about_residency, Reason.RESIDENCY_UNKNOWN, "ollama: /api/ps: 500"),
        (lost_card, Reason.DEVICE_LOST, "GPU is lost"),
        (unread_card, Reason.DEVICE_UNKNOWN, "timed out"),
        (no_figures, Reason.DEVICE_UNKNOWN, "lacks memory figures"),
        (full_card, Reason.INSUFFICIENT, "used 21000 MB"),
        (unknown_size, Reason.NEED_UNKNOWN, "Nobody declared or reported"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
@in_virtual_time
async def test_a_denial_names_its_reason_and_evidence_and_nothing_is_asked_of_the_runtime(
    prepare: Prepare, reason: Reason, words: str
) -> None:
    """C14: a runtime that does not say what it holds is not one that holds nothing."""
    bench = Bench()
    prepare(bench)
    attempt = await bench.run()

    assert await bench.told() == ["Denied"]
    assert await bench.device_told() == ["Claimed", "Released"]
    denied = await bench.one(facts.Denied)
    assert (denied.reason, denied.epoch, denied.runtime) == (reason, attempt.epoch, "ollama")
    assert words in denied.detail
    assert denied.reading is not None
    assert denied.residency is not None
    assert bench.runtime.loads == bench.runtime.runs == []
    assert bench.room.ledger.reservations == ()
    site = await bench.site()
    assert list(site.queue) == ["a"]
    assert not site.lapses


@in_virtual_time
async def test_a_device_that_may_not_be_scheduled_denies() -> None:
    bench = Bench(unschedulable="a MIG parent")
    await bench.run()

    assert (await bench.one(facts.Denied)).reason is Reason.DEVICE_UNKNOWN


@in_virtual_time
async def test_two_attempts_at_once_do_not_both_get_what_only_one_may_have() -> None:
    """The runtime takes its time to say how large the model is; what is decided rests on what is reserved by then."""
    bench = Bench(slots=2)
    bench.card.total_mb = 8000
    bench.runtime.size_s = 0.5
    attempts = [bench.attempt(await bench.send(name)) for name in "ab"]
    await asyncio.gather(*(attempt.run() for attempt in attempts))

    told = [await bench.told(name) for name in "ab"]
    assert sorted(told) == [WHOLE, ["Denied"]]


@in_virtual_time
async def test_evidence_that_grew_old_while_the_claim_was_stored_is_gathered_anew() -> None:
    bench = Bench()
    attempt = bench.attempt(await bench.send())

    async def late() -> None:
        await asyncio.sleep(60)
        bench.card.used_mb = 23_000

    bench.log.before[1] = late
    await attempt.run()

    assert await bench.told() == ["Denied"]
    reading = (await bench.one(facts.Denied)).reading
    assert reading is not None
    assert reading.used_mb == 23_000


# --- loading


@in_virtual_time
async def test_a_load_that_fails_fails_the_job_in_the_runtimes_words() -> None:
    bench = Bench()
    bench.runtime.load_failure = RuntimeFailure(Reason.LOAD_FAILED, "model requires more system memory", status=500)
    await bench.run()

    failed = await bench.one(facts.Failed)
    assert await bench.told() == ["Admitted", "Failed"]
    assert (failed.reason, failed.detail, failed.status) == (
        Reason.LOAD_FAILED,
        "model requires more system memory",
        500,
    )
    assert await bench.device_told() == ["Claimed", "Released"]
    assert bench.room.suspects == {}
    await asyncio.sleep(0.1)
    assert bench.room.ledger.unseen_mb(bench.card.reading()) == 0


@in_virtual_time
async def test_a_load_that_takes_too_long_names_the_load_clock_and_keeps_the_slot_until_the_runtime_is_idle() -> None:
    bench = Bench()
    bench.runtime.load_s = 100
    bench.runtime.busy_after_cut_s = 7
    await bench.run(clocks=clocks(load=5))

    expired = await bench.one(facts.Expired)
    assert (expired.clock, expired.limit_s, expired.source) == ("load", 5, "job deadlines.load_s")
    assert expired.elapsed_s == pytest.approx(5, abs=0.1)
    assert await bench.at_s(device_facts.Released) - bench.runtime.cuts[0] >= 7
    assert bench.runtime.runs == []


# --- the placement guard


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (ResidentModel(model="m", size_bytes=5000 * MB, vram_bytes=0), Reason.CPU_FALLBACK),
        (ResidentModel(model="m", size_bytes=0, vram_bytes=0), Reason.PLACEMENT_UNKNOWN),
        (ResidentModel(model="m", size_bytes=0, vram_bytes=5000 * MB), Reason.PLACEMENT_UNKNOWN),
        (ResidentModel(model="m", size_bytes=5000 * MB, vram_bytes=6000 * MB), Reason.PLACEMENT_UNKNOWN),
        (ResidentModel(model="m", size_bytes=5000 * MB, vram_bytes=None), Reason.PLACEMENT_UNKNOWN),
        (ResidentModel(model="other", size_bytes=5000 * MB, vram_bytes=5000 * MB), Reason.PLACEMENT_UNKNOWN),
    ],
    ids=["C1 nothing in VRAM", "C2 zeros", "C2 size 0", "C2 more than all", "no figure", "not there"],
)
@in_virtual_time
async def test_a_model_that_does_not_sit_where_it_should_is_never_sent_work(row: ResidentModel, reason: Reason) -> None:
    bench = Bench()
    bench.runtime.row_after_load = row
    await bench.run()

    assert await bench.told() == ["Admitted", "PlacementFailed", "Failed"]
    placement, failed = await bench.one(facts.PlacementFailed), await bench.one(facts.Failed)
    assert placement.reason == failed.reason == reason
    assert bench.runtime.runs == []
    assert bench.runtime.loads == ["m"], "one attempt, no reload loop"
    suspect = (await bench.facts(subjects.runtime("h1", "ollama")))[-1]
    assert isinstance(suspect, Suspect)
    assert (suspect.model, suspect.job, suspect.reason, suspect.device) == ("m", "a", reason, "g0")
    assert bench.room.suspects["ollama"].model == "m"
    assert await bench.device_told() == ["Claimed", "Released"]


@in_virtual_time
async def test_c4_a_runtime_that_claims_vram_while_the_card_stays_idle_is_not_believed() -> None:
    bench = Bench()
    bench.card.used_mb = 3
    bench.runtime.card_shows_load = False
    await bench.run()

    failed = await bench.one(facts.PlacementFailed)
    assert failed.reason is Reason.PLACEMENT_DISPUTED
    assert (failed.vram_bytes, failed.device_before_mb, failed.device_after_mb) == (5000 * MB, 3, 3)
    assert failed.sources == "vram: runtime; device: rise (g0)"
    assert bench.runtime.runs == []


@in_virtual_time
async def test_a_resident_model_that_is_not_in_vram_is_not_sent_work_either() -> None:
    bench = Bench()
    bench.runtime.holds(vram_mb=100)
    await bench.run()

    assert await bench.told() == ["Admitted", "PlacementFailed", "Failed"]
    assert bench.runtime.loads == bench.runtime.runs == []


@in_virtual_time
async def test_a_model_whose_stay_is_over_is_loaded_again_rather_than_found_on_its_way_out() -> None:
    bench = Bench()
    bench.runtime.holds(stopping=True)
    await bench.run()

    assert bench.runtime.loads == ["m"]
    assert await bench.ends() == ["Succeeded"]


# --- the clocks of a run


@pytest.mark.parametrize(
    ("limits", "steps", "clock", "elapsed_s"),
    [
        ({"first_byte": 5.0}, [100.0, "late", done()], "first_byte", 5),
        ({"idle": 5.0}, ["x", 3.0, "y", 100.0, "late", done()], "idle", 5),
        ({"run": 5.0}, [*["x", 1.0] * 100, done()], "run", 5),
        ({"run": 5.0, "first_byte": 50.0}, [100.0, done()], "run", 5),
        ({"run": 5.0, "idle": 4.5}, ["x", 1.0, "y", 100.0, done()], "run", 5),
    ],
)
@in_virtual_time
async def test_each_clock_of_a_run_names_itself(
    limits: dict[str, float], steps: list[Any], clock: str, elapsed_s: float
) -> None:
    """C31: a runtime that takes work and makes no progress ends the job within its deadlines."""
    bench = Bench()
    bench.runtime.steps = steps
    await bench.run(clocks=clocks(**limits))

    expired = await bench.one(facts.Expired)
    assert (expired.clock, expired.limit_s, expired.source) == (clock, limits[clock], f"job deadlines.{clock}_s")
    assert expired.elapsed_s == pytest.approx(elapsed_s, abs=0.1)
    assert await bench.ends() == ["Expired"]
    assert len(bench.runtime.cuts) == 1
    assert await bench.device_told() == ["Claimed", "Released"]


@in_virtual_time
async def test_a_clock_whose_timer_is_due_a_little_early_names_itself() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.be_early(0.002)
    bench = Bench()
    bench.runtime.steps = [4.999, "x", 100.0, done()]
    await bench.run(clocks=clocks(run=5, idle=50))

    assert (await bench.one(facts.Expired)).clock == "run"


@pytest.mark.parametrize(("busy_s", "left"), [(1.0, True), (10_000.0, False)])
@in_virtual_time
async def test_c31_whether_a_runtime_has_left_the_work_that_it_gave_no_progress_on_is_remembered(
    busy_s: float, left: bool
) -> None:
    bench = Bench()
    bench.runtime.steps = [100.0, "late", done()]
    bench.runtime.busy_after_cut_s = busy_s
    await bench.run(clocks=clocks(first_byte=5))

    suspicion = bench.room.suspects["ollama"]
    assert suspicion.reason == Reason.DEADLINE
    assert (bench.room.work_left.get("ollama") is suspicion) is left


@in_virtual_time
async def test_a_run_that_keeps_its_clocks_is_not_hurried() -> None:
    bench = Bench()
    bench.runtime.steps = [4.9, *["x", 4.9] * 50, done()]
    await bench.run(clocks=clocks(first_byte=5, idle=5, run=300))

    assert await bench.ends() == ["Succeeded"]


@in_virtual_time
async def test_an_expired_run_tells_what_there_was_by_then() -> None:
    bench = Bench()
    bench.runtime.steps = ["once upon ", "a time", 100.0, done()]
    await bench.run(clocks=clocks(idle=5))

    assert (await bench.one(facts.Expired)).partial == "once upon a time"


@in_virtual_time
async def test_the_text_of_an_earlier_attempt_is_not_told_as_this_ones() -> None:
    bench = Bench()
    bench.room.outputs.begin("a", 1)
    await bench.room.outputs.push("a", "from before")
    bench.runtime.load_failure = RuntimeFailure(Reason.LOAD_FAILED, "no")
    await bench.run(attempt=2)

    assert (await bench.one(facts.Failed)).partial is None


# --- failures of a run


@pytest.mark.parametrize(
    ("steps", "reason", "partial"),
    [
        (["he", RuntimeFailure(Reason.RUNTIME_BUSY, "server busy", status=503)], Reason.RUNTIME_BUSY, "he"),
        (["he"], Reason.RUNTIME_CUT, "he"),
        ([], Reason.RUNTIME_CUT, None),
        (["he", ValueError("no such thing")], Reason.INTERNAL, "he"),
        (["he", TimeoutError("of its own")], Reason.INTERNAL, "he"),
    ],
    ids=["C8 busy", "cut", "nothing", "fault", "timeout"],
)
@in_virtual_time
async def test_a_run_that_fails_fails_the_job_once_with_what_there_was(
    steps: list[Any], reason: Reason, partial: str | None
) -> None:
    bench = Bench()
    bench.runtime.steps = steps
    await bench.run()

    failed = await bench.one(facts.Failed)
    assert (failed.reason, failed.partial) == (reason, partial)
    assert await bench.ends() == ["Failed"]
    assert await bench.device_told() == ["Claimed", "Released"]
    assert bench.runtime.runs == ["m"], "nothing is retried"


@in_virtual_time
async def test_a_fault_of_our_own_before_the_admission_fails_the_job_and_frees_the_slot() -> None:
    """Else the job would be routed here again, and again."""
    bench = Bench()
    bench.runtime.find_failure = KeyError("m")
    await bench.run()

    failed = await bench.one(facts.Failed)
    assert await bench.told() == ["Failed"]
    assert (failed.reason, failed.detail) == (Reason.INTERNAL, "KeyError: 'm'")
    assert await bench.device_told() == ["Claimed", "Released"]


@in_virtual_time
async def test_a_fault_of_our_own_on_a_job_that_moved_on_is_told_late_and_frees_the_slot() -> None:
    bench = Bench()
    bench.runtime.find_failure = KeyError("m")
    attempt = bench.attempt(await bench.send())
    await bench.put(facts.Cancelled(job="a", actor="mo"))
    await attempt.run()

    assert await bench.told() == ["Cancelled", "LateResult"]
    assert await bench.device_told() == ["Claimed", "Released"]


# --- results and bodies


@in_virtual_time
async def test_a_large_result_goes_to_the_object_store_and_a_small_one_into_the_log() -> None:
    bench = Bench()
    bench.runtime.steps = ["x", done("y" * 70_000)]
    await bench.run()

    succeeded = await bench.one(facts.Succeeded)
    assert succeeded.result is None
    assert succeeded.result_ref is not None
    body = await bench.objects.get(succeeded.result_ref.object)
    assert body is not None
    assert digest_of(body) == succeeded.result_ref.digest
    assert msgspec.json.decode(body, type=JobResult).text == "y" * 70_000


async def external(bench: Bench, body: bytes, **fields: Any) -> dict[str, Any]:
    """What a submission says that keeps its body in the object store."""
    ref = await put_body(bench.objects, body)
    spec = {"model": "m", "id": "a", "task": "generate", "body": msgspec.to_builtins(ref) | fields}
    return {"raw": json.dumps(spec).encode()}


@in_virtual_time
async def test_a_body_in_the_object_store_is_read_from_there() -> None:
    bench = Bench()
    await bench.run(**await external(bench, b'{"prompt": "long", "max_tokens": 3}'))

    assert await bench.told() == WHOLE
    assert bench.runtime.works == [Work(prompt="long", max_tokens=3)]


@pytest.mark.parametrize(
    ("body", "changed", "words"),
    [
        (b'{"prompt": "p"}', {"object": "not-there"}, "is gone or was changed"),
        (b'{"prompt": "p"}', {"digest": "0" * 64}, "is gone or was changed"),
        (b'{"prompt": 5}', {}, "is no body of a job"),
        (b"\xff", {}, "is no body of a job"),
    ],
    ids=["gone", "changed", "wrong", "not JSON"],
)
@in_virtual_time
async def test_a_body_that_is_not_what_the_submission_says_fails_the_job(
    body: bytes, changed: dict[str, Any], words: str
) -> None:
    bench = Bench()
    await bench.run(**await external(bench, body, **changed))

    failed = await bench.one(facts.Failed)
    assert await bench.told() == ["Failed"]
    assert failed.reason is Reason.BODY_MISSING
    assert words in failed.detail
    assert bench.runtime.loads == []
    assert await bench.device_told() == ["Claimed", "Released"]


@in_virtual_time
async def test_a_submission_that_is_gone_fails_the_job() -> None:
    bench = Bench()
    route = await bench.send()
    attempt = bench.attempt(msgspec.structs.replace(route, submission_seq=999))
    await attempt.run()

    assert (await bench.one(facts.Failed)).reason is Reason.BODY_MISSING


# --- a wish for the end


async def cancelled_at(bench: Bench, after_s: float, **sent: Any) -> Attempt:
    """Run an attempt, and wish for the job's end ``after_s`` after it began."""
    attempt = bench.attempt(await bench.send(**sent))
    task = asyncio.create_task(attempt.run())
    await asyncio.sleep(after_s)
    await wish(bench)
    await task
    return attempt


@in_virtual_time
async def test_c9_a_cancelled_job_keeps_its_slot_until_the_runtime_is_idle() -> None:
    bench = Bench()
    bench.runtime.load_s = 3.0
    bench.runtime.steps = ["he", 1000.0, done()]
    bench.runtime.busy_after_cut_s = 9.0
    await cancelled_at(bench, 5.0)

    assert await bench.ends() == ["Cancelled"]
    cancelled = await bench.one(facts.Cancelled)
    assert (cancelled.actor, cancelled.reason, cancelled.command_seq) == ("mo", "enough", 7)
    assert cancelled.partial == "he"
    (cut_s,) = bench.runtime.cuts
    assert 9.0 <= await bench.at_s(facts.Cancelled) - cut_s < 10
    assert 9.0 <= await bench.at_s(device_facts.Released) - cut_s < 10
    assert "Started" in await bench.told()


@in_virtual_time
async def test_c10_the_load_of_a_cancelled_job_goes_on_and_keeps_its_slot_until_it_has_ended() -> None:
    bench = Bench()
    bench.runtime.load_s = 3.0
    await cancelled_at(bench, 2.0)

    assert await bench.ends() == ["Cancelled"]
    assert bench.runtime.cuts == []
    assert await bench.at_s(device_facts.Released) - await bench.at_s(facts.Cancelled) >= 0.9
    assert [row.model for row in bench.runtime.resident or ()] == ["m"]
    assert bench.runtime.runs == []


@pytest.mark.parametrize("word", ["busy", "unknown"])
@in_virtual_time
async def test_a_runtime_that_is_never_proven_idle_is_waited_for_as_long_as_the_limit(word: Any) -> None:
    """Unknown activity is not idle: a slot is not given away on it."""
    bench = Bench()
    bench.runtime.steps = ["he", 1000.0, done()]
    bench.runtime.idle_word = word
    await cancelled_at(bench, 5.0)

    (cut_s,) = bench.runtime.cuts
    assert 30 <= await bench.at_s(device_facts.Released) - cut_s < 31
    assert await bench.ends() == ["Cancelled"]


@in_virtual_time
async def test_a_wish_is_met_by_the_next_append_before_it_is_heard() -> None:
    bench = Bench()
    bench.room.watch_after_s = 1000
    await cancelled_at(bench, 1.0)

    assert await bench.told() == ["Admitted", "CancelRequested", "Cancelled"]
    assert bench.runtime.runs == []


@in_virtual_time
async def test_a_wish_that_came_too_late_does_not_undo_a_success() -> None:
    bench = Bench()
    attempt = bench.attempt(await bench.send())
    bench.room.watch_after_s = 1000
    undisturbed = Bench()
    await undisturbed.run()
    # The last append is the release, the one before it the end.
    bench.log.before[undisturbed.log.appends - 1] = lambda: wish(bench)
    await attempt.run()

    assert await bench.told() == ["Admitted", "PlacementVerified", "Started", "CancelRequested", "Succeeded"]


@in_virtual_time
async def test_a_runtime_that_fails_because_it_was_told_to_stop_does_not_fail_the_job() -> None:
    bench = Bench()

    class Sulking(type(bench.runtime)):
        async def load(self, model: str, *, on_cpu: bool, work: Work | None = None) -> None:
            try:
                await super().load(model, on_cpu=on_cpu, work=work)
            except asyncio.CancelledError:
                raise RuntimeFailure(Reason.LOAD_FAILED, "client closed connection", status=499) from None

    bench.runtime = Sulking(bench.card)
    bench.runtime.load_s = 100
    await cancelled_at(bench, 5.0)

    assert await bench.ends() == ["Cancelled"]


# --- told to stop


@in_virtual_time
async def test_an_agent_that_stops_hands_back_what_had_not_started() -> None:
    bench = Bench()
    bench.runtime.load_s = 100
    attempt = bench.attempt(await bench.send())
    task = asyncio.create_task(attempt.run())
    await asyncio.sleep(5)
    attempt.stop(Stop.PREEMPT)
    await task

    handed_back = await bench.one(facts.Waiting)
    assert await bench.told() == ["Admitted", "Waiting"]
    assert (handed_back.reason, handed_back.epoch) == (Reason.HANDED_BACK, attempt.epoch)
    assert list((await bench.site()).queue) == ["a"]
    assert await bench.device_told() == ["Claimed", "Released"]


@in_virtual_time
async def test_an_agent_that_stops_marks_what_had_started_as_preempted() -> None:
    bench = Bench()
    bench.runtime.steps = ["he", 1000.0, done()]
    attempt = bench.attempt(await bench.send())
    task = asyncio.create_task(attempt.run())
    await asyncio.sleep(5)
    attempt.stop(Stop.PREEMPT)
    await task

    assert await bench.told() == ["Admitted", "PlacementVerified", "Started", "Preempted"]
    assert (await bench.one(facts.Preempted)).reason is Reason.AGENT_STOPPING
    site = await bench.site()
    assert (list(site.queue), site.jobs["a"].preemptions) == (["a"], 1)


@in_virtual_time
async def test_an_attempt_stopped_before_its_admission_gives_the_slot_back_and_says_nothing_of_the_job() -> None:
    bench = Bench()
    attempt = bench.attempt(await bench.send())
    bench.log.after[1] = lambda: attempt.stop(Stop.PREEMPT)
    await attempt.run()

    assert await bench.told() == []
    assert await bench.device_told() == ["Claimed", "Released"]
    assert "a" in (await bench.site()).lapses, "the scheduler takes its route back"


@in_virtual_time
async def test_the_first_reason_to_stop_stays() -> None:
    bench = Bench()
    bench.runtime.steps = ["he", 1000.0, done()]
    bench.runtime.busy_after_cut_s = 5
    attempt = bench.attempt(await bench.send())
    task = asyncio.create_task(attempt.run())
    await asyncio.sleep(5)
    await wish(bench)
    await asyncio.sleep(2)
    attempt.stop(Stop.PREEMPT)
    await task

    assert await bench.ends() == ["Cancelled"]


@in_virtual_time
async def test_being_told_again_and_again_does_not_break_off_the_tidying_up() -> None:
    bench = Bench()
    tidied: list[str] = []

    class Slow(type(bench.runtime)):
        async def load(self, model: str, *, on_cpu: bool, work: Work | None = None) -> None:
            try:
                await super().load(model, on_cpu=on_cpu, work=work)
            finally:
                await asyncio.sleep(3)
                tidied.append(model)

    bench.runtime = Slow(bench.card)
    bench.runtime.load_s = 100
    attempt = bench.attempt(await bench.send())
    task = asyncio.create_task(attempt.run())
    await asyncio.sleep(5)
    for _ in range(10):
        attempt.stop(Stop.PREEMPT)
        await asyncio.sleep(0.1)
    await task

    assert tidied == ["m"]
    assert await bench.told() == ["Admitted", "Waiting"]


# --- fenced


async def fenced_run(bench: Bench, after_s: float) -> Attempt:
    attempt = bench.attempt(await bench.send())
    task = asyncio.create_task(attempt.run())
    await asyncio.sleep(after_s)
    await lapse(bench, attempt)
    await task
    return attempt


@pytest.mark.parametrize("after_s", [1.0, 5.0], ids=["loading", "running"])
@in_virtual_time
async def test_an_attempt_whose_claim_was_ended_stops_and_appends_nothing_more(after_s: float) -> None:
    bench = Bench()
    bench.runtime.steps = ["he", 1000.0, done()]
    bench.runtime.busy_after_cut_s = 4
    await fenced_run(bench, after_s)

    assert await bench.ends() == []
    assert await bench.device_told() == ["Claimed", "ClaimLapsed"]
    assert len(bench.runtime.cuts) == 1
    assert bench.now_s - bench.runtime.cuts[0] >= 4, "its slot is not offered again before the runtime is idle"
    assert "a" in (await bench.site()).lapses


@in_virtual_time
async def test_a_result_that_comes_after_the_claim_was_ended_is_told_late_and_not_applied() -> None:
    bench = Bench()
    attempt = bench.attempt(await bench.send())
    task = asyncio.create_task(attempt.run())
    while attempt.phase != "running" or attempt.tokens < 2:
        await asyncio.sleep(0.0001)
    attempt.stop_reason = Stop.FENCED
    await task

    assert await bench.told() == ["Admitted", "PlacementVerified", "Started", "LateResult"]
    late = await bench.one(facts.LateResult)
    assert (late.outcome, late.result) == ("succeeded", JobResult(text="hello"))


@in_virtual_time
async def test_a_result_that_comes_after_the_jobs_end_is_told_late_and_not_applied() -> None:
    bench = Bench()
    bench.room.watch_after_s = 1000
    attempt = bench.attempt(await bench.send())
    task = asyncio.create_task(attempt.run())
    await asyncio.sleep(2.2)
    assert attempt.phase == "running"
    await bench.put(
        facts.Lost(
            job="a",
            epoch=attempt.epoch,
            host="h1",
            device="g0",
            reason=Reason.OUTCOME_UNKNOWN,
            detail="silent",
        )
    )
    await task

    assert await bench.told() == ["Admitted", "PlacementVerified", "Started", "Lost", "LateResult"]
    assert (await bench.site()).jobs["a"].phase is Phase.LOST


@in_virtual_time
async def test_a_late_result_is_told_though_the_next_attempt_at_the_job_is_under_way() -> None:
    bench = Bench()
    bench.room.watch_after_s = 1000
    attempt = bench.attempt(await bench.send())
    task = asyncio.create_task(attempt.run())
    await asyncio.sleep(2.2)
    await bench.put(facts.Waiting(job="a", reason=Reason.CLAIM_LAPSED, epoch=attempt.epoch))
    # Just before the note goes out the job moves on once more.
    number = bench.log.appends + 2
    bench.log.before[number] = lambda: bench.put(facts.Cancelled(job="a", actor="mo"))
    await task

    told = await bench.told()
    assert told[-2:] == ["Cancelled", "LateResult"]
    assert await bench.ends() == ["Cancelled"]


@in_virtual_time
async def test_an_attempt_whose_claim_ends_while_it_asks_for_a_size_is_not_admitted() -> None:
    bench = Bench()
    bench.runtime.size_s = 2
    await fenced_run(bench, 1.0)

    assert await bench.told() == []
    assert bench.runtime.loads == []


@pytest.mark.parametrize("how", ["superseded", "fault"])
@in_virtual_time
async def test_a_run_that_is_broken_off_keeps_its_slot_until_the_runtime_is_idle(how: str) -> None:
    bench = Bench()
    bench.room.watch_after_s = 1000
    bench.runtime.steps = ["x", 6.0, "x", ValueError("our fault")] if how == "fault" else [*["x", 3.0] * 9, done()]
    bench.runtime.busy_after_cut_s = 9 if how == "superseded" else 0
    attempt = bench.attempt(await bench.send())
    task = asyncio.create_task(attempt.run())
    await asyncio.sleep(3)
    if how == "superseded":
        await bench.put(facts.Cancelled(job="a", actor="mo"))
    else:
        bench.runtime.going += 1
        asyncio.get_running_loop().call_later(20, lambda: setattr(bench.runtime, "going", 0))
    await task

    began_s = bench.runtime.cuts[0] if bench.runtime.cuts else 8.0
    assert await bench.at_s(device_facts.Released) - began_s >= 9
    assert await bench.ends() == ["Cancelled" if how == "superseded" else "Failed"]


@in_virtual_time
async def test_a_release_that_meets_another_event_while_the_log_is_away_is_stored_when_it_is_back() -> None:
    bench = Bench()
    attempt = bench.attempt(await bench.send())

    async def meanwhile() -> None:
        await bench.put(device_facts.Changed(host="h1", device="g0", state="healthy"))
        bench.log.unreadable = True
        asyncio.get_running_loop().call_later(90, bench.log.come_back)

    bench.log.before[7] = meanwhile
    await attempt.run()

    assert await bench.device_told() == ["Claimed", "Changed", "Released"]
    assert bench.now_s > 90


# --- an agent that is torn down


@pytest.mark.parametrize("after_s", [1.0, 2.2], ids=["loading", "running"])
@in_virtual_time
async def test_an_attempt_that_is_torn_down_leaves_its_claim_for_whoever_comes_next(after_s: float) -> None:
    """Nothing is known of the runtime: a release would offer a slot on which it may still work."""
    bench = Bench()
    attempt = bench.attempt(await bench.send())
    task = asyncio.create_task(attempt.run())
    await asyncio.sleep(after_s)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert await bench.device_told() == ["Claimed"]
    assert await bench.ends() == []
    assert len(bench.runtime.cuts) == 1


# --- whatever happens between any two appends

STEPS = 8  # claim, admission, load, placement, start, end, release, and one more


@pytest.mark.parametrize("number", range(1, STEPS))
@in_virtual_time
async def test_a_wish_between_any_two_appends_ends_the_job_once(number: int) -> None:
    bench = Bench()
    bench.runtime.steps = ["he", 3.0, "llo", done()]
    attempt = bench.attempt(await bench.send())
    bench.log.before[number] = lambda: wish(bench)
    await attempt.run()

    told = await bench.told()
    assert len(await bench.ends()) == 1, told
    assert told[-1] in ("Cancelled", "Succeeded") or number >= 7
    if "Started" not in told:
        assert bench.runtime.runs == []
    assert (await bench.device_told())[-1] == "Released"


@pytest.mark.parametrize("number", range(1, STEPS))
@pytest.mark.parametrize("moment", ["before", "after"])
@in_virtual_time
async def test_a_stop_while_any_append_is_in_the_air_loses_nothing(number: int, moment: str) -> None:
    """Whether the append lands is known afterwards: the job is back in the queue or has ended, and is never lost."""
    bench = Bench()
    attempt = bench.attempt(await bench.send())
    deeds = bench.log.before if moment == "before" else bench.log.after
    deeds[number] = lambda: attempt.stop(Stop.PREEMPT)
    await attempt.run()

    site = await bench.site()
    job = site.jobs["a"]
    settled = job.ended or job.phase is Phase.WAITING
    assert settled or (job.phase is Phase.ROUTED and "a" in site.lapses), await bench.told()
    assert (await bench.device_told())[-1] == "Released"
    assert "LateResult" not in await bench.told()


@pytest.mark.parametrize("number", range(2, STEPS))
@pytest.mark.parametrize("moment", ["before", "after"])
@in_virtual_time
async def test_a_lapse_between_any_two_appends_is_followed_by_no_end_of_ours(number: int, moment: str) -> None:
    bench = Bench()
    attempt = bench.attempt(await bench.send())
    lapsed_at: list[int] = []

    async def end_the_claim() -> None:
        lapsed_at.append(await bench.log.last_seq() + 1)
        if attempt.epoch:
            await lapse(bench, attempt)

    deeds = bench.log.before if moment == "before" else bench.log.after
    deeds[number] = end_the_claim
    await attempt.run()

    later = [s for s in await bench.log.read(subjects.job("a")) if lapsed_at and s.seq > lapsed_at[0]]
    kinds = [msgspec.json.decode(stored.body)["type"] for stored in later]
    in_the_air = kinds[:1] if moment == "before" else []
    assert all(kind == "gpuq.job.late_result.v1" for kind in kinds[len(in_the_air) :]), kinds
    site = await bench.site()
    assert site.jobs["a"].ended or "a" in site.lapses
    assert len(await bench.ends()) <= 1


# --- a log that fails

FAULTS: list[Fault] = ["stored_unanswered", "lost_unanswered", "unavailable"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("order", ["sequence_first", "duplicates_first"])
@pytest.mark.parametrize("number", range(1, STEPS))
@in_virtual_time
async def test_a_fault_at_any_append_is_settled_and_the_job_ends_once(fault: Fault, order: Any, number: int) -> None:
    bench = Bench(log=WatchedLog(check_order=order))
    attempt = bench.attempt(await bench.send())
    bench.log.before[number] = lambda: bench.log.faults.append(fault)
    await attempt.run()

    assert await bench.told() == WHOLE
    assert await bench.device_told() == ["Claimed", "Released"]
    assert bench.runtime.runs == ["m"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("number", range(1, STEPS))
@in_virtual_time
async def test_a_log_that_is_away_for_minutes_at_any_append_is_waited_for(fault: Fault, number: int) -> None:
    """What was tried before may have been stored: it is found by its id, and not taken for a stranger's."""
    bench = Bench()
    bench.runtime.steps = ["he", done()]
    attempt = bench.attempt(await bench.send())

    bench.log.before[number] = lambda: bench.log.go_away(300, first=fault)
    await attempt.run()

    assert await bench.told() == WHOLE
    assert await bench.device_told() == ["Claimed", "Released"]
    assert bench.runtime.runs == ["m"]


@in_virtual_time
async def test_an_end_that_met_a_note_while_the_log_did_not_answer_is_appended_when_it_does() -> None:
    bench = Bench()
    bench.room.watch_after_s = 1000
    attempt = bench.attempt(await bench.send())
    task = asyncio.create_task(attempt.run())
    await asyncio.sleep(2.2)
    await bench.put(facts.Resubmitted(job="a", submission_seq=9, producer="cli"))
    bench.log.unreadable = True
    await asyncio.sleep(60)
    assert not task.done()
    bench.log.unreadable = False
    await task

    assert await bench.told() == ["Admitted", "PlacementVerified", "Started", "Resubmitted", "Succeeded"]
    assert await bench.device_told() == ["Claimed", "Released"]


@in_virtual_time
async def test_progress_is_noted_at_a_bounded_rate() -> None:
    bench = Bench()
    bench.runtime.steps = [*["x", 0.5] * 60, done()]
    await bench.run()

    noted = [fact for fact in await bench.job_facts() if isinstance(fact, facts.Progress)]
    at_s = [0.0, *(fact.elapsed_s for fact in noted)]
    assert len(noted) == 5
    assert all(5 <= later - earlier <= 5.6 for earlier, later in pairwise(at_s))
    assert [fact.tokens for fact in noted] == [round(fact.elapsed_s / 0.5) + 1 for fact in noted]


@in_virtual_time
async def test_a_log_that_is_away_while_tokens_come_stops_neither_them_nor_the_clocks() -> None:
    bench = Bench()
    bench.runtime.steps = [*["x", 1.0] * 60, done()]
    attempt = bench.attempt(await bench.send(clocks=clocks(idle=10, run=100)))
    task = asyncio.create_task(attempt.run())
    await asyncio.sleep(4)
    bench.log.go_away(40)
    await asyncio.sleep(39)
    assert attempt.tokens > 40
    await task

    assert await bench.ends() == ["Succeeded"]


@in_virtual_time
async def test_a_wish_that_a_note_of_progress_meets_ends_the_run() -> None:
    bench = Bench()
    bench.room.watch_after_s = 1000
    bench.runtime.steps = [*["x", 1.0] * 60, done()]
    await cancelled_at(bench, 4.0)

    assert await bench.ends() == ["Cancelled"]
    assert len(bench.runtime.cuts) == 1


@in_virtual_time
async def test_an_event_that_the_log_refuses_for_good_frees_the_slot() -> None:
    bench = Bench(log=WatchedLog(message_bytes_max=3000))
    bench.runtime.steps = [done("y" * 10_000)]
    await bench.run()

    assert await bench.told() == ["Admitted", "PlacementVerified", "Started"]
    assert await bench.device_told() == ["Claimed", "Released"]
    assert "a" in (await bench.site()).lapses


# --- the CPU


@in_virtual_time
async def test_on_a_cpu_device_the_model_must_not_be_in_vram() -> None:
    bench = Bench(kind="cpu")
    bench.runtime.row_after_load = ResidentModel(model="m", size_bytes=5000 * MB, vram_bytes=0)
    await bench.run()

    assert await bench.told() == WHOLE


# --- after a long run


@pytest.mark.parametrize(("ran_s", "suspected"), [(59.0, False), (61.0, True)])
@in_virtual_time
async def test_the_placement_is_looked_at_again_after_a_run_of_more_than_a_minute(
    ran_s: float, *, suspected: bool
) -> None:
    """The model has left VRAM meanwhile: its runtime is suspect, and the job's success stands."""
    bench = Bench()
    bench.runtime.steps = ["hel", ran_s, "lo", done()]
    attempt = bench.attempt(await bench.send())
    task = asyncio.create_task(attempt.run())
    await asyncio.sleep(30)
    assert attempt.phase == "running"
    bench.runtime.resident = [ResidentModel(model="m", size_bytes=5000 * MB, vram_bytes=2500 * MB)]
    await task

    assert await bench.ends() == ["Succeeded"]
    found = [fact for fact in await bench.facts(subjects.runtime("h1", "ollama")) if isinstance(fact, Suspect)]
    assert bool(found) is suspected
    if suspected:
        assert found[0].reason == Reason.CPU_FALLBACK
        assert "after a run of 61 s: 50.0% of m is in VRAM" in found[0].detail


@pytest.mark.parametrize("resident", [[], None], ids=["gone", "not said"])
@in_virtual_time
async def test_a_model_that_is_gone_after_a_long_run_was_not_seen_to_be_misplaced(
    resident: list[ResidentModel] | None,
) -> None:
    bench = Bench()
    bench.runtime.steps = ["hel", 61.0, "lo", done()]
    attempt = bench.attempt(await bench.send())
    task = asyncio.create_task(attempt.run())
    await asyncio.sleep(30)
    bench.runtime.resident = resident
    await task

    assert await bench.ends() == ["Succeeded"]
    assert not [fact for fact in await bench.facts(subjects.runtime("h1", "ollama")) if isinstance(fact, Suspect)]
