"""Previews from a folded site and heartbeats: what is known decides, and what is not known is never free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from gpukeeper.capacity.preview import Place, Preview, preview
from gpukeeper.cli.evidence import candidates
from gpukeeper.cli.livesite import Heard
from gpukeeper.events import device, runtime
from gpukeeper.events.reasons import Reason
from gpukeeper.scheduler.feasible import Want
from support.history import History
from support.hostlooks import card, heard, look


@pytest.fixture
def h() -> History:
    """A host with a card of 24,000 MB, an Ollama that has the model ``m``, and a ComfyUI."""
    history = History()
    history.joined(runtimes=("comfyui", "ollama"))
    history.registered(runtime_name="comfyui", provider="comfyui", releases="all", loads_models=False)
    history.health(runtime_name="comfyui", models=())
    history.registered(runtime_name="ollama", releases="model")
    return history


def ask(h: History, beats: Mapping[str, Heard], *, vram_mb: int | None = 22_000, **want: Any) -> Preview:
    wanted = Want(model=want.pop("model", "m"), vram_mb=vram_mb, **want)
    return preview(wanted.model, candidates(h.site, beats, wanted, now_ns=h.at_ns))


def only(found: Preview) -> Place:
    (place,) = found.places
    return place


def full_card(h: History, *, idle_s: float | None, **comfyui: Any) -> dict[str, Heard]:
    """1,896 MB free; ComfyUI holds the rest."""
    return heard(
        h.at_ns,
        devices=[card(h.at_ns, free_mb=1896)],
        runtimes=[
            look(h.at_ns, "comfyui", holds_mb=21_704, idle_s=idle_s, **comfyui),
            look(h.at_ns, "ollama", holds_mb=0, idle_s=900),
        ],
    )


def test_the_recorded_example_is_reported_comfyui_stays_within_its_grace_and_nothing_starts(h: History) -> None:
    before = h.seq
    found = ask(h, full_card(h, idle_s=120))

    place = only(found)
    assert (found.outcome, place.reason, place.need_mb, place.free_mb) == (
        *("denied", Reason.INSUFFICIENT),
        *(22_000, 1896),
    )
    assert [(each.runtime, each.held_mb, each.kept) for each in place.stays] == [("comfyui", 21_704, Reason.IN_GRACE)]
    assert (place.would_release, place.stale_s, h.seq) == ((), pytest.approx(1.0), before)
    words = "\n".join(found.sentences())
    assert "idle 120 s of 300 s" in words
    assert "in 180 s comfyui would have been idle for its 300 s" in words


def test_after_its_grace_comfyui_would_be_asked(h: History) -> None:
    found = ask(h, full_card(h, idle_s=300))

    assert (found.outcome, [each.runtime for each in only(found).would_release]) == ("releases", ["comfyui"])


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"idle_s": None}, Reason.ACTIVITY_UNKNOWN),
        ({"idle_s": 900, "activity": "busy"}, Reason.OWNER_BUSY),
        ({"idle_s": 900, "idle_since": "no moment"}, Reason.ACTIVITY_UNKNOWN),
        ({"idle_s": 900, "healthy": False}, Reason.OTHER_DEVICE),
    ],
)
def test_a_runtime_that_works_or_whose_idleness_nobody_knows_stays(
    h: History, change: dict[str, Any], kept: Reason
) -> None:
    place = only(ask(h, full_card(h, **change), runtime="ollama"))

    assert place.outcome == "denied"
    assert [each.kept for each in place.stays if each.runtime == "comfyui"] == [kept]


def test_c58_a_pin_keeps_what_would_otherwise_go(h: History) -> None:
    h.fact(runtime.Pinned(host="h1", runtime="comfyui", actor="ann"))

    place = only(ask(h, full_card(h, idle_s=900)))

    assert (place.outcome, [each.kept for each in place.stays]) == ("denied", [Reason.PINNED])
    assert "an operator unpins comfyui" in place.changes[0].words


@pytest.mark.parametrize("ago_s", [15.1, 86_400.0])
def test_c14_a_silent_agent_offers_no_free_memory(h: History, ago_s: float) -> None:
    beats = heard(h.at_ns, devices=[card(h.at_ns, free_mb=24_000)], ago_s=ago_s)

    place = only(ask(h, beats, vram_mb=1))

    assert (place.outcome, place.reason, place.free_mb) == ("denied", Reason.DEVICE_UNKNOWN, None)
    assert "its agent is silent" in place.detail


def test_an_agent_that_was_never_heard_one_that_left_and_one_before_a_restart_are_unknown(h: History) -> None:
    beats = heard(h.at_ns, devices=[card(h.at_ns, free_mb=24_000)])
    never = only(ask(h, {}, vram_mb=1))
    h.joined(runtimes=("ollama",), instance="h1-2")
    restarted = only(ask(h, beats, vram_mb=1))
    h.left(instance="h1-2")
    gone = only(ask(h, beats, vram_mb=1))

    assert {each.reason for each in (never, restarted, gone)} == {Reason.DEVICE_UNKNOWN}
    assert ("never heard" in never.detail, "has stopped" in gone.detail) == (True, True)


def test_a_drained_and_a_blocked_device_admit_nothing(h: History) -> None:
    beats = heard(h.at_ns, devices=[card(h.at_ns, free_mb=24_000)], runtimes=[look(h.at_ns, "ollama")])
    h.fact(device.Drained(host="h1", device="g0", command_seq=1, actor="ann", reason="new fan"))
    drained = only(ask(h, beats, vram_mb=1))
    h.fact(device.Resumed(host="h1", device="g0", command_seq=2, actor="ann"))
    back = only(ask(h, beats, vram_mb=1))
    h.changed("blocked", detail="comfyui did not let go")
    blocked = only(ask(h, beats, vram_mb=1))

    assert (drained.reason, back.outcome, blocked.reason) == (Reason.DRAINED, "starts", Reason.DEVICE_BLOCKED)
    assert "by ann: new fan" in drained.detail
    assert "comfyui did not let go" in blocked.detail


def test_a_resident_model_needs_nothing_more_whatever_its_name_and_a_part_of_it_does(h: History) -> None:
    free = card(h.at_ns, free_mb=100)
    whole = look(h.at_ns, "ollama", holds_mb=20_000, idle_s=10, resident={"m:latest": 20_000})
    assert whole.resident is not None
    row = whole.resident[0]
    half = replace(whole, resident=(replace(row, vram_bytes=row.size_bytes // 2 if row.size_bytes else None),))
    going = replace(whole, resident=(replace(row, stopping=True),))

    found = [only(ask(h, heard(h.at_ns, devices=[free], runtimes=[each]))) for each in (whole, half, going)]

    assert [(each.outcome, each.resident) for each in found] == [("starts", True), ("denied", False), ("denied", False)]


def test_a_model_that_nobody_has_is_named_as_missing_in_every_runtime(h: History) -> None:
    beats = heard(h.at_ns, devices=[card(h.at_ns, free_mb=24_000)], runtimes=[look(h.at_ns, "ollama")])

    found = ask(h, beats, model="other", vram_mb=1)

    assert {(each.runtime, each.reason) for each in found.places} == {
        ("ollama", Reason.MODEL_MISSING),
        ("comfyui", Reason.MODEL_MISSING),
    }


def test_a_suspect_runtime_takes_nothing_until_it_passes_again(h: History) -> None:
    h.suspected()
    beats = heard(h.at_ns, devices=[card(h.at_ns, free_mb=24_000)], runtimes=[look(h.at_ns, "ollama")])

    place = only(ask(h, beats, vram_mb=1))

    assert (place.outcome, place.reason) == ("denied", Reason.CPU_FALLBACK)


def test_a_job_that_loads_is_counted_until_a_newer_reading_shows_it(h: History) -> None:
    h.appeared(slots=2)
    h.accepted("a", vram_mb=10_000)
    h.routed("a")
    h.claimed("a")
    h.admitted("a")
    loading = only(ask(h, heard(h.at_ns, devices=[card(h.at_ns, free_mb=24_000)]), vram_mb=15_000))
    h.placed("a")
    h.started("a")
    same = only(ask(h, heard(h.at_ns, devices=[card(h.at_ns, free_mb=24_000)]), vram_mb=15_000))
    h.after(5)
    shown = only(ask(h, heard(h.at_ns, devices=[card(h.at_ns, free_mb=14_000)]), vram_mb=14_000))

    assert (loading.reserved_mb, loading.usable_mb, loading.outcome) == (10_000, 14_000, "denied")
    assert (same.reserved_mb, same.outcome) == (10_000, "denied")
    assert (shown.reserved_mb, shown.outcome) == (0, "starts")


def test_a_loading_job_of_unknown_need_leaves_nothing_to_give_out(h: History) -> None:
    h.appeared(slots=2)
    h.is_admitted("a")

    place = only(ask(h, heard(h.at_ns, devices=[card(h.at_ns, free_mb=24_000)]), vram_mb=1))

    assert (place.outcome, place.usable_mb) == ("denied", 0)


def test_a_taken_slot_is_waited_for_and_its_job_is_named(h: History) -> None:
    h.is_running("a")
    h.after(5)
    beats = heard(h.at_ns, devices=[card(h.at_ns, free_mb=24_000)], runtimes=[look(h.at_ns, "ollama")])

    place = only(ask(h, beats, vram_mb=1))

    assert (place.outcome, place.reason) == ("waits", Reason.CAPACITY)
    assert "job a" in place.changes[0].words


def test_without_a_declared_need_what_earlier_loads_took_counts_and_else_it_is_unknown(h: History) -> None:
    beats = heard(h.at_ns, devices=[card(h.at_ns, free_mb=24_000)], runtimes=[look(h.at_ns, "ollama")])
    unknown = only(ask(h, beats, vram_mb=None))
    h.fact(runtime.ModelLoaded(host="h1", runtime="ollama", model="m", job="x", epoch=1, load_s=2.0, vram_mb=10_000))

    known = only(ask(h, beats, vram_mb=None))

    assert (known.outcome, known.need_mb, known.need_source) == ("starts", 11_000, "learned")
    assert (unknown.outcome, unknown.reason) == ("denied", Reason.NEED_UNKNOWN)


def test_a_place_may_be_narrowed_to_a_host_a_device_a_runtime_and_a_kind(h: History) -> None:
    h.joined("h2", devices=("g0", "c0"))
    h.appeared("h2", "c0", kind="cpu")
    found = ask(h, {}, vram_mb=1)

    assert {(each.host, each.device, each.runtime) for each in found.places} == {
        ("h1", "g0", "ollama"),
        ("h2", "g0", "ollama"),
        ("h2", "c0", "ollama"),
    }
    assert [each.device for each in ask(h, {}, host="h2", device="c0").places] == ["c0"]
    assert [each.device for each in ask(h, {}, place="cpu").places] == ["c0"]
    assert ask(h, {}, runtime="nobody").places == ()
