"""The one decision: it fits, it fits after releases, or it does not."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest

from gpukeeper.capacity.admission import Admit, Deny, HostRoom
from gpukeeper.capacity.decision import Question, decide
from gpukeeper.capacity.device import Device
from gpukeeper.capacity.need import Need
from gpukeeper.capacity.reclaim import Owner
from gpukeeper.events.readings import DeviceReading
from gpukeeper.events.reasons import Reason

COMFYUI = Owner(
    runtime="comfyui",
    held_mb=14_000,
    on_device=True,
    activity="idle",
    idle_s=400.0,
    grace_s=300.0,
    releases="all",
)


def question(need_mb: int | None, free_mb: int | None = 9000, **changes: Any) -> Question:
    total_mb = 24_564
    reading = DeviceReading(
        device="GPU-1",
        source="nvml",
        read_at="2025-06-01T12:00:00.000000Z",
        total_mb=total_mb,
        used_mb=None if free_mb is None else total_mb - free_mb,
        free_mb=free_mb,
    )
    device = Device(id="GPU-1", kind="gpu", name="card", headroom_mb=500)
    need = Need(vram_mb=need_mb, source="declared")
    return msgspec.structs.replace(
        Question(device=device, reading=reading, reserved_mb=1000, need=need, owners=(COMFYUI,)), **changes
    )


def test_what_fits_asks_nobody_to_let_go() -> None:
    found = decide(question(7500))
    assert isinstance(found.admission, Admit)
    assert (found.plan, found.shortfall_mb, found.releases) == (None, None, ())


def test_what_is_missing_counts_what_is_promised_and_the_headroom() -> None:
    found = decide(question(20_000))
    assert isinstance(found.admission, Deny)
    assert found.admission.reason is Reason.INSUFFICIENT
    assert found.shortfall_mb == 20_000 - (9000 - 1000 - 500)
    assert found.releases == (COMFYUI,)


def test_c24_the_promise_is_never_admitted_on_only_the_next_reading_is() -> None:
    """Of 14,000 MB that were listed, 60 % became free: the next decision is no again."""
    assert isinstance(decide(question(20_000, owners=())).admission, Deny)
    later = question(20_000, free_mb=9000 + 8400, owners=())
    found = decide(later)
    assert isinstance(found.admission, Deny)
    assert found.shortfall_mb == 20_000 - (17_400 - 1500)


@pytest.mark.parametrize(
    "asked",
    [
        question(24_100),
        question(None),
        question(20_000, free_mb=None),
        question(20_000, drained="by ops"),
        question(20_000, blocked="an owner stays"),
        question(20_000, need=Need(vram_mb=20_000, ram_mb=2), room=HostRoom(ram_mb=1)),
    ],
    ids=["never fits", "need unknown", "free unknown", "drained", "blocked", "host short"],
)
def test_where_a_release_could_not_help_none_is_looked_at(asked: Question) -> None:
    found = decide(asked)
    assert isinstance(found.admission, Deny)
    assert found.plan is None
    assert found.releases == ()


@pytest.mark.parametrize(
    ("source", "unified", "looked_at"),
    [("nvml", False, True), ("amdgpu", False, True), ("meminfo", True, True), ("meminfo", False, False)],
)
def test_releases_are_looked_at_only_where_readings_show_them(
    source: Literal["nvml", "amdgpu", "meminfo"], unified: bool, looked_at: bool
) -> None:
    asked = question(20_000)
    reading = msgspec.structs.replace(asked.reading, source=source, unified=unified)
    found = decide(msgspec.structs.replace(asked, reading=reading))
    assert (found.plan is not None) == looked_at
