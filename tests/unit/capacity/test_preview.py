"""What would happen, in figures and in words."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpukeeper.capacity.admission import HostRoom
from gpukeeper.capacity.changes import remedy
from gpukeeper.capacity.decision import Question, decide
from gpukeeper.capacity.device import Device
from gpukeeper.capacity.need import Need
from gpukeeper.capacity.preview import Candidate, Place, Preview, preview
from gpukeeper.capacity.reclaim import Hurdle, Owner
from gpukeeper.events.readings import DeviceReading
from gpukeeper.events.reasons import Reason


def owner(name: str, held_mb: int | None, **changes: Any) -> Owner:
    settings: dict[str, Any] = {
        "runtime": name,
        "held_mb": held_mb,
        "on_device": True,
        "activity": "idle",
        "idle_s": 400.0,
        "grace_s": 300.0,
        "releases": "all",
    }
    return Owner(**(settings | changes))


def question(
    need_mb: int | None, *owners: Owner, total_mb: int = 24_564, free_mb: int = 9000, gpu: str = "GPU-1", **changes: Any
) -> Question:
    reading = DeviceReading(
        device=gpu,
        source=changes.pop("source", "nvml"),
        read_at="2025-06-01T12:00:00.000000Z",
        total_mb=total_mb,
        used_mb=total_mb - free_mb,
        free_mb=free_mb,
    )
    return Question(
        device=Device(id=gpu, kind="gpu", name="NVIDIA GeForce RTX 4090"),
        reading=reading,
        need=None if need_mb is None else Need(vram_mb=need_mb, source="declared"),
        owners=owners,
        **changes,
    )


def ask(*questions: Question, **changes: Any) -> Preview:
    return preview("big", [Candidate(host="gpu-box", runtime="ollama", question=each, **changes) for each in questions])


def only(found: Preview) -> Place:
    assert len(found.places) == 1
    return found.places[0]


def test_the_recorded_example_is_reported_and_nothing_starts() -> None:
    """22,000 MB asked, too little free, ComfyUI within its grace: it stays."""
    comfyui = owner("comfyui", 14_900, idle_s=120.0)
    found = ask(question(22_000, comfyui))

    place = only(found)
    assert (found.outcome, place.reason) == ("denied", Reason.INSUFFICIENT)
    assert (place.shortfall_mb, place.would_release, place.would_free_mb) == (13_000, (), 0)
    assert [(each.runtime, each.kept, each.detail) for each in place.stays] == [
        ("comfyui", Reason.IN_GRACE, "idle 120 s of 300 s")
    ]
    assert [(each.in_s, each.gives_mb, each.enough) for each in place.changes] == [(180.0, 14_900, True)]
    assert not place.hopeless
    words = "\n".join(found.sentences())
    assert "22000 MB (declared): it would not start (insufficient)." in words
    assert "comfyui holds 14900 MB and stays: idle 120 s of 300 s (in_grace)." in words
    assert "in 180 s comfyui would have been idle for its 300 s: 14900 MB, which would be enough." in words
    assert "664 MB are held by nobody registered" in words
    assert words.endswith("nothing was released and nothing started.")


def test_after_its_grace_it_would_be_asked_to_let_go() -> None:
    found = ask(question(22_000, owner("comfyui", 14_900, idle_s=300.0)))
    place = only(found)
    assert (found.outcome, place.reason, place.would_free_mb) == ("releases", None, 14_900)
    assert [each.runtime for each in place.would_release] == ["comfyui"]
    assert place.stays == ()
    assert "would be asked to let go of 14900 MB" in "\n".join(found.sentences())


def test_what_fits_starts_and_nobody_is_asked() -> None:
    place = only(ask(question(9000, owner("comfyui", 14_900))))
    assert (place.outcome, place.reason, place.would_release, place.changes) == ("starts", None, (), ())


def test_c22_the_empty_device_comes_first_and_nothing_is_released() -> None:
    """48 GB with 308 MB free, 16 GB empty, 4.4 GB asked (ollama#16391)."""
    full = question(4506, owner("ollama", 40_000), total_mb=49_152, free_mb=308, gpu="GPU-0")
    empty = question(4506, total_mb=16_384, free_mb=16_384, gpu="GPU-1")
    found = ask(full, empty)
    assert [(each.device, each.outcome) for each in found.places] == [("GPU-1", "starts"), ("GPU-0", "releases")]


def test_c23_what_nobody_registered_holds_is_named_and_what_can_never_fit_is_told_apart() -> None:
    """82 GB asked: 21.3 of 96 GB are held by a vLLM that was started by hand; the other card has 48 GB."""
    gib = 1024
    waits = question(82 * gib, total_mb=96 * gib, free_mb=96 * gib - 21_811, gpu="GPU-1")
    never = question(82 * gib, total_mb=48 * gib, free_mb=48 * gib, gpu="GPU-2")
    places = {each.device: each for each in ask(waits, never).places}

    assert places["GPU-1"].outcome == "denied"
    assert places["GPU-1"].unmanaged_mb == 21_811
    assert places["GPU-1"].hopeless, "nobody that can be asked holds it"
    assert "held by nobody who can be asked" in places["GPU-1"].changes[0].words
    assert "would not fit even if the device were empty" in places["GPU-2"].detail
    assert places["GPU-2"].shortfall_mb is None


def test_c37_a_29_gb_model_needs_one_release() -> None:
    models = [owner("router", mb, model=f"m{mb}", releases="model") for mb in (46_000, 30_000, 24_000)]
    place = only(ask(question(29_000, *models, total_mb=196_608, free_mb=2000)))
    assert [each.model for each in place.would_release] == ["m30000"]
    assert {each.kept for each in place.stays} == {Reason.NOT_NEEDED}


def test_c58_where_everything_is_pinned_the_answer_is_a_capacity_result_that_names_the_pins() -> None:
    found = ask(question(20_000, owner("a", 8000, pinned=True), owner("b", 12_000, pinned=True)))
    place = only(found)
    assert (place.outcome, place.reason) == ("denied", Reason.INSUFFICIENT)
    assert {each.kept for each in place.stays} == {Reason.PINNED}
    assert [(each.words, each.enough) for each in place.changes] == [
        ("an operator unpins b", True),
        ("an operator unpins a", False),
    ]
    assert not place.hopeless


def test_everything_that_stands_in_an_owners_way_is_told() -> None:
    candidate = Candidate(
        host="h",
        runtime="ollama",
        question=question(20_000, owner("comfyui", 14_000, pinned=True, jobs_here=2, activity="busy")),
        jobs=(("comfyui", "j1"), ("other", "j2"), ("comfyui", "j3")),
    )
    change = preview("big", [candidate]).places[0].changes[0]
    assert change.words == (
        "an operator unpins comfyui and jobs j1, j3 on comfyui end, and comfyui is then idle for 300 s"
    )
    assert change.in_s is None, "that does not come by itself"


def test_an_owner_of_unknown_activity_must_show_that_it_does_nothing() -> None:
    place = only(ask(question(20_000, owner("comfyui", 14_000, activity="unknown", idle_s=None))))
    assert "comfyui shows that it does nothing for 300 s" in place.changes[0].words


def test_where_all_changes_together_are_not_enough_it_says_so() -> None:
    place = only(ask(question(24_000, owner("comfyui", 5000, idle_s=10.0))))
    assert place.hopeless
    assert [each.enough for each in place.changes] == [False, False]
    assert "10000 MB more must become free" in place.changes[-1].words


def test_a_device_without_a_free_slot_waits_for_its_jobs() -> None:
    place = only(ask(question(9000), slots_held_by=("j1",)))
    assert (place.outcome, place.reason) == ("waits", Reason.CAPACITY)
    assert "wait for job j1" in place.changes[0].words


def test_a_runtime_that_cannot_take_the_job_releases_nothing() -> None:
    obstacle = Hurdle(Reason.RUNTIME_UNREACHABLE, "ollama: connection refused")
    place = only(ask(question(20_000, owner("comfyui", 14_000)), obstacle=obstacle))
    assert (place.outcome, place.reason, place.would_release, place.would_free_mb) == (
        "denied",
        Reason.RUNTIME_UNREACHABLE,
        (),
        0,
    )
    assert place.stays == ()
    assert "ollama answers again" in place.changes[0].words


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        ({"drained": "by ops: new fans"}, Reason.DRAINED, "an operator resumes gpu-box/GPU-1"),
        ({"blocked": "comfyui did not let go"}, Reason.DEVICE_BLOCKED, "the owner that did not let go"),
    ],
)
def test_out_of_service_says_what_brings_it_back(changes: dict[str, Any], reason: Reason, words: str) -> None:
    place = only(ask(question(20_000, owner("comfyui", 14_000), **changes)))
    assert (place.outcome, place.reason, place.would_release) == ("denied", reason, ())
    assert words in place.changes[0].words


def test_every_reason_has_a_remedy_in_words() -> None:
    assert all(remedy(reason, "ollama", "h/GPU-1") for reason in Reason)


def test_an_unknown_need_asks_for_a_declaration() -> None:
    place = only(ask(question(None, owner("comfyui", 14_000))))
    assert (place.reason, place.changes[0].words) == (Reason.NEED_UNKNOWN, "the job declares need.vram_mb")


def test_releases_are_not_considered_where_no_reading_would_show_them() -> None:
    promised = question(20_000, owner("comfyui", 14_000), free_mb=24_564, reserved_mb=10_000, source="static")
    assert decide(promised).plan is None
    place = only(ask(promised))
    assert (place.would_release, place.changes[0].gives_mb, place.changes[0].enough) == ((), 10_000, True)


def test_memory_that_the_host_lacks_is_no_reason_to_release_any_on_the_device() -> None:
    asked = msgspec.structs.replace(
        question(20_000, owner("comfyui", 14_000), room=HostRoom(ram_mb=499)),
        need=Need(vram_mb=20_000, source="declared", ram_mb=500),
    )
    assert decide(asked).plan is None
    assert only(ask(asked)).reason is Reason.INSUFFICIENT
    assert only(ask(asked)).outcome == "denied"


def test_without_any_place_it_says_so() -> None:
    found = ask()
    assert (found.outcome, found.places) == ("denied", ())
    assert "no place" in found.sentences()[0]


def test_it_can_be_sent_as_json() -> None:
    found = ask(question(22_000, owner("comfyui", 14_900, idle_s=120.0)), stale_s=4.0)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Preview) == found
    assert "Read 4 s ago." in "\n".join(found.sentences())
