"""What a runtime holds on each device: by the drivers' lists of processes, else by its own word."""

from __future__ import annotations

import pytest

from gpukeeper.agents.memory.holdings import holdings_of
from gpukeeper.events.readings import DeviceReading, Holding, ProcessUse, ResidentModel, RuntimeReading

MB = 1024 * 1024
ID = "c" * 64
OTHER = "d" * 64
OWN = (Holding(device="g0", mb=500),)


def look(*vram_mb: int | None, healthy: bool = True) -> RuntimeReading:
    """A look at a runtime with models of these sizes."""
    rows = tuple(
        ResidentModel(model=f"m{place}", vram_bytes=None if mb is None else mb * MB) for place, mb in enumerate(vram_mb)
    )
    return RuntimeReading(runtime="r", read_at="2025-06-01T12:00:00Z", healthy=healthy, resident=rows)


def card(*uses: ProcessUse, device: str = "g0") -> DeviceReading:
    return DeviceReading(
        device=device, source="nvml", read_at="2025-06-01T12:00:00Z", state="healthy", total_mb=24_000, processes=uses
    )


def use(pid: int, used_mb: int | None = 500, container: str | None = None) -> ProcessUse:
    return ProcessUse(pid=pid, used_mb=used_mb, container=container)


def held(
    *near: DeviceReading,
    pids: frozenset[int] | None = None,
    container: str | None = None,
    only_device: str | None = None,
    of: RuntimeReading | None = None,
) -> tuple[Holding, ...] | None:
    return holdings_of(of or look(), near, pids=pids, container=container, only_device=only_device)


@pytest.mark.parametrize("pids", [None, frozenset({7}), frozenset({8})], ids=["unknown", "its own", "of the proxy"])
def test_a_process_in_the_runtimes_container_is_its_own_whatever_listens_on_its_port(
    pids: frozenset[int] | None,
) -> None:
    assert held(card(use(7, container=ID)), pids=pids, container=ID) == OWN


def test_a_process_in_another_container_is_not_its_own() -> None:
    assert held(card(use(7, container=OTHER), use(8, container=ID)), pids=frozenset({7}), container=ID) == OWN


def test_a_process_outside_of_containers_is_its_own_where_it_is_of_its_family() -> None:
    assert held(card(use(7), use(8, 100)), pids=frozenset({7}), container=ID) == OWN


def test_a_process_in_a_container_that_the_registry_does_not_name_is_told_by_its_number() -> None:
    assert held(card(use(7, container=OTHER)), pids=frozenset({7})) == OWN


def test_processes_of_which_none_is_known_to_be_its_own_leave_it_unknown() -> None:
    assert held(card(use(7, container=OTHER)), pids=frozenset({9}), container=ID) is None


def test_a_use_that_the_driver_does_not_tell_leaves_the_amount_unknown_and_the_place_known() -> None:
    assert held(card(use(7, None)), pids=frozenset({7})) == (Holding(device="g0", mb=None),)


def test_each_device_counts_for_itself() -> None:
    found = held(card(use(7)), card(use(8, 300), use(9), device="g1"), pids=frozenset({7, 8}))

    assert found == (*OWN, Holding(device="g1", mb=300))


def test_without_lists_of_processes_its_own_word_counts_where_it_can_sit_on_one_device_only() -> None:
    unlisted = DeviceReading(device="g0", source="nvml", read_at="2025-06-01T12:00:00Z", state="healthy")

    assert held(unlisted, only_device="g0", of=look(200, 300)) == (Holding(device="g0", mb=500, source="runtime"),)
    assert held(unlisted, of=look(200, 300)) is None
    assert held(unlisted, only_device="g0", of=look(200, None)) is None
    assert held(unlisted, only_device="g0", of=look(200, healthy=False)) is None
