"""Each event as one sentence. Values that others wrote are not escaped here: the printer does that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpukeeper.cli.devicewords import WORDS as DEVICE_WORDS
from gpukeeper.cli.devicewords import why
from gpukeeper.cli.quantities import duration, limit, megabytes, size
from gpukeeper.cli.reasonwords import in_words
from gpukeeper.events import device, host, job, operator, readings, route, runtime, site
from gpukeeper.events.codec import Event, Submitted, Unknown, Unreadable
from gpukeeper.events.work import JobResult

#: What stands for a clock that says nothing about where it was configured.
BUILT_IN = "the built-in default"

#: What a person who watches a whole site wants to know of; the rest is in `gpuq events`.
IMPORTANT: tuple[type, ...] = (
    job.Accepted,
    job.Rejected,
    job.Waiting,
    job.Denied,
    job.PlacementFailed,
    job.Started,
    job.CancelRequested,
    job.Succeeded,
    job.Failed,
    job.Cancelled,
    job.Preempted,
    job.Expired,
    job.Unroutable,
    job.Lost,
    job.LateResult,
    device.Appeared,
    device.Changed,
    device.ClaimLapsed,
    device.ReclaimRequested,
    device.ReclaimRefused,
    device.Reclaimed,
    device.ReclaimFailed,
    device.HandedOff,
    device.Drained,
    device.Resumed,
    runtime.HealthChanged,
    runtime.Suspect,
    runtime.ModelUnloaded,
    runtime.Pinned,
    runtime.Unpinned,
    runtime.Acted,
    runtime.ProvisionStarted,
    runtime.Provisioned,
    runtime.ProvisionFailed,
    host.Joined,
    host.Left,
    site.CommandRefused,
)


def sentence(event: Event) -> str:
    """What happened, without what it happened to (see :func:`about`)."""
    words = _WORDS.get(type(event.data))
    return words(event.data) if words is not None else type_name(event)


def about(event: Event) -> str:
    """The aggregate: a job, ``host/device``, ``host/runtime``, a host, a producer, ``site``."""
    _, family, *rest = event.stored.subject.split(".")
    if family == "ev":
        kind, *names = rest
        if kind == "route":
            return names[-1]
        return "/".join(names) or kind
    return ".".join(rest)


def type_name(event: Event) -> str:
    """``job.accepted`` for ``gpuq.job.accepted.v1``; ``submitted`` and ``unreadable`` for what has no type."""
    data = event.data
    if isinstance(data, Submitted):
        return "submitted"
    if isinstance(data, Unreadable):
        return "unreadable"
    tag = data.type if isinstance(data, Unknown) else data.TYPE
    return short_type(tag)


def short_type(tag: str) -> str:
    """``job.accepted`` for ``gpuq.job.accepted.v1``."""
    stem, _, version = tag.rpartition(".")
    name = stem if version[:1] == "v" and version[1:].isdigit() else tag
    return name.removeprefix("gpuq.")


def result_in_words(result: JobResult | None) -> str:
    """How much came back, not what."""
    if result is None:
        return "result in the object store"
    parts: list[str] = []
    if result.embeddings is not None:
        parts.append(f"{len(result.embeddings)} embeddings")
    if result.completion_tokens is not None:
        parts.append(f"{result.completion_tokens} tokens")
    if result.finish_reason:
        parts.append(f"finish: {result.finish_reason}")
    return ", ".join(parts) or "done"


def _submitted(fact: Submitted) -> str:
    return f"submitted by {fact.producer}, {size(len(fact.raw))}"


def _accepted(fact: job.Accepted) -> str:
    wish = [f"{name} {value}" for name in ("runtime", "host", "device") if (value := getattr(fact, name))]
    wish += [f"place {fact.place}"] if fact.place != "any" else []
    wish += [f"priority {fact.priority}"] if fact.priority else []
    wish += [f"needs {megabytes(fact.vram_mb)}"] if fact.vram_mb is not None else []
    asked = f" ({', '.join(wish)})" if wish else ""
    waits = f"; waits, {in_words(fact.waiting, fact.detail)}" if fact.waiting else ""
    return f"accepted: {fact.task} with {fact.model}{asked}{waits}"


def _rejected(fact: job.Rejected) -> str:
    asked = f" (asked for id {fact.requested_id})" if fact.requested_id else ""
    return f"rejected{asked}, {fact.reason}: {problems_in_words(fact.problems)}"


def problems_in_words(problems: tuple[Any, ...]) -> str:
    """Problems of a submission: field, value, what would be right."""
    return "; ".join(problem_in_words(problem) for problem in problems)


def problem_in_words(problem: Any) -> str:
    """One problem (a :class:`gpukeeper.events.spec.Problem`) of a submission."""
    value = "" if problem.value is None else f" = {problem.value!r}"
    place = f"{problem.path}{value}: " if problem.path else ""
    shown = f" (got {problem.value!r})" if problem.value is not None and not problem.path else ""
    return f"{place}{problem.message}{shown}"


def _waiting(fact: job.Waiting) -> str:
    return f"waits, {in_words(fact.reason, fact.detail)}"


def _room(fact: job.Admitted | job.Denied) -> str:
    if fact.need_mb is None:
        return ""
    usable = f" of {megabytes(fact.usable_mb)} usable" if fact.usable_mb is not None else ""
    return f", needs {megabytes(fact.need_mb)} ({fact.need_source}){usable}"


def _admitted(fact: job.Admitted) -> str:
    loaded = ", model resident" if fact.resident else ""
    place = f"{fact.host}/{fact.device} slot {fact.slot}"
    return f"admitted on {place} by claim {fact.epoch}, attempt {fact.attempt}{loaded}{_room(fact)}"


def _denied(fact: job.Denied) -> str:
    return f"denied on {fact.host}/{fact.device}, {in_words(fact.reason, fact.detail)}{_room(fact)}"


def _placement(fact: job.Placement) -> str:
    took = f", loaded in {duration(fact.load_s)}" if fact.load_s is not None else ""
    return f"placement verified: {fact.model} on {fact.runtime}, {fact.detail}{took}"


def _misplaced(fact: job.PlacementFailed) -> str:
    return f"placement failed: {fact.model} on {fact.runtime}, {in_words(fact.reason, fact.detail)}"


def _succeeded(fact: job.Succeeded) -> str:
    run = f" in {duration(fact.timings.run_s)}" if fact.timings.run_s is not None else ""
    first = f", first token after {duration(fact.timings.first_byte_s)}" if fact.timings.first_byte_s else ""
    return f"succeeded{run}: {result_in_words(fact.result)}{first}"


def _failed(fact: job.Failed) -> str:
    status = f", HTTP status {fact.status}" if fact.status is not None else ""
    return f"failed, {in_words(fact.reason, fact.detail)}{status}"


def _expired(fact: job.Expired) -> str:
    spent = f"{duration(fact.elapsed_s)} of {limit(fact.limit_s)}, set by {fact.source or BUILT_IN}"
    return f"expired: {fact.clock} clock, {spent}" + (f"; {fact.detail}" if fact.detail else "")


def _lost(fact: job.Lost) -> str:
    silent = f", silent for {duration(fact.silent_s)}" if fact.silent_s is not None else ""
    return f"lost on {fact.host}/{fact.device}{silent}, {in_words(fact.reason, fact.detail)}"


def _routed(fact: route.Routed) -> str:
    why = f": {fact.why}" if fact.why else ""
    others = f", {len(fact.candidates)} candidates" if len(fact.candidates) > 1 else ""
    place = f"{fact.host}/{fact.device} for {fact.runtime}"
    return f"routed to {place}, attempt {fact.attempt}, score {fact.score:g}{others}{why}"


def _joined(fact: host.Joined) -> str:
    runtimes = ", ".join(fact.runtimes) or "none"
    return f"agent joined (version {fact.version}); devices: {', '.join(fact.devices) or 'none'}; runtimes: {runtimes}"


def _beat(fact: readings.Heartbeat) -> str:
    return f"heartbeat, {len(fact.claims)} claims"


_WORDS: Mapping[type, Callable[[Any], str]] = {
    **DEVICE_WORDS,
    Submitted: _submitted,
    Unknown: lambda fact: f"{fact.type}, of a newer version",
    Unreadable: lambda fact: f"no event: {fact.problem}",
    operator.Cancel: lambda fact: f"cancel {fact.job}" + (f": {fact.reason}" if fact.reason else ""),
    job.Accepted: _accepted,
    job.Rejected: _rejected,
    job.Resubmitted: lambda fact: f"the same submission came again from {fact.producer}; still one job",
    job.Waiting: _waiting,
    job.Admitted: _admitted,
    job.Denied: _denied,
    job.PlacementVerified: _placement,
    job.PlacementFailed: _misplaced,
    job.Started: lambda fact: f"started, attempt {fact.attempt}",
    job.Progress: lambda fact: f"{fact.tokens} tokens after {duration(fact.elapsed_s)}",
    job.CancelRequested: lambda fact: f"cancel requested {why(fact.actor, fact.reason)}",
    job.Succeeded: _succeeded,
    job.Failed: _failed,
    job.Cancelled: lambda fact: f"cancelled {why(fact.actor, fact.reason)}",
    job.Preempted: lambda fact: f"preempted, {in_words(fact.reason, fact.detail)}",
    job.Expired: _expired,
    job.Unroutable: lambda fact: f"unroutable, {in_words(fact.reason, fact.detail)}",
    job.Lost: _lost,
    job.LateResult: lambda fact: f"late result ({fact.outcome}), shown and not applied" + _detail(fact.detail),
    route.Routed: _routed,
    route.Unrouted: lambda fact: f"route to {fact.host} withdrawn, {in_words(fact.reason, fact.detail)}",
    host.Joined: _joined,
    host.Left: lambda fact: "agent left" + _detail(fact.detail),
    site.LeaderElected: lambda fact: f"scheduler {fact.instance_id} leads",
    site.CommandRefused: lambda fact: (
        f"command {fact.command_seq} of {fact.actor} refused, {in_words(fact.reason, fact.detail)}"
    ),
    readings.Heartbeat: _beat,
}


def _detail(detail: str) -> str:
    return f": {detail}" if detail else ""
