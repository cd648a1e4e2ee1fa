"""One figure, a table of them, and the file they are written to."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One measured value, beside what it is compared with in the same run."""

    name: str
    value: float
    unit: str
    #: What the same machine does without gpukeeper, in the same unit; None where the goal is absolute.
    baseline: float | None = None
    #: ``value / baseline``, or None.
    ratio: float | None = None
    #: In words, such as ``ratio >= 0.7``.
    goal: str
    ok: bool
    note: str = ""


def at_least_ratio(name: str, value: float, baseline: float, unit: str, goal: float, note: str = "") -> Figure:
    """A rate that must reach a share of its baseline."""
    ratio = value / baseline
    return Figure(
        name=name,
        value=round(value, 1),
        unit=unit,
        baseline=round(baseline, 1),
        ratio=round(ratio, 3),
        goal=f"ratio >= {goal:g}",
        ok=ratio >= goal,
        note=note,
    )


def at_most(
    name: str, value: float, unit: str, goal: float, *, baseline: float | None = None, note: str = ""
) -> Figure:
    """A cost with an absolute limit."""
    return Figure(
        name=name,
        value=round(value, 3),
        unit=unit,
        baseline=None if baseline is None else round(baseline, 3),
        goal=f"<= {goal:g} {unit}",
        ok=value <= goal,
        note=note,
    )


def at_least(name: str, value: float, unit: str, goal: float, note: str = "") -> Figure:
    """A rate with an absolute limit."""
    return Figure(name=name, value=round(value, 1), unit=unit, goal=f">= {goal:g} {unit}", ok=value >= goal, note=note)


def show(figures: list[Figure]) -> None:
    table = Table(title="gpukeeper: measured in this run", title_justify="left")
    for heading in ("figure", "value", "baseline", "ratio", "goal", "", "note"):
        table.add_column(heading, justify="right" if heading in ("value", "baseline", "ratio") else "left")
    for one in figures:
        table.add_row(
            one.name,
            f"{one.value:g} {one.unit}",
            "" if one.baseline is None else f"{one.baseline:g}",
            "" if one.ratio is None else f"{one.ratio:.2f}",
            one.goal,
            "[green]ok[/]" if one.ok else "[red]missed[/]",
            one.note,
        )
    Console(width=160).print(table)


def write(figures: list[Figure], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    named = {
        one.name: {
            "value": one.value,
            "unit": one.unit,
            "baseline": one.baseline,
            "ratio": one.ratio,
            "goal": one.goal,
            "ok": one.ok,
            "note": one.note,
        }
        for one in figures
    }
    path.write_text(json.dumps(named, indent=2) + "\n")
