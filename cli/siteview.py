"""The queue and the devices, for `gpuq queue` and `gpuq devices`: as documents, and as rows made from them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpukeeper.capacity.owners import told_idle_s
from gpukeeper.cli import holders
from gpukeeper.cli.agentstate import age_s, agent_state
from gpukeeper.cli.evidence import HostEvidence
from gpukeeper.cli.jobview import tokens_of
from gpukeeper.cli.livesite import Heard
from gpukeeper.cli.quantities import duration, megabytes, moment
from gpukeeper.cli.reasonwords import in_words
from gpukeeper.projections.device import Device, device_key
from gpukeeper.projections.host import ALL, Host, Runtime
from gpukeeper.projections.job import ACTIVE, Job, Phase
from gpukeeper.projections.registries import registry_problems
from gpukeeper.projections.site import Site

QUEUE_COLUMNS = ("#", "job", "model", "prio", "from", "waits for", "why")
RUNNING_COLUMNS = ("job", "model", "phase", "where", "runtime", "tokens", "in phase", "age", "from")
DEVICE_COLUMNS = ("device", "kind", "name", "state", "total", "used", "free", "slots", "claims")
BAR_COLUMNS = ("memory of", "who holds it", "in words")
RUNTIME_COLUMNS = ("runtime", "provider", "url", "state", "devices", "pins", "resident", "models")
PROBLEM_COLUMNS = ("to repair",)
HOST_COLUMNS = ("host", "agent", "heartbeat", "version", "joined")


def queue_document(site: Site, heard: Mapping[str, Heard], *, now_ns: int) -> dict[str, Any]:
    """Waiting jobs in the order in which they are looked at, and those that are sent or run, oldest first."""
    moving = sorted(
        (site.jobs[each] for each in site.live if site.jobs[each].phase in (Phase.ROUTED, *ACTIVE)),
        key=lambda job: (job.since_ns, job.id),
    )
    return {
        "seq": site.seq,
        "unanswered_submissions": len(site.submissions),
        "waiting": [
            {"place": place, **_waiting(site.jobs[job_id], now_ns)} for place, job_id in enumerate(site.queue, 1)
        ],
        "running": [_running(job, heard, now_ns) for job in moving],
    }


def _waiting(job: Job, now_ns: int) -> dict[str, Any]:
    return {
        "id": job.id,
        "model": job.model,
        "priority": job.priority,
        "producer": job.producer,
        "waited_s": age_s(job.accepted_ns, now_ns),
        "reason": job.reason,
        "detail": job.detail,
    }


def _running(job: Job, heard: Mapping[str, Heard], now_ns: int) -> dict[str, Any]:
    assert job.route is not None
    return {
        "id": job.id,
        "model": job.model,
        "phase": job.phase,
        "producer": job.producer,
        "host": job.route.host,
        "device": job.route.device,
        "runtime": job.route.runtime,
        "attempt": job.attempt,
        "tokens": tokens_of(job, heard),
        "phase_s": age_s(job.since_ns, now_ns),
        "age_s": age_s(job.accepted_ns, now_ns),
        "cancel_requested": job.cancel is not None,
    }


def queue_rows(document: Mapping[str, Any]) -> Iterator[Sequence[object]]:
    for job in document["waiting"]:
        why = in_words(job["reason"], job["detail"])
        yield (
            *(job["place"], job["id"], job["model"], job["priority"], job["producer"]),
            *(duration(job["waited_s"]), why),
        )


def running_rows(document: Mapping[str, Any]) -> Iterator[Sequence[object]]:
    for job in document["running"]:
        phase = f"{job['phase']}, cancel requested" if job["cancel_requested"] else job["phase"]
        yield (
            *(job["id"], job["model"], phase, f"{job['host']}/{job['device']}", job["runtime"]),
            *(job["tokens"] or "", duration(job["phase_s"]), duration(job["age_s"]), job["producer"]),
        )


def devices_document(site: Site, heard: Mapping[str, Heard], *, now_ns: int) -> dict[str, Any]:
    """Hosts with their devices and runtimes, as the log and the newest heartbeats say."""
    return {
        "seq": site.seq,
        "problems": list(registry_problems(site)),
        "hosts": [_host(site, host, heard.get(host.name), now_ns) for _, host in sorted(site.hosts.items())],
    }


def _host(site: Site, host: Host, heard: Heard | None, now_ns: int) -> dict[str, Any]:
    evidence = HostEvidence(site, host, heard, now_ns)
    beat_s = None if heard is None else age_s(heard.stored_ns, now_ns)
    return {
        "host": host.name,
        "agent": agent_state(host, heard, now_ns=now_ns),
        "heartbeat_s": beat_s,
        "version": host.version,
        "instance_id": host.instance_id,
        "joined": moment(host.joined_ns) if host.joined_ns else None,
        "devices": [
            _device(site, site.devices[key], evidence)
            for key in (device_key(host.name, device) for device in host.devices)
            if key in site.devices
        ],
        "runtimes": [_runtime(runtime, evidence) for runtime in evidence.registered()],
    }


def _device(site: Site, device: Device, evidence: HostEvidence) -> dict[str, Any]:
    reading = evidence.reading(device)
    state, detail = device.state, device.detail
    if device.state == "healthy" and reading.state != "healthy":
        state, detail = reading.state, reading.error or ""
    return {
        "device": device.id,
        "kind": device.kind,
        "name": device.name,
        "state": state,
        "detail": detail,
        "drained": device.drained,
        "unschedulable": device.unschedulable,
        "total_mb": device.total_mb if reading.total_mb is None else reading.total_mb,
        "used_mb": reading.used_mb,
        "free_mb": reading.free_mb,
        "headroom_mb": device.headroom_mb,
        "utilization_percent": reading.utilization_percent,
        "read_at": None if reading.source == "none" else reading.read_at,
        "slots": device.slots,
        "free_slots": max(site.free_slots(device), 0),
        "claims": [
            {"job": claim.job, "claim": claim.epoch, "slot": claim.slot, "attempt": claim.attempt}
            for claim in device.claims
        ],
        "held": holders.parts(evidence, device),
    }


def _runtime(runtime: Runtime, evidence: HostEvidence) -> dict[str, Any]:
    look = evidence.look(runtime)
    return {
        "runtime": runtime.name,
        "provider": runtime.provider,
        "url": runtime.url,
        "healthy": runtime.healthy,
        "suspect": runtime.suspect,
        "detail": runtime.detail,
        "activity": "unknown" if look is None else look.activity,
        "idle_s": told_idle_s(look),
        "idle_grace_s": runtime.idle_grace_s,
        "releases": runtime.releases,
        "pins": list(runtime.pins),
        "devices": list(runtime.devices),
        "resident": None if look is None or look.resident is None else [model.model for model in look.resident],
        "models": None if runtime.models is None else list(runtime.models),
    }


def problem_rows(document: Mapping[str, Any]) -> Iterator[Sequence[object]]:
    for problem in document["problems"]:
        yield (problem,)


def host_rows(document: Mapping[str, Any]) -> Iterator[Sequence[object]]:
    for host in document["hosts"]:
        beat = "never" if host["heartbeat_s"] is None else f"{duration(host['heartbeat_s'])} ago"
        yield host["host"], host["agent"], beat, host["version"], host["joined"]


def device_rows(document: Mapping[str, Any]) -> Iterator[Sequence[object]]:
    for host in document["hosts"]:
        for device in host["devices"]:
            state = device["state"] + (f": {device['detail']}" if device["detail"] else "")
            if device["drained"] is not None:
                state += f", drained {device['drained']}"
            if device["unschedulable"]:
                state += f", not used: {device['unschedulable']}"
            claims = ", ".join(f"{claim['job']} (slot {claim['slot']})" for claim in device["claims"])
            yield (
                *(f"{host['host']}/{device['device']}", device["kind"], device["name"], state),
                *(megabytes(device[name]) for name in ("total_mb", "used_mb", "free_mb")),
                *(f"{device['free_slots']} free of {device['slots']}", claims or "none"),
            )


def bar_rows(document: Mapping[str, Any], width: int) -> Iterator[Sequence[object]]:
    """A bar of ``width`` letters for each device, and the same in words."""
    for host in document["hosts"]:
        for device in host["devices"]:
            name = f"{host['host']}/{device['device']}"
            yield name, holders.bar(device["held"], width), holders.in_words(device["held"])


def runtime_rows(document: Mapping[str, Any]) -> Iterator[Sequence[object]]:
    for host in document["hosts"]:
        for runtime in host["runtimes"]:
            idle = "" if runtime["idle_s"] is None else f" for {duration(runtime['idle_s'])}"
            state = f"healthy, {runtime['activity']}{idle}" if runtime["healthy"] else "does not answer"
            if runtime["suspect"]:
                state = f"suspect: {runtime['suspect']}"
            yield (
                *(f"{host['host']}/{runtime['runtime']}", runtime["provider"], runtime["url"], state),
                ", ".join(runtime["devices"]) or "all",
                ", ".join("all of it" if pin == ALL else pin for pin in runtime["pins"]) or "none",
                *("?" if runtime[name] is None else ", ".join(runtime[name]) for name in ("resident", "models")),
            )
