"""What would have to be otherwise for a refusal to become a yes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gpukeeper.capacity.reclaim import Owner, hurdles
from gpukeeper.events.reasons import Reason


class Change(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that would have to be otherwise."""

    words: str
    #: The owner that would have to change; empty for the device, the runtime or the job.
    runtime: str = ""
    model: str | None = None
    #: What it would bring at most.
    gives_mb: int | None = None
    #: It comes by itself after so long, where nothing happens meanwhile.
    in_s: float | None = None
    #: This alone would be enough.
    enough: bool = False


def change_of(owner: Owner, jobs: Sequence[str], missing_mb: int) -> Change | None:
    """What would let ``owner`` go; None where nothing that is expected to happen would, or it may go already.

    Args:
        owner: one that stays.
        jobs: ours that load or run on its runtime, as far as they are known.
        missing_mb: what is missing beside all that may be released already.
    """
    stands = hurdles(owner)
    reasons = {each.reason for each in stands}
    if not stands or owner.held_mb is None or reasons & {Reason.OTHER_DEVICE, Reason.NOT_RELEASABLE}:
        return None
    wishes: list[str] = []
    in_s: float | None = None
    if Reason.PINNED in reasons:
        wishes.append(f"an operator unpins {owner.label}")
    if Reason.OWNER_BUSY in reasons:
        work = f"{jobs_words(jobs)} on {owner.runtime} end" if jobs else f"{owner.label} ends its work"
        wishes.append(f"{work}, and {owner.label} is then idle for {owner.grace_s:.10g} s")
    if Reason.ACTIVITY_UNKNOWN in reasons:
        wishes.append(f"{owner.label} shows that it does nothing for {owner.grace_s:.10g} s")
    if Reason.IN_GRACE in reasons:
        in_s = -(-(owner.grace_s - (owner.idle_s or 0.0)) // 1)
        wishes.append(f"in {in_s:.0f} s {owner.label} would have been idle for its {owner.grace_s:.10g} s")
    return Change(
        words=" and ".join(wishes),
        runtime=owner.runtime,
        model=owner.model,
        gives_mb=owner.held_mb,
        in_s=in_s if len(wishes) == 1 else None,
        enough=owner.held_mb >= missing_mb,
    )


def jobs_words(jobs: Sequence[str]) -> str:
    """The jobs by name, for the middle of a sentence."""
    return f"job{'s' if len(jobs) > 1 else ''} {', '.join(jobs)}"


def remedy(reason: Reason, runtime: str, where: str = "") -> str:
    """What somebody can do about a refusal that no release would change."""
    match reason:
        case Reason.DRAINED:
            return f"an operator resumes {where}"
        case Reason.DEVICE_BLOCKED:
            return f"the owner that did not let go of {where} does, or is restarted"
        case Reason.DEVICE_LOST | Reason.DEVICE_UNKNOWN:
            return f"{where or 'the device'} can be read again"
        case Reason.NEED_UNKNOWN:
            return "the job declares need.vram_mb"
        case Reason.RUNTIME_UNREACHABLE | Reason.RESIDENCY_UNKNOWN:
            return f"{runtime} answers again"
        case Reason.MODEL_MISSING | Reason.UNKNOWN_MODEL:
            return f"{runtime} gets the model"
        case Reason.INSUFFICIENT:
            return "the job asks for less, or goes elsewhere"
        case _:
            return f"{runtime} is repaired"
