"""Who may be asked to let go of memory, and who of them is. Pure.

An owner stays for the first of these reasons that holds (:func:`hurdles`):

1. ``other_device``: it does not sit on this device, or nobody can tell whether, or how much of it does.
2. ``not_releasable``: it has no safe way to let go of just that, may not be asked to, or lets go already.
3. ``pinned``: somebody wants it to stay.
4. ``owner_busy``: it works or loads, a job of ours loads, runs or is about to run on its runtime, or it also sits
   where something else is loaded or let go just now.
5. ``activity_unknown``: nobody can tell whether it works, or since when it does not.
6. ``in_grace``: it has not been idle for its whole grace.

Of the rest, the least that fits is released: the smallest sufficient total, the fewest releases among those, the
longest idle among those. Who is not among them stays as ``not_needed``. Where all together would not be enough, nobody
is asked (``insufficient``): nothing is thrown out for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from gpukeeper.events.device import Considered
from gpukeeper.events.readings import Activity, DeviceReading, Releases
from gpukeeper.events.reasons import Reason

#: Up to so many owners the choice is exact. Above, the largest are taken until the rest can be chosen exactly.
EXACT_MAX = 20
_COUNT_BITS = 6


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Something of a registered runtime that can be let go in one release, as seen from one device."""

    runtime: str
    #: None where the release gives back all that the runtime holds.
    model: str | None = None
    #: What it holds on this device; None where nobody can tell.
    held_mb: int | None
    #: Whether it sits on this device; None where nobody can tell.
    on_device: bool | None
    activity: Activity
    #: For how long idleness is proven (:meth:`gpukeeper.capacity.idleness.Idleness.idle_s`).
    idle_s: float | None
    grace_s: float
    pinned: bool = False
    releases: Releases
    #: Jobs of ours that load or run on the runtime, on whichever model, from the claim until the end.
    jobs_here: int = 0
    #: The runtime brings a model in, for whomever.
    loading: bool = False
    #: It was told to go, and has not gone yet.
    stopping: bool = False
    #: A load or a release is under way on another device that it sits on.
    turn_taken: bool = False

    @property
    def label(self) -> str:
        return self.runtime if self.model is None else f"{self.runtime}/{self.model}"


class Hurdle(msgspec.Struct, frozen=True):
    """One reason why an owner stays, in words."""

    reason: Reason
    detail: str


_MAYBE_ELSEWHERE = Hurdle(Reason.OTHER_DEVICE, "nobody can tell whether it sits on this device")
_ELSEWHERE = Hurdle(Reason.OTHER_DEVICE, "it does not sit on this device")
_HOLDS_UNKNOWN = Hurdle(Reason.OTHER_DEVICE, "nobody can tell how much it holds on this device")
_HOLDS_NOTHING = Hurdle(Reason.OTHER_DEVICE, "it holds nothing on this device")
_NO_WAY = Hurdle(Reason.NOT_RELEASABLE, "it has no safe way to let go, or may not be asked to")
_NO_MODEL = Hurdle(Reason.NOT_RELEASABLE, "it lets go of models only, and this is none")
_ONLY_ALL = Hurdle(Reason.NOT_RELEASABLE, "it can only let go of everything at once")
_STOPPING = Hurdle(Reason.NOT_RELEASABLE, "it is on its way out already")
_PINNED = Hurdle(Reason.PINNED, "it is pinned")
_LOADING = Hurdle(Reason.OWNER_BUSY, "it is loading")
_BUSY = Hurdle(Reason.OWNER_BUSY, "it is busy")
_TURN_TAKEN = Hurdle(Reason.OWNER_BUSY, "a load or a release is under way on another device that it sits on")
_ACTIVITY_UNKNOWN = Hurdle(Reason.ACTIVITY_UNKNOWN, "nobody can tell whether it works")
_SINCE_UNKNOWN = Hurdle(Reason.ACTIVITY_UNKNOWN, "it looks idle, with no evidence since when")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Who would be asked to let go."""

    #: In the order of the releases, the largest first. Decide again after each: only measured memory counts.
    chosen: tuple[Owner, ...]
    #: All owners, in the order given: ``kept`` is None for those that were chosen.
    considered: tuple[Considered, ...]
    #: What was chosen covers the shortfall; also where there is none.
    enough: bool
    #: What the chosen ones hold: a promise, not a measurement.
    would_free_mb: int
    #: What all that may be released hold.
    could_free_mb: int


def hurdles(owner: Owner) -> tuple[Hurdle, ...]:
    """Everything that stands in the way of a release of ``owner``, in the order of the rules; empty where it may go."""
    return tuple(_hurdles(owner))


def _hurdles(owner: Owner) -> Iterator[Hurdle]:
    """One after the other: who wants only the first does not pay for the rest."""
    if owner.on_device is None:
        yield _MAYBE_ELSEWHERE
    elif not owner.on_device:
        yield _ELSEWHERE
    elif owner.held_mb is None:
        yield _HOLDS_UNKNOWN
    elif owner.held_mb <= 0:
        yield _HOLDS_NOTHING
    if owner.releases == "none":
        yield _NO_WAY
    elif owner.releases == "model" and owner.model is None:
        yield _NO_MODEL
    elif owner.releases == "all" and owner.model is not None:
        yield _ONLY_ALL
    elif owner.stopping:
        yield _STOPPING
    if owner.pinned:
        yield _PINNED
    if owner.jobs_here != 0:
        yield Hurdle(Reason.OWNER_BUSY, f"{owner.jobs_here} job(s) load or run there")
    elif owner.loading:
        yield _LOADING
    elif owner.turn_taken:
        yield _TURN_TAKEN
    elif owner.activity == "busy":
        yield _BUSY
    elif owner.activity != "idle":
        yield _ACTIVITY_UNKNOWN
    elif owner.idle_s is None:
        yield _SINCE_UNKNOWN
    # Written so that a figure that is not a number stays within the grace.
    elif not owner.idle_s >= owner.grace_s:
        yield Hurdle(Reason.IN_GRACE, _idle_words(owner))


def plan(shortfall_mb: int | None, owners: Sequence[Owner]) -> Plan:
    """Choose whom to ask to let go on one device.

    Args:
        shortfall_mb: what is missing; 0 or less needs no release. None takes all that may be taken, which is what an
            operator asks for who names no amount.
        owners: all that registered runtimes hold, each (runtime, model) once. What is not registered is not an owner.

    Raises:
        ValueError: two owners of the same name.
    """
    names = [(owner.runtime, owner.model) for owner in owners]
    if len(set(names)) != len(names):
        raise ValueError(f"the same owner twice: {', '.join(owner.label for owner in owners)}")
    stays = [next(_hurdles(owner), None) for owner in owners]
    free = [owner for owner, hurdle in zip(owners, stays, strict=True) if hurdle is None]
    could_free_mb = sum(_held(owner) for owner in free)
    if shortfall_mb is None:
        chosen, enough = free, True
    else:
        enough = could_free_mb >= shortfall_mb
        chosen = _least(shortfall_mb, free) if enough and shortfall_mb > 0 else []
    if enough:
        kept = Hurdle(Reason.NOT_NEEDED, "less is enough" if chosen else "nothing has to be released")
    else:
        words = f"all that may be released is {could_free_mb} MB of {shortfall_mb} MB: nothing goes for nothing"
        kept = Hurdle(Reason.INSUFFICIENT, words)
    going = {(owner.runtime, owner.model) for owner in chosen}
    considered = tuple(
        _considered(owner, hurdle or (None if name in going else kept))
        for owner, name, hurdle in zip(owners, names, stays, strict=True)
    )
    return Plan(
        chosen=tuple(sorted(chosen, key=lambda owner: (-_held(owner), *_rank(owner)))),
        considered=considered,
        enough=enough,
        would_free_mb=sum(_held(owner) for owner in chosen),
        could_free_mb=could_free_mb,
    )


def unmanaged_mb(reading: DeviceReading, owners: Iterable[Owner]) -> int | None:
    """What is in use on the device and held by nobody registered: counted as used, never touched.

    None where the reading does not show the use, or somebody registered may hold an unknown part of it.
    """
    if reading.used_mb is None:
        return None
    managed_mb = 0
    for owner in owners:
        if owner.on_device is False:
            continue
        if owner.on_device is None or owner.held_mb is None:
            return None
        managed_mb += max(0, owner.held_mb)
    return max(0, reading.used_mb - managed_mb)


def _considered(owner: Owner, hurdle: Hurdle | None) -> Considered:
    if hurdle is not None:
        kept, detail = hurdle.reason, hurdle.detail
    else:
        kept, detail = None, _idle_words(owner)
    return Considered(runtime=owner.runtime, model=owner.model, held_mb=owner.held_mb, kept=kept, detail=detail)


def _idle_words(owner: Owner) -> str:
    """Whole seconds, rounded down: 299.9 s are not yet 300 s."""
    return f"idle {(owner.idle_s or 0.0) // 1:.0f} s of {owner.grace_s:.10g} s"


def _held(owner: Owner) -> int:
    assert owner.held_mb is not None, "only owners that hold a known amount are ever counted on"
    return owner.held_mb


def _rank(owner: Owner) -> tuple[float, str, str]:
    """Who goes first of those that are otherwise alike."""
    return (-(owner.idle_s or 0.0), owner.runtime, owner.model or "")


def _least(shortfall_mb: int, free: Sequence[Owner]) -> list[Owner]:
    """The least of ``free``, which together are enough, that still is."""
    pool = sorted(free, key=_rank)
    chosen: list[Owner] = []
    # A single one that suffices beats every choice with a larger one in it.
    single_mb = min((_held(owner) for owner in pool if _held(owner) >= shortfall_mb), default=None)
    if single_mb is not None:
        single = next(owner for owner in pool if _held(owner) == single_mb)
        if single_mb == shortfall_mb:
            return [single]
        pool = [owner for owner in pool if _held(owner) < shortfall_mb or owner is single]
    while len(pool) > EXACT_MAX:
        largest = sorted(pool, key=lambda owner: -_held(owner))
        # Without the smallest ones, the rest can be searched; where it is not enough, the largest goes in any case.
        if sum(_held(owner) for owner in largest[:EXACT_MAX]) >= shortfall_mb:
            pool = sorted(largest[:EXACT_MAX], key=_rank)
        else:
            chosen.append(largest[0])
            shortfall_mb -= _held(largest[0])
            pool.remove(largest[0])
    return chosen + _least_exactly(shortfall_mb, pool)


def _least_exactly(shortfall_mb: int, pool: Sequence[Owner]) -> list[Owner]:
    """The best of all subsets, by meeting in the middle.

    A subset is one whole number: its total, then its count, then one bit for each member. Numbers of disjoint subsets
    add up to that of their union, and the smaller number is the better subset.
    """
    shift = len(pool) + _COUNT_BITS
    numbers = [(_held(owner) << shift) + (1 << len(pool)) + (1 << rank) for rank, owner in enumerate(pool)]
    half = len(numbers) // 2
    best = _meet(sorted(_all_sums(numbers[:half])), sorted(_all_sums(numbers[half:])), shortfall_mb << shift)
    return [owner for rank, owner in enumerate(pool) if best >> rank & 1]


def _all_sums(numbers: Sequence[int]) -> list[int]:
    sums = [0]
    for number in numbers:
        sums += [each + number for each in sums]
    return sums


def _meet(low: Sequence[int], high: Sequence[int], wanted: int) -> int:
    """The smallest sum of one of each that is at least ``wanted``, where there is one. Both are sorted."""
    best = low[-1] + high[-1]
    at = len(high) - 1
    for one in low:
        while at >= 0 and one + high[at] >= wanted:
            best = min(best, one + high[at])
            at -= 1
        if at < 0:
            break
    return best
