"""Whether a model that is missing may be fetched, and whether the disk has room for it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gpukeeper.events.modelnames import matches
from gpukeeper.events.reasons import Reason

MB = 1_048_576


class Refusal(msgspec.Struct, frozen=True):
    """Why nothing is fetched, in a code and in words."""

    reason: Reason
    detail: str


def may_fetch(
    model: str, *, runtime: str, allowed: Sequence[str], free_mb: int | None, leaves_mb: int
) -> Refusal | None:
    """Why ``model`` may not be fetched, or None. How large it is, nobody knows before the fetch has begun.

    Args:
        model: as the job names it.
        runtime: the name of the runtime that lacks it, for the words.
        allowed: shell patterns of what may be fetched.
        free_mb: what is free on the disk, in MB of 2^20 bytes; None where that could not be read.
        leaves_mb: how much must stay free.
    """
    if not matches(allowed, model):
        may = f"it may fetch {', '.join(allowed)}" if allowed else "it may fetch nothing: see `pull` in the registry"
        return Refusal(Reason.MODEL_MISSING, f"{runtime} lacks {model}, and {may}")
    full = too_full(free_mb=free_mb, missing_bytes=0, leaves_mb=leaves_mb)
    return None if full is None else Refusal(Reason.PROVISION_FAILED, f"{model} is not fetched: {full}")


def too_full(*, free_mb: int | None, missing_bytes: int, leaves_mb: int) -> str | None:
    """Why the disk has no room for ``missing_bytes`` more, in words, or None. A disk that cannot be read has none."""
    if free_mb is None:
        return "nobody knows how much of the disk is free"
    missing_mb = -(-missing_bytes // MB)
    if free_mb - missing_mb >= leaves_mb:
        return None
    more = f" and {missing_mb} MB more are to come" if missing_mb else ""
    return f"{free_mb} MB of the disk are free{more}, where {leaves_mb} MB must stay free"


class Layers:
    """What a fetch has told of its parts so far. Runtimes name a part in the words of its status."""

    def __init__(self) -> None:
        self._parts: dict[str, tuple[int, int]] = {}

    def take(self, status: str, completed_bytes: int | None, total_bytes: int | None) -> bool:
        """Take what is told of one part. Whether the fetch turned out to be larger than was known."""
        if total_bytes is None:
            return False
        done, total = self._parts.get(status, (0, 0))
        self._parts[status] = (min(max(done, completed_bytes or 0), total_bytes), total_bytes)
        return total_bytes > total

    @property
    def completed_bytes(self) -> int | None:
        """How much has come; None where nothing was told of any part."""
        return sum(done for done, _ in self._parts.values()) if self._parts else None

    @property
    def total_bytes(self) -> int | None:
        """How large the parts are that were told of; None where none was."""
        return sum(total for _, total in self._parts.values()) if self._parts else None

    @property
    def missing_bytes(self) -> int:
        """How much of them is still to come."""
        return sum(total - done for done, total in self._parts.values())
