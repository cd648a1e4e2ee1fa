"""Facts about devices and runtimes, and what operators ask of them, each as one sentence. See `words.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gpukeeper.cli.quantities import duration, megabytes, size
from gpukeeper.cli.reasonwords import in_words
from gpukeeper.events import device, operator, runtime
from gpukeeper.events.device import Considered

#: Of many owners of memory, so many stand in a sentence.
_OWNERS_SHOWN_MAX = 5


def appeared(fact: device.Appeared) -> str:
    slots = f"{fact.slots} slot{'s' if fact.slots != 1 else ''}"
    not_used = f"; not used: {fact.unschedulable}" if fact.unschedulable else ""
    name = f" {fact.name}" if fact.name else ""
    return f"{fact.kind}{name}, {megabytes(fact.total_mb)}, {slots}{not_used}"


def health(fact: runtime.HealthChanged) -> str:
    detail = f": {fact.detail}" if fact.detail else ""
    if not fact.healthy:
        return f"does not answer{detail}"
    has = "did not say which models it has" if fact.models is None else f"has {', '.join(fact.models) or 'no model'}"
    return f"healthy, {has}{detail}"


def owner(name: str, model: str | None) -> str:
    """``comfyui`` or ``ollama/qwen3:8b``."""
    return name if model is None else f"{name}/{model}"


def why(actor: str, reason: str) -> str:
    """``by ann: card is being swapped``."""
    return f"by {actor}" + (f": {reason}" if reason else "")


def kept_in_words(each: Considered) -> str:
    """What one owner holds, and whether and why it stays."""
    holds = f"{owner(each.runtime, each.model)} ({megabytes(each.held_mb)})"
    if each.kept is None:
        return f"{holds} goes" + (f": {each.detail}" if each.detail else "")
    return f"{holds} stays, {each.kept}" + (f": {each.detail}" if each.detail else "")


def owners_in_words(considered: Iterable[Considered]) -> str:
    """Why each owner stays or goes; empty for none."""
    shown = [kept_in_words(each) for each in considered]
    more = len(shown) - _OWNERS_SHOWN_MAX
    return "; ".join(shown[:_OWNERS_SHOWN_MAX]) + (f"; and {more} more" if more > 0 else "")


def _wanted(fact: device.ReclaimWanted) -> str:
    return f"to be freed: {_how_much(fact.vram_mb)}{_of_whom(fact.runtime, fact.model)}, {why(fact.actor, fact.reason)}"


def _requested(fact: device.ReclaimRequested) -> str:
    whom = f" for {fact.job}" if fact.job else f" for the wish at {fact.wanted_seq}" if fact.wanted_seq else ""
    idle = f", idle for {duration(fact.idle_s)}" if fact.idle_s is not None else ""
    return (
        f"{owner(fact.runtime, fact.model)} is asked to let go of {megabytes(fact.promised_mb)}{whom}{idle}; "
        f"free now: {megabytes(fact.free_mb)}"
    )


def _refused(fact: device.ReclaimRefused) -> str:
    whom = f" for {fact.job}" if fact.job else ""
    need = f", needs {megabytes(fact.need_mb)}" if fact.need_mb is not None else ""
    owners = owners_in_words(fact.considered)
    return f"nothing is freed{whom}{need}, {in_words(fact.reason, fact.detail)}" + (f"; {owners}" if owners else "")


def _reclaimed(fact: device.Reclaimed) -> str:
    measured = f"{megabytes(fact.measured_mb)} as measured (promised {megabytes(fact.promised_mb)})"
    free = f"free now: {megabytes(fact.free_mb)}"
    return f"{owner(fact.runtime, fact.model)} let go of {measured} within {duration(fact.settle_s)}; {free}"


def _reclaim_failed(fact: device.ReclaimFailed) -> str:
    free = f"; free now: {megabytes(fact.free_mb)}"
    whom = owner(fact.runtime, fact.model)
    return f"{whom} did not let go within {duration(fact.waited_s)}, {in_words(fact.reason, fact.detail)}{free}"


def _handed_off(fact: device.HandedOff) -> str:
    after = f" after {len(fact.generations)} release(s)" if fact.generations else ""
    return f"handed to {fact.job}{after}: {megabytes(fact.free_mb)} free, needs {megabytes(fact.need_mb)}"


def _unloaded(fact: runtime.ModelUnloaded) -> str:
    causes = {"reclaim": "its memory was wanted", "policy": "as its residency says", "operator": "as an operator asked"}
    what = fact.model or "all that it held"
    return f"unloaded {what}, {causes[fact.why]}" + (f", for {fact.job}" if fact.job else "")


def _acted(fact: runtime.Acted) -> str:
    detail = f": {fact.detail}" if fact.detail else ""
    if fact.done:
        return f"{fact.act} is done{detail}"
    cause = in_words(fact.reason or "", fact.detail)
    return f"{fact.act} is not done" + (f", {cause}" if cause else "")


def _progress(fact: runtime.ProvisionProgress) -> str:
    done = "" if fact.completed_bytes is None else f", {size(fact.completed_bytes)}"
    total = "" if fact.total_bytes is None else f" of {size(fact.total_bytes)}"
    return f"fetching {fact.model}: {fact.status}{done}{total}"


def _how_much(vram_mb: int | None) -> str:
    return "all that can be had" if vram_mb is None else megabytes(vram_mb)


def _of_whom(name: str | None, model: str | None) -> str:
    if name is None:
        return "" if model is None else f" of {model}"
    return f" of {owner(name, model)}"


def _asked(words: str) -> Callable[[Any], str]:
    """What an operator asked for a device or a runtime of a host."""

    def sentence(fact: Any) -> str:
        name = getattr(fact, "device", None) or fact.runtime
        model = getattr(fact, "model", None)
        reason = f": {fact.reason}" if fact.reason else ""
        return f"{words} {fact.host}/{owner(name, model)}{reason}"

    return sentence


def _reclaim(fact: operator.Reclaim) -> str:
    reason = f": {fact.reason}" if fact.reason else ""
    return f"free {_how_much(fact.vram_mb)}{_of_whom(fact.runtime, fact.model)} on {fact.host}/{fact.device}{reason}"


#: By fact; `words.py` has the others.
WORDS: Mapping[type, Callable[[Any], str]] = {
    operator.Reclaim: _reclaim,
    operator.Pin: _asked("pin"),
    operator.Unpin: _asked("unpin"),
    operator.Drain: _asked("drain"),
    operator.Resume: _asked("resume"),
    operator.RuntimeAct: lambda fact: _asked(fact.act)(fact),
    device.Appeared: appeared,
    device.Changed: lambda fact: f"is {fact.state}" + (f": {fact.detail}" if fact.detail else ""),
    device.Claimed: lambda fact: f"slot {fact.slot} claimed for {fact.job}, attempt {fact.attempt}",
    device.Released: lambda fact: f"claim {fact.epoch} of {fact.job} released",
    device.ClaimLapsed: lambda fact: (
        f"claim {fact.epoch} of {fact.job} lapsed" + (f": {fact.detail}" if fact.detail else "")
    ),
    device.ReclaimWanted: _wanted,
    device.ReclaimRequested: _requested,
    device.ReclaimRefused: _refused,
    device.Reclaimed: _reclaimed,
    device.ReclaimFailed: _reclaim_failed,
    device.HandedOff: _handed_off,
    device.Drained: lambda fact: f"taken out of service {why(fact.actor, fact.reason)}",
    device.Resumed: lambda fact: f"back in service {why(fact.actor, fact.reason)}",
    runtime.Registered: lambda fact: f"registered: {fact.provider} at {fact.url or fact.container or 'no address'}",
    runtime.HealthChanged: health,
    runtime.ModelLoaded: lambda fact: (
        f"loaded {fact.model} in {duration(fact.load_s)} for {fact.job}"
        + (f", took {megabytes(fact.vram_mb)}" if fact.vram_mb is not None else "")
    ),
    runtime.ModelUnloaded: _unloaded,
    runtime.Suspect: lambda fact: f"suspect since {fact.job}: {fact.model}, {in_words(fact.reason, fact.detail)}",
    runtime.Pinned: lambda fact: f"pinned {fact.model or 'whatever it holds'}, {why(fact.actor, fact.reason)}",
    runtime.Unpinned: lambda fact: f"unpinned {fact.model or 'whatever it holds'}, {why(fact.actor, fact.reason)}",
    runtime.ActWanted: lambda fact: f"{fact.act} wanted {why(fact.actor, fact.reason)}",
    runtime.Acted: _acted,
    runtime.ProvisionStarted: lambda fact: f"{fact.model} is missing and is being fetched, for {fact.job}",
    runtime.ProvisionProgress: _progress,
    runtime.Provisioned: lambda fact: f"fetched {fact.model} in {duration(fact.took_s)}",
    runtime.ProvisionFailed: lambda fact: f"{fact.model} not fetched, {in_words(fact.reason, fact.detail)}",
}
