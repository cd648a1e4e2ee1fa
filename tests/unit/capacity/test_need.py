"""Which need counts."""

from __future__ import annotations

import pytest

from gpukeeper.capacity.need import Need, which_need, with_margin


def test_what_was_declared_counts_before_what_was_learned_before_what_is_reported() -> None:
    assert which_need(declared_mb=1, learned_mb=2, reported_mb=3) == Need(vram_mb=1, source="declared")
    assert which_need(declared_mb=0, learned_mb=2) == Need(vram_mb=0, source="declared"), "0 is a figure"
    assert which_need(declared_mb=None, learned_mb=2000, reported_mb=3) == Need(vram_mb=2256, source="learned")
    assert which_need(declared_mb=None, reported_mb=3) == Need(vram_mb=3, source="reported")
    assert which_need(declared_mb=None) is None


def test_memory_and_disk_of_the_host_are_kept_where_the_vram_is_not_known() -> None:
    assert which_need(declared_mb=None, ram_mb=5, disk_mb=6) == Need(vram_mb=None, ram_mb=5, disk_mb=6)


@pytest.mark.parametrize(("measured_mb", "counted_mb"), [(1, 257), (2560, 2816), (2561, 2818), (20_000, 22_000)])
def test_a_measurement_counts_with_a_margin(measured_mb: int, counted_mb: int) -> None:
    assert with_margin(measured_mb) == counted_mb
