"""Figures out of Prometheus' text format: what is not surely a sum is unknown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.agents.runtimes.prometheus import total

NAME = "vllm:num_requests_running"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{NAME} 3", 3.0),
        (f"{NAME}{{}} 3.0", 3.0),
        (f'{NAME}{{engine="0"}} 0.0\n{NAME}{{engine="1"}} 1.0\n', 1.0),
        (f'{NAME}{{engine="0"}} 2.0\n{NAME}{{engine="1"}} 3.0\n', 5.0),
        (f'# HELP {NAME} about 9\n# TYPE {NAME} gauge\n{NAME}{{engine="0"}} 2\n', 2.0),
        (NAME + '{model_name="a } \\" b, 7 {",engine="0"} 4 1760883302000\r\n', 4.0),
        (f"  {NAME}\t5", 5.0),
        (f"{NAME}_total 9\n{NAME} 1", 1.0),
        (f"{NAME} 1e2", 100.0),
    ],
)
def test_every_series_counts_whatever_its_labels(text: str, expected: float) -> None:
    assert total(text, NAME) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<html>",
        f"# {NAME} 3",
        f"{NAME}_total 9",
        f"{NAME} NaN",
        f"{NAME} +Inf",
        f"{NAME} -1",
        f"{NAME} many",
        f"{NAME}",
        f"{NAME} ",
        f'{NAME}{{engine="0"}}',
        NAME + '{engine="0} 3',
        f"{NAME} 3 4 5",
        f'{NAME}{{engine="0"}} 0\n{NAME}{{engine="1"}} NaN',
        f'{NAME}{{engine="0"}} 0\n{NAME}{{engine="1"',
    ],
)
def test_c32_absent_malformed_or_no_number_is_unknown_and_never_0(text: str) -> None:
    """C32, LLMKube: one series that cannot be read makes the sum unknown."""
    assert total(text, NAME) is None


@given(st.text())
def test_any_text_has_a_sum_or_none(text: str) -> None:
    for probe in (text, NAME + text, f"{NAME} 1\n{text}"):
        found = total(probe, NAME)
        assert found is None or found >= 0
