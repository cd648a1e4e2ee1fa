"""From old facts to the current ones, one named step at a time.

A breaking change of a fact gets a new tag (``….v2``) and a step here from the old tag's JSON to the new one's.
Steps chain, so that a v1 fact passes through every later version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

#: Takes the decoded ``data`` of the old tag, returns the new tag and its ``data``.
Step = Callable[[dict[str, Any]], tuple[str, dict[str, Any]]]

#: Old tag -> step. No fact has had a breaking change yet.
STEPS: Mapping[str, Step] = {}

_CHAIN_LENGTH_MAX = 32


def upcast(tag: str, data: dict[str, Any], steps: Mapping[str, Step] = STEPS) -> tuple[str, dict[str, Any]]:
    """Follow ``steps`` from ``tag`` until none applies."""
    for _ in range(_CHAIN_LENGTH_MAX):
        step = steps.get(tag)
        if step is None:
            return tag, data
        tag, data = step(data)
    raise ValueError(f"upcaster steps from {tag!r} do not end")
