"""Commands about devices and runtimes: what the scheduler answers, and what it passes on to the host's agent. Pure.

To drain, resume, pin and unpin is done by being told. To free memory and to begin, stop or restart a container is the
agent's: it is told what is wanted, on the subject that it follows, and answers there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from gpukeeper.events import device as device_facts
from gpukeeper.events import operator, subjects
from gpukeeper.events import runtime as runtime_facts
from gpukeeper.events.fact import Fact
from gpukeeper.events.proposal import Proposal
from gpukeeper.events.reasons import Reason
from gpukeeper.projections.device import Device, device_key
from gpukeeper.projections.host import Host, Runtime
from gpukeeper.projections.site import Site
from gpukeeper.projections.unanswered import Command
from gpukeeper.scheduler.refusals import NAME_CHARS_MAX, REASON_CHARS_MAX, cause, refuse, shorten

#: Wishes that one device or runtime may have unanswered.
WISHES_MAX = 16


def steer(site: Site, command: Command) -> Proposal:
    """Answer a command about a device or a runtime."""
    host = site.hosts.get(command.host or "")
    if host is None:
        return _unknown(command, Reason.UNKNOWN_HOST, "host", command.host, site.hosts)
    if command.device is not None:
        device = site.devices.get(device_key(host.name, command.device))
        if device is None:
            return _unknown(command, Reason.UNKNOWN_DEVICE, "device", command.device, host.devices)
        return _about_device(host, device, command)
    runtime = host.runtime(command.runtime or "")
    if runtime is None:
        return _unknown(command, Reason.UNKNOWN_RUNTIME, "runtime", command.runtime, host.runtimes)
    return _about_runtime(host, runtime, command)


def _about_device(host: Host, device: Device, command: Command) -> Proposal:
    names: dict[str, Any] = {"host": host.name, "device": device.id, "command_seq": command.seq, "actor": command.actor}
    reason = shorten(command.reason, REASON_CHARS_MAX)
    fact: Fact
    match command.tag:
        case operator.Drain.TYPE:
            fact = device_facts.Drained(**names, reason=reason)
        case operator.Resume.TYPE:
            fact = device_facts.Resumed(**names, reason=reason)
        case _:
            if command.runtime is not None and host.runtime(command.runtime) is None:
                return _unknown(command, Reason.UNKNOWN_RUNTIME, "runtime", command.runtime, host.runtimes)
            why_not = _cannot_act(host, len(device.wishes))
            if why_not is not None:
                return refuse(command, Reason.NO_ROUTE, why_not)
            fact = device_facts.ReclaimWanted(
                **names,
                reason=reason,
                runtime=command.runtime,
                model=_name(command.model),
                vram_mb=command.vram_mb,
            )
    return _answer(command, subjects.device(host.name, device.id), device.seq, f"{host.name}/{device.id}", fact)


def _about_runtime(host: Host, runtime: Runtime, command: Command) -> Proposal:
    reason = shorten(command.reason, REASON_CHARS_MAX)
    names: dict[str, Any] = {
        "host": host.name,
        "runtime": runtime.name,
        "actor": command.actor,
        "command_seq": command.seq,
    }
    fact: Fact
    match command.tag:
        case operator.Pin.TYPE:
            fact = runtime_facts.Pinned(**names, reason=reason, model=_name(command.model))
        case operator.Unpin.TYPE:
            fact = runtime_facts.Unpinned(**names, reason=reason, model=_name(command.model))
        case _:
            if runtime.container is None:
                detail = f"runtime {host.name}/{runtime.name} names no container in its registry entry"
                return refuse(command, Reason.NO_CONTAINER, detail)
            why_not = _cannot_act(host, len(runtime.wishes))
            if why_not is not None:
                return refuse(command, Reason.NO_ROUTE, why_not)
            fact = runtime_facts.ActWanted(**names, reason=reason, act=cast("runtime_facts.Act", command.act))
    return _answer(command, subjects.runtime(host.name, runtime.name), runtime.seq, f"{host.name}/{runtime.name}", fact)


def _cannot_act(host: Host, wishes: int) -> str | None:
    """Why the host's agent will not do anything about it, or None."""
    if host.left:
        return f"the agent of host {host.name} has stopped: nobody would do it"
    if wishes >= WISHES_MAX:
        return f"{wishes} earlier wishes are unanswered there"
    return None


def _answer(command: Command, subject: str, seq: int, aggregate: str, fact: Fact) -> Proposal:
    return Proposal(
        subject=subject,
        fact=fact,
        expected=seq,
        aggregate=aggregate,
        causationid=cause(command),
        actor=command.actor,
    )


def _unknown(command: Command, reason: Reason, what: str, name: str | None, known: Iterable[str]) -> Proposal:
    names = sorted(known)
    shown = ", ".join(names[:10]) or "none"
    return refuse(command, reason, f"no such {what}: {shorten(name or '', NAME_CHARS_MAX)!r}; known: {shown}")


def _name(model: str | None) -> str | None:
    return None if model is None else shorten(model, 256)
