"""Owners of memory, made of what runtimes and devices say."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpukeeper.capacity.owners import Tenant, owners_on
from gpukeeper.capacity.reclaim import Owner, plan
from gpukeeper.events.readings import Holding, ResidentModel, RuntimeReading
from gpukeeper.events.reasons import Reason

MB = 1024 * 1024


def row(model: str, mb: int | None, **changes: Any) -> ResidentModel:
    return ResidentModel(model=model, vram_bytes=None if mb is None else mb * MB, **changes)


def look(**changes: Any) -> RuntimeReading:
    settings: dict[str, Any] = {"runtime": "r", "read_at": "2025-06-01T12:00:00Z", "healthy": True, "activity": "idle"}
    return RuntimeReading(**(settings | changes))


def tenant(reading: RuntimeReading | None, **changes: Any) -> Tenant:
    settings: dict[str, Any] = {
        "runtime": "r",
        "releases": "model",
        "grace_s": 300.0,
        "devices": ("A",),
        "idle_s": 400.0,
    }
    return Tenant(reading=reading, **(settings | changes))


def by_name(*tenants: Tenant, device: str = "A") -> dict[str, Owner]:
    return {owner.label: owner for owner in owners_on(device, tenants)}


def kept(*tenants: Tenant, device: str = "A") -> dict[str | None, Reason | None]:
    return {each.model: each.kept for each in plan(None, owners_on(device, tenants)).considered}


def test_each_resident_model_is_an_owner_where_models_can_go_one_by_one() -> None:
    found = by_name(tenant(look(resident=(row("a", 3000), row("b", 2000)))))
    assert {name: (owner.held_mb, owner.on_device) for name, owner in found.items()} == {
        "r/a": (3000, True),
        "r/b": (2000, True),
    }
    assert kept(tenant(look(resident=(row("a", 3000),)))) == {"a": None}


def test_what_its_processes_hold_beyond_its_models_stays_and_is_not_unmanaged() -> None:
    reading = look(resident=(row("a", 3000),), holdings=(Holding(device="A", mb=3500),))
    assert by_name(tenant(reading))["r"].held_mb == 500
    assert kept(tenant(reading)) == {"a": None, None: Reason.NOT_RELEASABLE}


def test_a_model_counts_for_no_more_than_its_processes_hold() -> None:
    reading = look(resident=(row("a", 9000),), holdings=(Holding(device="A", mb=3),))
    assert by_name(tenant(reading))["r/a"].held_mb == 3


def test_a_runtime_that_lets_go_of_everything_is_one_owner() -> None:
    reading = look(resident=(row("a", 3000), row("b", 2000)))
    found = by_name(tenant(reading, releases="all"))
    assert {name: owner.held_mb for name, owner in found.items()} == {"r": 5000}
    assert kept(tenant(look(holdings=(Holding(device="A", mb=700),)), releases="all")) == {None: None}


@pytest.mark.parametrize("pin", [None, "qwen3", "qwen3:latest"])
def test_a_pin_keeps_a_model_under_whichever_name(pin: str | None) -> None:
    reading = look(resident=(row("qwen3:latest", 3000), row("b", 2000)))
    found = by_name(tenant(reading, pins=(pin,)))
    assert found["r/qwen3:latest"].pinned
    assert found["r/b"].pinned == (pin is None)


def test_one_pin_keeps_all_of_a_runtime_that_lets_go_of_everything() -> None:
    reading = look(resident=(row("a", 3000), row("b", 2000)))
    assert kept(tenant(reading, releases="all", pins=("a",))) == {None: Reason.PINNED}
    own = look(resident=(row("a", 3000, pinned=True),))
    assert kept(tenant(own, releases="all")) == {None: Reason.PINNED}
    assert kept(tenant(own)) == {"a": Reason.PINNED}


def test_c14_a_runtime_that_does_not_answer_holds_an_unknown_amount() -> None:
    for reading in (None, look(healthy=False), look(healthy=False, resident=(row("a", 3000),))):
        for releases in ("model", "all"):
            owner = by_name(tenant(reading, releases=releases))["r"]
            assert (owner.held_mb, owner.on_device, owner.activity, owner.idle_s) == (None, True, "unknown", None)
            assert kept(tenant(reading, releases=releases)) == {None: Reason.OTHER_DEVICE}


def test_with_several_devices_nobody_knows_where_a_model_sits_unless_the_processes_tell() -> None:
    both = ("A", "B")
    models = (row("a", 3000),)
    for releases in ("model", "all"):
        silent = tenant(look(resident=models), devices=both, releases=releases)
        assert list(kept(silent).values()) == [Reason.OTHER_DEVICE]
        here = tenant(look(resident=models, holdings=(Holding(device="A", mb=3100),)), devices=both, releases=releases)
        assert None in kept(here).values()
        assert set(kept(here, device="B").values()) == {Reason.OTHER_DEVICE}


def test_models_that_are_split_over_devices_hold_an_unknown_part_of_each() -> None:
    rows = (row("a", 2000), row("b", 1000))
    reading = look(resident=rows, holdings=(Holding(device="A", mb=1500), Holding(device="B", mb=1500)))
    assert [by_name(tenant(reading, devices=("A", "B")))[f"r/{name}"].held_mb for name in "ab"] == [None, None]
    assert by_name(tenant(reading, devices=("A", "B"), releases="all"))["r"].held_mb == 1500


def test_the_only_model_holds_all_that_its_processes_hold_also_where_it_is_split_over_devices() -> None:
    """C37: 100 GB over four cards."""
    rows = (row("a", 3000), row("on the CPU", 0))
    reading = look(resident=rows, holdings=(Holding(device="A", mb=1600), Holding(device="B", mb=1500)))
    owners = by_name(tenant(reading, devices=("A", "B")))
    assert (owners["r/a"].held_mb, owners["r/on the CPU"].held_mb) == (1600, 0)
    unseen = msgspec.structs.replace(reading, holdings=None)
    assert by_name(tenant(unseen, devices=("A", "B")))["r/a"].held_mb is None


def test_a_device_that_a_runtime_may_not_use_has_no_part_of_it() -> None:
    assert kept(tenant(look(resident=(row("a", 3000),))), device="B") == {"a": Reason.OTHER_DEVICE}


def test_two_rows_of_one_model_contradict_each_other() -> None:
    found = by_name(tenant(look(resident=(row("qwen3", 3000), row("qwen3:latest", 3000, pinned=True)))))
    assert len(found) == 1
    owner = found["r/qwen3"]
    assert (owner.held_mb, owner.pinned) == (None, True)


def test_a_model_of_unknown_size_is_not_counted_on_and_one_on_the_cpu_holds_nothing() -> None:
    assert kept(tenant(look(resident=(row("a", None),)))) == {"a": Reason.OTHER_DEVICE}
    assert by_name(tenant(look(resident=(row("a", 0), row("b", 5)))))["r/a"].held_mb == 0


def test_what_is_on_its_way_out_is_not_asked_again() -> None:
    assert kept(tenant(look(resident=(row("a", 3000, stopping=True),)))) == {"a": Reason.NOT_RELEASABLE}


def test_a_job_or_a_load_on_the_runtime_keeps_all_its_models() -> None:
    reading = look(resident=(row("a", 3000), row("b", 2000)))
    for changes in ({"jobs": 1}, {"loading": True}):
        assert set(kept(tenant(reading, **changes)).values()) == {Reason.OWNER_BUSY}


def test_a_runtime_that_is_not_idle_now_was_idle_for_no_time() -> None:
    reading = look(resident=(row("a", 3000),), activity="unknown")
    assert kept(tenant(reading)) == {"a": Reason.ACTIVITY_UNKNOWN}
