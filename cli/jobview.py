"""One job in full, for `gpuq status`: as a document, and as lines made from it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpukeeper.cli.livesite import Heard
from gpukeeper.cli.quantities import duration, limit, megabytes, moment
from gpukeeper.cli.reasonwords import in_words
from gpukeeper.cli.words import BUILT_IN, short_type
from gpukeeper.events import job as facts
from gpukeeper.events.codec import Event
from gpukeeper.projections.job import Job, Phase
from gpukeeper.projections.site import Site

#: Which clock runs in which phase.
_CLOCK_OF = {
    Phase.WAITING: "queue",
    Phase.ROUTED: "queue",
    Phase.ADMITTED: "load",
    Phase.PLACED: "load",
    Phase.RUNNING: "run",
}


def job_document(
    job: Job, history: Sequence[Event], site: Site, heard: Mapping[str, Heard], *, now_ns: int
) -> dict[str, Any]:
    """Everything that is known of ``job``: its state in ``site``, its own events, and the beats of its host."""
    document: dict[str, Any] = {
        "id": job.id,
        "phase": job.phase,
        "since": moment(job.since_ns),
        "for_s": _seconds(job.since_ns, now_ns),
        "reason": job.reason,
        "detail": job.detail,
        "producer": job.producer,
        "model": job.model,
        "task": job.task,
        "kind": job.kind,
        "priority": job.priority,
        "asked": _asked(job),
        "attempt": job.attempt,
        "attempts": list(_attempts(history)),
        "submission_seq": job.submission_seq,
        "seq": job.seq,
    }
    if job.route is not None:
        document["where"] = _where(job)
    place = site.queue.place(job) if job.phase is Phase.WAITING else None
    if place is not None:
        document["queue"] = {"place": place + 1, "ahead": place, "length": len(site.queue)}
    if not job.ended:
        document["tokens"] = tokens_of(job, heard)
    if job.cancel is not None:
        document["cancel_requested"] = {"actor": job.cancel.actor, "reason": job.cancel.reason}
    document["clocks"] = _clocks(job, now_ns)
    document["times"] = _times(job, history, now_ns)
    return document


def tokens_of(job: Job, heard: Mapping[str, Heard]) -> int:
    """Tokens so far: by the last heartbeat of its host, or by its last progress, whichever is more."""
    beat = heard.get(job.route.host) if job.route is not None else None
    claim = beat.claim(job.epoch) if beat is not None and job.epoch else None
    return max(job.tokens, claim.tokens if claim is not None else 0)


def _asked(job: Job) -> dict[str, Any]:
    wishes = {name: getattr(job, name) for name in ("runtime", "host", "device", "origin", "vram_mb")}
    return {"place": job.place, "on_capacity": job.on_capacity} | {k: v for k, v in wishes.items() if v is not None}


def _where(job: Job) -> dict[str, Any]:
    assert job.route is not None
    place = {"host": job.route.host, "device": job.route.device, "runtime": job.route.runtime}
    return place | ({"slot": job.slot, "claim": job.epoch} if job.epoch else {})


def _attempts(history: Sequence[Event]) -> Iterator[dict[str, Any]]:
    """Each attempt: where, from when to when, and how it ended."""
    current: dict[str, Any] | None = None
    for event in history:
        fact = event.data
        at = moment(event.stored.stored_ns)
        if isinstance(fact, facts.Denied):
            yield {
                "attempt": fact.attempt,
                "host": fact.host,
                "device": fact.device,
                "claim": fact.epoch,
                "from": at,
                "to": at,
                "outcome": "denied",
                "reason": fact.reason,
                "detail": fact.detail,
            }
        elif isinstance(fact, facts.Admitted):
            current = {
                "attempt": fact.attempt,
                "host": fact.host,
                "device": fact.device,
                "claim": fact.epoch,
                "runtime": fact.runtime,
                "slot": fact.slot,
                "from": at,
                "resident": fact.resident,
            }
        elif current is not None and isinstance(fact, facts.PlacementVerified):
            current["load_s"] = fact.load_s
        elif current is not None and isinstance(fact, (facts.Waiting, facts.Preempted, *facts.ENDS)):
            current |= {"to": at, "outcome": short_type(fact.TYPE).removeprefix("job.")}
            current |= {name: value for name in ("reason", "detail") if (value := getattr(fact, name, ""))}
            yield current
            current = None
    if current is not None:
        yield current | {"outcome": "under way"}


def _clocks(job: Job, now_ns: int) -> dict[str, Any]:
    if job.clocks is None:
        return {}
    running = _CLOCK_OF.get(job.phase)
    found: dict[str, Any] = {}
    for name in ("queue", "load", "first_byte", "idle", "run"):
        clock = getattr(job.clocks, name)
        found[name] = {"limit_s": clock.limit_s, "source": clock.source or BUILT_IN}
        if name == running:
            since_ns = job.accepted_ns if name == "queue" else job.since_ns
            found[name]["elapsed_s"] = _seconds(since_ns, now_ns)
    return found


def _times(job: Job, history: Sequence[Event], now_ns: int) -> dict[str, Any]:
    """When it was submitted, accepted, started and ended, and the seconds between."""
    found: dict[str, Any] = {"submitted": moment(job.submitted_ns)}
    if job.phase is not Phase.REJECTED:
        found["accepted"] = moment(job.accepted_ns)
    started_ns: int | None = None
    for event in history:
        if isinstance(event.data, facts.Admitted):
            found["waited_s"] = _seconds(job.accepted_ns, event.stored.stored_ns)
        elif isinstance(event.data, facts.Started):
            started_ns = event.stored.stored_ns
            found["started"] = moment(started_ns)
        elif isinstance(event.data, facts.ENDS):
            found["ended"] = moment(event.stored.stored_ns)
            found["total_s"] = _seconds(job.submitted_ns, event.stored.stored_ns)
            timings = getattr(event.data, "timings", None)
            if isinstance(timings, facts.Timings):
                named = {name: getattr(timings, name) for name in ("load_s", "first_byte_s", "run_s")}
                found |= {name: value for name, value in named.items() if value is not None}
    if not job.ended:
        found["age_s"] = _seconds(job.submitted_ns, now_ns)
    return found


def _seconds(from_ns: int, to_ns: int) -> float:
    """Never negative: this machine's clock and the server's may be apart."""
    return round(max(to_ns - from_ns, 0) / 1e9, 3)


def job_lines(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The document as label and text, for people. Not escaped."""
    since = f"for {duration(document['for_s'])}"
    yield "job", document["id"]
    yield "phase", f"{document['phase']}, {since}" + ("" if "where" not in document else f" {_place(document)}")
    if document["reason"] or document["detail"]:
        yield "reason", in_words(document["reason"], document["detail"])
    if (queue := document.get("queue")) is not None:
        yield "queue", f"place {queue['place']} of {queue['length']}"
    if (cancel := document.get("cancel_requested")) is not None:
        yield "cancel", f"requested by {cancel['actor']}" + (f": {cancel['reason']}" if cancel["reason"] else "")
    if document["model"]:
        asked = ", ".join(_asked_in_words(document["asked"]))
        yield "asks", f"{document['task']} with {document['model']}" + (f" ({asked})" if asked else "")
        yield "from", f"{document['producer']}, kind {document['kind']}, priority {document['priority']}"
    if document.get("tokens"):
        yield "tokens", str(document["tokens"])
    for attempt in document["attempts"]:
        yield f"attempt {attempt['attempt']}", _attempt_in_words(attempt)
    for name, clock in document["clocks"].items():
        if "elapsed_s" in clock:
            spent = f"{duration(clock['elapsed_s'])} of {limit(clock['limit_s'])}"
            yield "clock", f"{name}: {spent}, set by {clock['source']}"
    yield "times", ", ".join(_times_in_words(document["times"]))


def _place(document: Mapping[str, Any]) -> str:
    where = document["where"]
    return f"on {where['host']}/{where['device']} ({where['runtime']})"


def _asked_in_words(asked: Mapping[str, Any]) -> Iterator[str]:
    for name, value in asked.items():
        if name == "vram_mb":
            yield f"needs {megabytes(value)}"
        elif (name, value) not in (("place", "any"), ("on_capacity", "wait")):
            yield f"{name} {value}"


def _attempt_in_words(attempt: Mapping[str, Any]) -> str:
    loaded = f", loaded in {duration(attempt['load_s'])}" if attempt.get("load_s") is not None else ""
    why = in_words(str(attempt.get("reason", "")), str(attempt.get("detail", "")))
    place = f"{attempt['host']}/{attempt['device']}, claim {attempt['claim']}"
    return f"{place}{loaded}: {attempt['outcome'].replace('_', ' ')}" + (f", {why}" if why else "")


def _times_in_words(times: Mapping[str, Any]) -> Iterator[str]:
    yield f"submitted {times['submitted']}"
    labels = {
        "waited_s": "waited",
        "load_s": "load",
        "first_byte_s": "first token",
        "run_s": "run",
        "total_s": "total",
        "age_s": "age",
    }
    for name, label in labels.items():
        if name in times:
            yield f"{label} {duration(times[name])}"
