"""Admission on live readings: unknown is never free, and every refusal says what was asked, free, total and used."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.capacity.admission import Admit, Deny, HostRoom, Ledger, admit, capacity_mb, usable_mb
from gpukeeper.capacity.device import Device
from gpukeeper.capacity.need import Need
from gpukeeper.events.instants import parse_utc, utc_text
from gpukeeper.events.readings import DeviceReading, DeviceState, ProcessUse
from gpukeeper.events.reasons import Reason

NOW = parse_utc("2025-06-01T12:00:00Z")
GIB = 1024


def after(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def card(**changes: Any) -> Device:
    fields: dict[str, Any] = {"id": "GPU-1", "kind": "gpu", "name": "NVIDIA RTX 4090"}
    return Device(**fields | changes)


def reading(total_mb: int | None = 24564, free_mb: int | None = 20000, **changes: Any) -> DeviceReading:
    used_mb = None if total_mb is None or free_mb is None else total_mb - free_mb
    fields: dict[str, Any] = {
        "device": "GPU-1",
        "source": "nvml",
        "read_at": utc_text(NOW),
        "total_mb": total_mb,
        "used_mb": used_mb,
        "free_mb": free_mb,
    }
    return DeviceReading(**fields | changes)


def decide(
    need_mb: int | None = 1000,
    *,
    device: Device | None = None,
    at: DeviceReading | None = None,
    reserved_mb: int = 0,
    resident: bool = False,
    allow_unknown_need: bool = False,
) -> Admit | Deny:
    return admit(
        device=device or card(),
        reading=at or reading(),
        reserved_mb=reserved_mb,
        need=Need(vram_mb=need_mb, source="declared"),
        resident=resident,
        allow_unknown_need=allow_unknown_need,
    )


def test_what_fits_exactly_is_admitted_and_one_mb_more_is_not() -> None:
    device = card(headroom_mb=500)

    fits = decide(20000 - 500 - 3000, device=device, reserved_mb=3000)
    beyond = decide(20000 - 500 - 3000 + 1, device=device, reserved_mb=3000)

    assert isinstance(fits, Admit)
    assert (fits.reserve_mb, fits.usable_mb, fits.reserved_mb, fits.headroom_mb) == (16500, 16500, 3000, 500)
    assert isinstance(beyond, Deny)
    assert (beyond.reason, beyond.need_mb, beyond.usable_mb) == (Reason.INSUFFICIENT, 16501, 16500)


def test_c23_a_refusal_names_device_free_total_used_by_whom_and_asked() -> None:
    total_mb, used_mb = 96 * GIB, round(21.3 * GIB)
    device = card(id="GPU-1", name="NVIDIA RTX PRO 6000")
    at = reading(total_mb, total_mb - used_mb, processes=(ProcessUse(pid=31337, used_mb=used_mb),))

    denied = decide(82 * GIB, device=device, at=at)

    assert isinstance(denied, Deny)
    assert denied.reason is Reason.INSUFFICIENT
    assert not denied.never_fits
    assert denied.detail == (
        "Asked for 83968 MB (declared) on GPU-1 (NVIDIA RTX PRO 6000); usable 76493 MB: free 76493 of 98304 MB, "
        "0 MB reserved by jobs not in the reading, headroom 0 MB; used 21811 MB by pid 31337 (21811 MB)."
    )


def test_c23_what_exceeds_the_empty_device_is_marked_as_never_fitting() -> None:
    denied = decide(82 * GIB, at=reading(48 * GIB, 48 * GIB))

    assert isinstance(denied, Deny)
    assert denied.never_fits
    assert "even if the device were empty" in denied.detail


@pytest.mark.parametrize(("need_mb", "admitted"), [(100_000, True), (125_000, False)])
def test_c15_unified_memory_counts_what_the_host_has_available(need_mb: int, admitted: bool) -> None:
    decision = decide(need_mb, at=reading(124610, 115787, source="meminfo", unified=True))

    assert isinstance(decision, Admit) is admitted
    assert "shared with the host" in decision.detail


def test_c22_unmanaged_use_counts_and_the_other_card_is_free() -> None:
    full = decide(4506, at=reading(48 * GIB, 308))
    shared = decide(4506, at=reading(12288, 12288 - 7373, processes=(ProcessUse(pid=8, used_mb=7373),)))
    empty = decide(4506, at=reading(16 * GIB, 16 * GIB))

    assert isinstance(full, Deny)
    assert isinstance(shared, Admit)
    assert shared.usable_mb == 4915
    assert isinstance(empty, Admit)


@pytest.mark.parametrize(
    ("state", "reason"),
    [("lost", Reason.DEVICE_LOST), ("unknown", Reason.DEVICE_UNKNOWN), ("blocked", Reason.DEVICE_BLOCKED)],
)
@pytest.mark.parametrize("resident", [False, True])
def test_a_device_that_is_not_healthy_takes_nothing_not_even_a_resident_model(
    state: DeviceState, reason: Reason, resident: bool
) -> None:
    denied = decide(1, at=reading(state=state, error="Xid 79"), resident=resident, allow_unknown_need=True)

    assert isinstance(denied, Deny)
    assert denied.reason is reason
    assert denied.usable_mb is None
    assert "Xid 79" in denied.detail


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize(("total_mb", "free_mb"), [(24564, None), (None, 20000), (None, None)])
def test_a_healthy_reading_without_figures_is_unknown(
    total_mb: int | None, free_mb: int | None, resident: bool
) -> None:
    denied = decide(1, at=reading(total_mb, free_mb), resident=resident)

    assert isinstance(denied, Deny)
    assert denied.reason is Reason.DEVICE_UNKNOWN


@pytest.mark.parametrize("resident", [False, True])
def test_c17_a_device_that_may_not_be_scheduled_takes_nothing(resident: bool) -> None:
    denied = decide(1, device=card(unschedulable="MIG is on"), resident=resident)

    assert isinstance(denied, Deny)
    assert denied.reason is Reason.DEVICE_UNKNOWN
    assert "MIG is on" in denied.detail


def test_a_resident_model_needs_nothing_more_on_a_full_device() -> None:
    admitted = decide(9000, at=reading(free_mb=0), resident=True)

    assert isinstance(admitted, Admit)
    assert admitted.reserve_mb == 0


@pytest.mark.parametrize("need", [None, Need(vram_mb=None)])
def test_an_unknown_need_is_refused_unless_allowed_and_then_takes_all_that_is_usable(need: Need | None) -> None:
    def ask(at: DeviceReading, *, allowed: bool) -> Admit | Deny:
        return admit(
            device=card(headroom_mb=100),
            reading=at,
            reserved_mb=400,
            need=need,
            resident=False,
            allow_unknown_need=allowed,
        )

    refused = ask(reading(), allowed=False)
    allowed = ask(reading(), allowed=True)
    full = ask(reading(free_mb=500), allowed=True)

    assert isinstance(refused, Deny)
    assert refused.reason is Reason.NEED_UNKNOWN
    assert isinstance(allowed, Admit)
    assert allowed.reserve_mb == 20000 - 400 - 100
    assert isinstance(full, Deny)
    assert full.reason is Reason.INSUFFICIENT


def test_a_limit_of_the_configuration_bounds_what_all_users_together_may_hold() -> None:
    device = card(limit_mb=10000)

    assert capacity_mb(device, reading()) == 10000
    assert usable_mb(device, reading(free_mb=24564 - 4000), 0) == 6000
    assert usable_mb(device, reading(free_mb=24564 - 12000), 0) == -2000
    assert usable_mb(card(limit_mb=99999), reading(), 0) == 20000


@pytest.mark.parametrize(
    ("processes", "words"),
    [
        (None, "whom the source does not say"),
        ((), "no process that the driver lists"),
        ((ProcessUse(pid=79),), "pid 79 (unknown MB)"),
        (
            tuple(ProcessUse(pid=each, used_mb=each) for each in range(1, 9)),
            "pid 8 (8 MB), pid 7 (7 MB), pid 6 (6 MB), pid 5 (5 MB), pid 4 (4 MB) and 3 more",
        ),
    ],
)
def test_who_uses_the_device_is_said_as_far_as_it_is_known(
    processes: tuple[ProcessUse, ...] | None, words: str
) -> None:
    assert f"MB by {words}." in decide(24000, at=reading(processes=processes)).detail


def test_a_reading_of_another_device_decides_nothing() -> None:
    with pytest.raises(ValueError, match="GPU-2"):
        decide(1, at=reading(device="GPU-2"))


def test_a_reservation_counts_until_a_reading_begun_after_the_load() -> None:
    ledger = Ledger().reserve(7, "GPU-1", 5000, after(0))
    loading = ledger.unseen_mb(reading(read_at=utc_text(after(5))))
    ledger = ledger.loaded(7, after(10))

    assert loading == 5000
    assert ledger.unseen_mb(reading(read_at=utc_text(after(9)))) == 5000
    assert ledger.unseen_mb(reading(read_at=utc_text(after(10)))) == 5000
    assert ledger.unseen_mb(reading(read_at=utc_text(after(10.000001)))) == 0
    assert ledger.unseen_mb(reading(device="GPU-2", read_at=utc_text(after(0)))) == 0


def test_a_released_reservation_counts_against_readings_older_than_its_load_and_is_then_forgotten() -> None:
    ledger = Ledger().reserve(7, "GPU-1", 5000, after(0)).loaded(7, after(10)).release(7)
    old, new = reading(read_at=utc_text(after(9))), reading(read_at=utc_text(after(11)))

    assert ledger.unseen_mb(old) == 5000
    assert ledger.seen_in(old) == ledger
    assert ledger.unseen_mb(new) == 0
    assert ledger.seen_in(new) == Ledger()


def test_a_release_before_the_load_was_complete_takes_the_reservation_away() -> None:
    assert Ledger().reserve(7, "GPU-1", 5000, after(0)).release(7) == Ledger()


def test_a_live_reservation_is_kept_though_a_reading_shows_it() -> None:
    ledger = Ledger().reserve(7, "GPU-1", 5000, after(0)).loaded(7, after(1))

    assert ledger.seen_in(reading(read_at=utc_text(after(2)))) == ledger


@pytest.mark.parametrize("source", ["static", "meminfo"])
def test_where_readings_do_not_show_use_a_reservation_counts_until_it_is_released(source: str) -> None:
    at = reading(read_at=utc_text(after(99)), source=source)
    ledger = Ledger().reserve(7, "GPU-1", 5000, after(0)).loaded(7, after(1))

    assert ledger.unseen_mb(at) == 5000
    assert ledger.release(7).unseen_mb(at) == 0
    assert ledger.release(7).seen_in(at) == Ledger()


@pytest.mark.parametrize(
    ("source", "unified"), [("nvml", False), ("amdgpu", False), ("amdgpu", True), ("meminfo", True)]
)
def test_where_readings_show_use_a_reservation_counts_until_one_shows_it(source: str, *, unified: bool) -> None:
    at = reading(read_at=utc_text(after(99)), source=source, unified=unified)

    assert Ledger().reserve(7, "GPU-1", 5000, after(0)).loaded(7, after(1)).unseen_mb(at) == 0


def test_an_epoch_has_one_reservation_and_other_epochs_are_left_alone() -> None:
    ledger = Ledger().reserve(7, "GPU-1", 5000, after(0)).reserve(8, "GPU-1", 100, after(0))

    assert ledger.reserve(7, "GPU-1", 20, after(1)).unseen_mb(reading()) == 120
    assert ledger.release(9).loaded(9, after(1)) == ledger
    assert ledger.release(7).unseen_mb(reading()) == 100


def test_memory_cannot_be_negative() -> None:
    with pytest.raises(ValueError, match="-1"):
        Ledger().reserve(7, "GPU-1", -1, after(0))
    with pytest.raises(ValueError, match="negative"):
        decide(-1)
    with pytest.raises(ValueError, match="negative"):
        decide(1, reserved_mb=-1)


maybe_mb = st.none() | st.integers(0, 100_000)


@given(
    state=st.sampled_from(["healthy", "lost", "blocked", "unknown"]),
    total_mb=maybe_mb,
    free_mb=maybe_mb,
    limit_mb=maybe_mb,
    headroom_mb=st.integers(0, 5000),
    reserved_mb=st.integers(0, 100_000),
    need_mb=maybe_mb,
    resident=st.booleans(),
    allow_unknown_need=st.booleans(),
)
def test_whatever_is_reserved_was_usable_and_whatever_is_unknown_is_refused(
    state: DeviceState,
    total_mb: int | None,
    free_mb: int | None,
    limit_mb: int | None,
    headroom_mb: int,
    reserved_mb: int,
    need_mb: int | None,
    resident: bool,
    allow_unknown_need: bool,
) -> None:
    device = card(limit_mb=limit_mb, headroom_mb=headroom_mb)
    at = reading(total_mb, free_mb, state=state)

    decision = decide(
        need_mb,
        device=device,
        at=at,
        reserved_mb=reserved_mb,
        resident=resident,
        allow_unknown_need=allow_unknown_need,
    )

    if isinstance(decision, Deny):
        assert decision.detail
        return
    assert state == "healthy"
    assert total_mb is not None
    assert free_mb is not None
    assert resident or need_mb is not None or allow_unknown_need
    if not resident:
        assert decision.reserve_mb + reserved_mb + headroom_mb <= free_mb
        assert need_mb is None or decision.reserve_mb == need_mb
        if limit_mb is not None:
            assert decision.reserve_mb + reserved_mb + headroom_mb + (total_mb - free_mb) <= limit_mb


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"drained": "by ops: new fans"}, Reason.DRAINED),
        ({"blocked": "ollama did not let go of m"}, Reason.DEVICE_BLOCKED),
        ({"drained": "by ops", "blocked": "ollama did not let go"}, Reason.DRAINED),
    ],
)
def test_a_device_out_of_service_takes_nothing_not_even_a_resident_model(words: dict[str, Any], reason: Reason) -> None:
    denied = admit(
        device=card(),
        reading=reading(),
        reserved_mb=0,
        need=Need(vram_mb=1),
        resident=True,
        allow_unknown_need=True,
        **words,
    )

    assert isinstance(denied, Deny)
    assert denied.reason is reason
    assert next(iter(words.values())) in denied.detail


@pytest.mark.parametrize("what", ["ram_mb", "disk_mb"])
@pytest.mark.parametrize(
    ("left_mb", "reason"), [(500, None), (499, Reason.INSUFFICIENT), (-1, Reason.INSUFFICIENT), (None, "unknown")]
)
def test_memory_and_disk_of_the_host_must_be_left_too(
    what: str, left_mb: int | None, reason: Reason | str | None
) -> None:
    decided = admit(
        device=card(),
        reading=reading(),
        reserved_mb=0,
        need=Need(vram_mb=1000, source="declared", **{what: 500}),
        resident=False,
        allow_unknown_need=False,
        room=HostRoom(**{what: left_mb}),
    )

    if reason is None:
        assert isinstance(decided, Admit)
    else:
        assert isinstance(decided, Deny)
        assert decided.reason is (Reason.DEVICE_UNKNOWN if reason == "unknown" else reason)
        assert "500 MB of the host's" in decided.detail
        assert not decided.never_fits


def test_where_nobody_read_what_the_host_has_left_a_need_of_it_is_denied() -> None:
    def ask(need: Need, *, resident: bool = False) -> Admit | Deny:
        return admit(
            device=card(), reading=reading(), reserved_mb=0, need=need, resident=resident, allow_unknown_need=False
        )

    assert isinstance(ask(Need(vram_mb=1, ram_mb=1)), Deny)
    assert isinstance(ask(Need(vram_mb=1, ram_mb=0)), Admit)
    assert isinstance(ask(Need(vram_mb=1, ram_mb=1), resident=True), Admit)
    with pytest.raises(ValueError, match="negative"):
        ask(Need(vram_mb=1, disk_mb=-1))
