"""What would happen to a job, place by place, in figures and in words. Pure: asking changes nothing.

The decision is the one that the agent takes (:func:`gpukeeper.capacity.decision.decide`); what is added is what would
have to change where the answer is no, and whether that would be enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from gpukeeper.capacity.admission import Admit
from gpukeeper.capacity.changes import Change, change_of, jobs_words, remedy
from gpukeeper.capacity.decision import Decision, Question, decide
from gpukeeper.capacity.reclaim import Hurdle, unmanaged_mb
from gpukeeper.events.device import Considered
from gpukeeper.events.reasons import Reason

#: ``starts``: at once. ``releases``: owners would be asked to let go, and what is measured then decides. ``waits``: it
#: would start, or release, as soon as a slot is free. ``denied``: not as things are.
Outcome = Literal["starts", "releases", "waits", "denied"]

_OUTCOMES: tuple[Outcome, ...] = ("starts", "releases", "waits", "denied")


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One place for the job."""

    host: str
    runtime: str
    question: Question
    #: Why the runtime cannot take the job whatever the memory: unreachable, without the model, suspect.
    obstacle: Hurdle | None = None
    #: Jobs that hold the device's slots, where no slot is free.
    slots_held_by: tuple[str, ...] = ()
    #: Jobs that load or run on the host: (runtime, job).
    jobs: tuple[tuple[str, str], ...] = ()
    #: How old the readings are, in seconds; None where they are from now.
    stale_s: float | None = None


class Place(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What would happen in one place."""

    host: str
    device: str
    device_name: str
    runtime: str
    outcome: Outcome
    #: Of a place that is ``denied`` or ``waits``.
    reason: Reason | None = None
    detail: str = ""
    resident: bool = False
    need_mb: int | None = None
    need_source: str = ""
    usable_mb: int | None = None
    free_mb: int | None = None
    total_mb: int | None = None
    reserved_mb: int = 0
    headroom_mb: int = 0
    #: What nobody registered holds; None where that is not known.
    unmanaged_mb: int | None = None
    shortfall_mb: int | None = None
    would_free_mb: int = 0
    #: In the order of the releases.
    would_release: tuple[Considered, ...] = ()
    stays: tuple[Considered, ...] = ()
    changes: tuple[Change, ...] = ()
    #: Even all of the changes together would not be enough.
    hopeless: bool = False
    read_at: str = ""
    stale_s: float | None = None


class Preview(msgspec.Struct, frozen=True, kw_only=True):
    """What would happen, the best place first."""

    model: str
    #: Of the best place; ``denied`` where there is none.
    outcome: Outcome
    places: tuple[Place, ...]

    def sentences(self) -> tuple[str, ...]:
        """The same in words, a sentence an item."""
        if not self.places:
            return (f"{self.model}: there is no place that could take it.", *_EPILOGUE)
        return tuple(line for place in self.places for line in _sentences(self.model, place)) + _EPILOGUE


_EPILOGUE = ("This is a preview: nothing was released and nothing started.",)


def preview(model: str, candidates: Sequence[Candidate]) -> Preview:
    """Say what would happen to a job for ``model`` in each place.

    Raises:
        ValueError: as :func:`gpukeeper.capacity.decision.decide`.
    """
    places = sorted((_place(each) for each in candidates), key=_order)
    return Preview(model=model, outcome=places[0].outcome if places else "denied", places=tuple(places))


def _order(place: Place) -> tuple[int, bool, int, str, str, str]:
    return (
        _OUTCOMES.index(place.outcome),
        not place.resident,
        place.would_free_mb,
        place.host,
        place.device,
        place.runtime,
    )


def _place(candidate: Candidate) -> Place:
    question = candidate.question
    decision = decide(question)
    admission, found = decision.admission, decision.plan
    releases = decision.releases
    outcome: Outcome = "starts" if isinstance(admission, Admit) else "releases" if releases else "denied"
    reason = None if isinstance(admission, Admit) or releases else admission.reason
    detail = admission.detail
    changes: tuple[Change, ...] = ()
    hopeless = False
    if candidate.obstacle is not None:
        outcome, reason, detail = "denied", candidate.obstacle.reason, candidate.obstacle.detail
        found, releases = None, ()
        changes = (Change(words=remedy(reason, candidate.runtime)),)
    elif outcome == "denied":
        changes, hopeless = _changes(candidate, decision)
    elif candidate.slots_held_by:
        outcome, reason = "waits", Reason.CAPACITY
        changes = (Change(words=f"wait for {jobs_words(candidate.slots_held_by)}: every slot is taken", enough=True),)
    considered = () if found is None else found.considered
    going = {(owner.runtime, owner.model): rank for rank, owner in enumerate(releases)}
    return Place(
        host=candidate.host,
        device=question.device.id,
        device_name=question.device.name,
        runtime=candidate.runtime,
        outcome=outcome,
        reason=reason,
        detail=detail,
        resident=question.resident,
        need_mb=admission.need_mb,
        need_source=admission.need_source,
        usable_mb=admission.usable_mb,
        free_mb=question.reading.free_mb,
        total_mb=question.reading.total_mb,
        reserved_mb=admission.reserved_mb,
        headroom_mb=admission.headroom_mb,
        unmanaged_mb=unmanaged_mb(question.reading, question.owners),
        shortfall_mb=decision.shortfall_mb,
        would_free_mb=sum(owner.held_mb or 0 for owner in releases),
        would_release=tuple(
            sorted(
                (each for each in considered if (each.runtime, each.model) in going),
                key=lambda each: going[each.runtime, each.model],
            )
        ),
        stays=tuple(each for each in considered if (each.runtime, each.model) not in going and _is_here(each)),
        changes=changes,
        hopeless=hopeless,
        read_at=question.reading.read_at,
        stale_s=candidate.stale_s,
    )


def _is_here(owner: Considered) -> bool:
    """What surely holds nothing on the device need not be told."""
    return owner.kept is not Reason.OTHER_DEVICE or owner.held_mb is None


def _changes(candidate: Candidate, decision: Decision) -> tuple[tuple[Change, ...], bool]:
    """What would have to be otherwise where the answer is no, and whether even all of it would not do."""
    admission, found = decision.admission, decision.plan
    changes: list[Change] = []
    if found is None or decision.shortfall_mb is None:
        assert not isinstance(admission, Admit), "only a refusal asks for changes"
        if admission.reason is Reason.INSUFFICIENT and admission.reserved_mb and not admission.host_short:
            gives_mb = admission.reserved_mb
            enough = not admission.never_fits and gives_mb >= (admission.need_mb or 0) - (admission.usable_mb or 0)
            changes.append(Change(words="jobs that were promised memory end", gives_mb=gives_mb, enough=enough))
        where = f"{candidate.host}/{candidate.question.device.id}"
        changes.append(Change(words=remedy(admission.reason, candidate.runtime, where)))
        return tuple(changes), admission.never_fits
    reachable_mb = found.could_free_mb
    for owner in candidate.question.owners:
        jobs = tuple(job for runtime, job in candidate.jobs if runtime == owner.runtime)
        change = change_of(owner, jobs, decision.shortfall_mb - found.could_free_mb)
        if change is not None:
            changes.append(change)
            reachable_mb += change.gives_mb or 0
    changes.sort(key=lambda change: (not change.enough, change.in_s is None, change.in_s or 0.0))
    if reachable_mb < decision.shortfall_mb:
        words = f"{decision.shortfall_mb - reachable_mb} MB more must become free, held by nobody who can be asked"
        changes.append(Change(words=words))
    return tuple(changes), reachable_mb < decision.shortfall_mb


def _sentences(model: str, place: Place) -> list[str]:
    asked = "an unknown amount" if place.need_mb is None else f"{place.need_mb} MB"
    source = f" ({place.need_source})" if place.need_source else ""
    verdict = {
        "starts": "it would start now",
        "releases": f"it would start once {place.would_free_mb} MB were let go",
        "waits": "it would wait for a slot",
        "denied": "it would not start",
    }[place.outcome]
    code = f" ({place.reason.value})" if place.reason is not None else ""
    name = f"{place.host}/{place.device}"
    age = f" Read {place.stale_s:.0f} s ago." if place.stale_s is not None else ""
    lines = [
        f"{model} with {place.runtime} on {name}, {asked}{source}: {verdict}{code}.",
        f"{place.detail}{age}",
    ]
    lines += [
        f"{_name(each)} would be asked to let go of {each.held_mb} MB: {each.detail}." for each in place.would_release
    ]
    lines += [
        f"{_name(each)} holds {'an unknown amount' if each.held_mb is None else f'{each.held_mb} MB'} and stays: "
        f"{each.detail} ({'' if each.kept is None else each.kept.value})."
        for each in place.stays
    ]
    if place.unmanaged_mb:
        lines.append(f"{place.unmanaged_mb} MB are held by nobody registered, and are never touched.")
    if place.changes:
        lines.append(
            "What would have to change:" if len(place.changes) == 1 else "What would have to change, one or more of:"
        )
        lines += [f"- {_change_words(each)}" for each in place.changes]
    return lines


def _name(owner: Considered) -> str:
    return owner.runtime if owner.model is None else f"{owner.runtime}/{owner.model}"


def _change_words(change: Change) -> str:
    if change.gives_mb is None:
        return f"{change.words}."
    return f"{change.words}: {change.gives_mb} MB{', which would be enough' if change.enough else ''}."
