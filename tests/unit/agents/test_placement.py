"""The placement guard, which never passes on figures that are missing or contradict each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpukeeper.agents.placement import DEVICE_SHARE_MIN, MB, REMEDY, Verdict, judge
from gpukeeper.events.readings import DeviceReading, ResidentModel
from gpukeeper.events.reasons import Reason

SIZE = 5_137_025_024
SIZE_MB = SIZE // MB


def card(used_mb: int | None, **fields: Any) -> DeviceReading:
    shown: dict[str, Any] = {"source": "nvml", "total_mb": 24564, "used_mb": used_mb, **fields}
    return DeviceReading(device="GPU-1", read_at="2026-11-29T12:00:00Z", **shown)


def cards(*used_mb: int | None, **fields: Any) -> list[DeviceReading]:
    """GPU-1, GPU-2 and so on, of which the first was claimed."""
    return [
        msgspec.structs.replace(card(used, **fields), device=f"GPU-{number}") for number, used in enumerate(used_mb, 1)
    ]


def row(size: int | None = SIZE, vram: int | None = SIZE, **fields: Any) -> ResidentModel:
    return ResidentModel(model="m:8b", size_bytes=size, vram_bytes=vram, **fields)


def judged(resident: ResidentModel | None = None, **changed: Any) -> Verdict:
    """A load that went well in every respect, but for what is ``changed``."""
    arguments: dict[str, Any] = {
        "intended": "gpu",
        "model": "m:8b",
        "resident": row() if resident is None else resident,
        "before": card(300),
        "after": card(300 + SIZE_MB),
        "was_resident": False,
        "min_ratio": 0.99,
    }
    asked = {**arguments, **changed}
    asked |= {"before": readings(asked["before"]), "after": readings(asked["after"])}
    return judge(**asked)


def readings(shown: DeviceReading | Sequence[DeviceReading] | None) -> Sequence[DeviceReading]:
    """One reading, several, or none."""
    if shown is None:
        return ()
    return (shown,) if isinstance(shown, DeviceReading) else shown


def test_a_model_in_vram_that_the_device_shows_passes() -> None:
    verdict = judged()

    assert verdict.passed
    assert verdict.reason is None
    assert verdict.ratio == 1.0
    assert (verdict.size_bytes, verdict.vram_bytes) == (SIZE, SIZE)
    assert (verdict.device_before_mb, verdict.device_after_mb) == (300, 300 + SIZE_MB)
    assert (verdict.sources.vram, verdict.sources.device) == ("runtime", "rise")


def test_c1_a_model_on_the_cpu_is_a_fallback_of_zero_percent() -> None:
    verdict = judged(row(vram=0), after=card(300))

    assert verdict.reason is Reason.CPU_FALLBACK
    assert "0.0%" in verdict.detail
    assert verdict.ratio == 0.0


@pytest.mark.parametrize(
    ("size", "vram"),
    [
        (0, 0),
        (0, 5_000_000_000),
        (5_000_000_000, 6_000_000_000),
        (-5, 3),
        (5, -3),
        (-5, -3),
        (None, SIZE),
        (SIZE, None),
        (None, None),
    ],
)
@pytest.mark.parametrize("intended", ["gpu", "cpu"])
def test_c2_impossible_and_missing_figures_are_unknown_and_both_are_named(
    size: int | None, vram: int | None, intended: str
) -> None:
    verdict = judged(row(size, vram), intended=intended)

    assert verdict.reason is Reason.PLACEMENT_UNKNOWN
    for figure in (size, vram):
        assert ("unknown" if figure is None else str(figure)) in verdict.detail
    assert (verdict.size_bytes, verdict.vram_bytes) == (size, vram)
    assert verdict.ratio is None


def test_c4_a_device_that_did_not_move_disputes_the_runtime() -> None:
    verdict = judged(before=card(3), after=card(3))

    assert verdict.reason is Reason.PLACEMENT_DISPUTED
    assert "100.0%" in verdict.detail
    assert "from 3 MB to 3 MB" in verdict.detail
    assert (verdict.vram_bytes, verdict.device_after_mb) == (SIZE, 3)


@pytest.mark.parametrize(
    ("rise", "passed"), [(SIZE_MB, True), (SIZE_MB // 2 + 1, True), (SIZE_MB // 2 - 1, False), (-50, False)]
)
def test_c4_half_of_the_claim_must_be_seen_to_rise(rise: int, passed: bool) -> None:
    verdict = judged(before=card(1000), after=card(1000 + rise))

    assert verdict.passed is passed


@pytest.mark.parametrize(("used", "passed"), [(SIZE_MB + 400, True), (SIZE_MB // 2 + 1, True), (3, False)])
def test_c4_a_model_that_was_resident_before_must_be_seen_in_use(used: int, passed: bool) -> None:
    verdict = judged(was_resident=True, before=card(used), after=card(used))

    assert verdict.passed is passed
    assert verdict.sources.device == "use"


@pytest.mark.parametrize(
    "changed",
    [
        {"after": None},
        {"before": None},
        {"after": card(None)},
        {"before": card(None)},
        {"after": card(9000, state="lost", error="GPU is lost")},
        {"after": card(9000, state="unknown")},
        {"before": card(0, state="blocked")},
        {"after": card(-1)},
    ],
)
def test_a_device_that_was_not_read_leaves_the_placement_unknown(changed: dict[str, Any]) -> None:
    verdict = judged(**changed)

    assert verdict.reason is Reason.PLACEMENT_UNKNOWN
    assert verdict.sources.device == "unknown"


def test_a_model_that_was_resident_before_needs_no_earlier_reading() -> None:
    assert judged(was_resident=True, before=None).passed


def test_a_runtime_that_did_not_say_what_it_holds_leaves_it_unknown() -> None:
    verdict = judged(residency_known=False)

    assert verdict.reason is Reason.PLACEMENT_UNKNOWN
    assert "did not say" in verdict.detail


def test_a_model_that_is_not_listed_after_its_load_is_unknown() -> None:
    verdict = judge(
        intended="gpu",
        model="m",
        resident=None,
        before=[card(1)],
        after=[card(1)],
        was_resident=False,
        min_ratio=0.99,
    )

    assert verdict.reason is Reason.PLACEMENT_UNKNOWN
    assert "does not list m" in verdict.detail


def test_a_model_that_is_on_its_way_out_does_not_pass() -> None:
    assert judged(row(stopping=True)).reason is Reason.PLACEMENT_UNKNOWN


def test_a_declared_device_is_not_measured_and_the_verdict_says_so() -> None:
    declared = card(None, source="static")

    verdict = judged(before=declared, after=declared)

    assert verdict.passed
    assert verdict.sources.device == "not measured"
    assert "not measured" in verdict.detail
    assert judged(row(vram=SIZE // 2), before=declared, after=declared).reason is Reason.CPU_FALLBACK


@pytest.mark.parametrize(("vram", "passed"), [(98, False), (99, True)])
def test_the_required_share_is_a_limit_that_may_be_met(vram: int, passed: bool) -> None:
    declared = card(None, source="static")

    verdict = judged(row(size=100, vram=vram), before=declared, after=declared)

    assert verdict.passed is passed


def test_a_share_just_below_the_limit_is_never_shown_as_the_limit() -> None:
    verdict = judged(row(size=10_000_000, vram=9_899_999))

    assert verdict.reason is Reason.CPU_FALLBACK
    assert "98.9%" in verdict.detail


def test_a_model_meant_for_the_cpu_passes_with_nothing_in_vram() -> None:
    verdict = judged(row(vram=0), intended="cpu", before=None, after=None)

    assert verdict.passed
    assert verdict.sources.device == "not measured"


def test_a_model_in_vram_that_was_meant_for_the_cpu_is_disputed() -> None:
    assert judged(row(vram=1), intended="cpu").reason is Reason.PLACEMENT_DISPUTED


def test_a_runtime_that_reports_no_vram_passes_on_the_cpu() -> None:
    verdict = judged(row(vram=None), intended="cpu", reports_vram=False, was_resident=True)

    assert verdict.passed
    assert verdict.sources.vram == "none"


def test_a_runtime_that_reports_no_vram_but_holds_some_is_not_on_the_cpu() -> None:
    verdict = judged(row(vram=None), intended="cpu", reports_vram=False, process_use_mb=900, was_resident=True)

    assert verdict.reason is Reason.PLACEMENT_DISPUTED


def test_a_dispute_says_what_an_operator_can_do_and_a_plain_fallback_does_not() -> None:
    disputed = judged(row(vram=1), intended="cpu")
    fallback = judged(row(vram=0))

    assert disputed.reason is Reason.PLACEMENT_DISPUTED
    assert disputed.detail.endswith(REMEDY)
    assert fallback.reason is Reason.CPU_FALLBACK
    assert REMEDY not in fallback.detail


def test_what_the_process_holds_stands_for_the_vram_of_a_runtime_that_reports_none() -> None:
    verdict = judged(row(vram=None), reports_vram=False, process_use_mb=SIZE_MB + 500, was_resident=True)

    assert verdict.passed
    assert verdict.sources.vram == "process"
    assert verdict.vram_bytes == (SIZE_MB + 500) * MB
    assert verdict.ratio == 1.0


def test_without_the_use_of_its_process_such_a_runtime_is_unknown_on_a_gpu() -> None:
    assert judged(row(vram=None), reports_vram=False, was_resident=True).reason is Reason.PLACEMENT_UNKNOWN


def test_a_process_that_holds_little_is_a_fallback() -> None:
    verdict = judged(row(vram=None), reports_vram=False, process_use_mb=300, was_resident=True)

    assert verdict.reason is Reason.CPU_FALLBACK


def test_the_use_of_a_process_does_not_mend_a_figure_that_a_runtime_should_have_given() -> None:
    assert judged(row(vram=None), process_use_mb=SIZE_MB).reason is Reason.PLACEMENT_UNKNOWN


def test_the_size_from_the_catalogue_stands_for_one_that_the_row_has_not() -> None:
    assert judged(row(size=None), model_bytes=SIZE).passed


# --- a runtime that may use several devices


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((300, 300), (300, 300 + SIZE_MB)),
        ((300, 300), (300 + SIZE_MB // 2, 300 + SIZE_MB // 2)),
        ((300, 9000), (300 + SIZE_MB, 300)),
    ],
)
def test_a_model_may_sit_on_any_device_of_its_runtime(before: tuple[int, int], after: tuple[int, int]) -> None:
    verdict = judged(before=cards(*before), after=cards(*after))

    assert verdict.passed
    assert verdict.devices_read == ("GPU-1", "GPU-2")
    assert f"GPU-2 went from {before[1]} MB to {after[1]} MB in use" in verdict.detail
    assert (verdict.device_before_mb, verdict.device_after_mb) == (sum(before), sum(after))


def test_a_model_that_was_resident_may_be_in_use_on_any_device_of_its_runtime() -> None:
    assert judged(was_resident=True, before=(), after=cards(300, SIZE_MB)).passed
    assert judged(was_resident=True, before=(), after=cards(300, 300)).reason is Reason.PLACEMENT_DISPUTED


def test_c4_when_no_device_of_the_runtime_moved_the_runtime_is_disputed() -> None:
    verdict = judged(before=cards(3, 3), after=cards(3, 3))

    assert verdict.reason is Reason.PLACEMENT_DISPUTED
    assert "GPU-1 went from 3 MB to 3 MB in use, GPU-2 went from 3 MB to 3 MB in use" in verdict.detail


def test_what_could_not_be_read_may_hold_the_model_and_disputes_nothing() -> None:
    verdict = judged(before=cards(3, 3), after=cards(3, None, error="GPU is lost"))

    assert verdict.reason is Reason.PLACEMENT_UNKNOWN
    assert "GPU-2 was not read after the load (GPU is lost)" in verdict.detail
    assert verdict.devices_read == ("GPU-1",)
    assert judged(before=cards(3, None), after=cards(3 + SIZE_MB, None)).passed


FIGURES = st.none() | st.sampled_from([0, 1, SIZE, SIZE - 1, 2 * SIZE, -1]) | st.integers(-(2**40), 2**40)
MEGABYTES = st.none() | st.sampled_from([0, 3, SIZE_MB, 2 * SIZE_MB]) | st.integers(0, 10**6)


def reading_of(used_mb: int | None, state: str, source: str) -> DeviceReading:
    return card(used_mb, state=state, source=source)


def row_of(size: int | None, vram: int | None, stopping: bool) -> ResidentModel:
    return row(size, vram, stopping=stopping)


READINGS = st.none() | st.builds(
    reading_of,
    MEGABYTES,
    st.sampled_from(["healthy", "healthy", "healthy", "lost", "blocked", "unknown"]),
    st.sampled_from(["nvml", "nvml", "meminfo", "static", "none"]),
)
ROWS = st.none() | st.builds(row_of, FIGURES, FIGURES, st.booleans())


@settings(deadline=None, max_examples=400)
@given(
    intended=st.sampled_from(["gpu", "cpu"]),
    resident=ROWS,
    known=st.booleans(),
    reports=st.booleans(),
    model_bytes=FIGURES,
    before=READINGS,
    after=READINGS,
    was=st.booleans(),
    process=MEGABYTES,
    ratio=st.sampled_from([0.01, 0.5, 0.99, 1.0]),
)
def test_it_never_passes_with_a_missing_or_contradictory_figure(
    intended: Any,
    resident: ResidentModel | None,
    known: bool,
    reports: bool,
    model_bytes: int | None,
    before: DeviceReading | None,
    after: DeviceReading | None,
    was: bool,
    process: int | None,
    ratio: float,
) -> None:
    verdict = judge(
        intended=intended,
        model="m",
        resident=resident,
        residency_known=known,
        reports_vram=reports,
        model_bytes=model_bytes,
        before=readings(before),
        after=readings(after),
        was_resident=was,
        process_use_mb=process,
        min_ratio=ratio,
    )

    assert verdict.passed == (verdict.reason is None)
    if not verdict.passed:
        return
    assert known
    assert resident is not None
    assert not resident.stopping
    reports = reports or resident.vram_bytes is not None
    if intended == "cpu":
        assert (resident.vram_bytes == 0) if reports else process in (None, 0)
        return
    assert verdict.size_bytes is not None
    assert verdict.vram_bytes is not None
    assert verdict.size_bytes > 0
    assert verdict.vram_bytes >= ratio * verdict.size_bytes
    assert verdict.vram_bytes <= verdict.size_bytes or not reports
    assert verdict.vram_bytes == resident.vram_bytes if reports else verdict.vram_bytes == (process or 0) * MB
    assert after is not None
    if after.source == "static":
        return
    assert after.state == "healthy"
    assert after.used_mb is not None
    base = 0 if was else (before.used_mb if before is not None else None)
    assert base is not None
    assert after.used_mb - base >= DEVICE_SHARE_MIN * verdict.vram_bytes / MB - 4
