"""The order in which waiting jobs are looked at: priority, then arrival."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from gpukeeper.projections.job import Job

_Key = tuple[int, int, str]


class Queue:
    """Waiting jobs in order. Derived from the jobs; never stored."""

    def __init__(self) -> None:
        self._keys: list[_Key] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[str]:
        """Ids, the first to be served first. The queue may not change meanwhile."""
        return (key[2] for key in self._keys)

    def add(self, job: Job) -> None:
        key = _key(job)
        place = bisect_left(self._keys, key)
        if place == len(self._keys) or self._keys[place] != key:
            insort(self._keys, key)

    def remove(self, job: Job) -> None:
        place = self._find(job)
        if place is not None:
            del self._keys[place]

    def place(self, job: Job) -> int | None:
        """How many jobs stand before it, or None when it does not wait."""
        return self._find(job)

    def _find(self, job: Job) -> int | None:
        key = _key(job)
        place = bisect_left(self._keys, key)
        return place if place < len(self._keys) and self._keys[place] == key else None


def _key(job: Job) -> _Key:
    return (-job.priority, job.accepted_seq, job.id)
