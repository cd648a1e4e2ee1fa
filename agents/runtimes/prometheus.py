"""Figures out of Prometheus' text format. Pure, and total over all texts."""

from __future__ import annotations

import math
import re

#: What may follow the name of a metric: labels (whose values may hold anything, quoted), the value, a timestamp.
_REST = re.compile(r'\s*(?:\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})?\s*(?P<value>\S+)(?:\s+-?\d+)?\s*')


def total(text: str, name: str) -> float | None:
    """The sum of the metric ``name`` over all its series.

    None, for unknown, where it is absent or any of its series is malformed, no number, negative or infinite.
    """
    found: list[float] = []
    for line in text.split("\n"):
        rest = line.lstrip()
        if not rest.startswith(name):
            continue
        rest = rest[len(name) :]
        if rest[:1] not in ("{", " ", "\t"):
            continue  # a longer name
        match = _REST.fullmatch(rest)
        value = None if match is None else _number(match["value"])
        if value is None:
            return None
        found.append(value)
    return sum(found) if found else None


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
