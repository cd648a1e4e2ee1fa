"""What commands, and what is no fact, do to the site."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpukeeper.events import operator as operator_facts
from gpukeeper.events import site as site_facts
from gpukeeper.events.codec import Event, Unknown, Unreadable
from gpukeeper.events.ids import TOKEN_RULE, cleaned_token
from gpukeeper.events.subjects import COMMAND_PREFIX
from gpukeeper.projections.unanswered import Command

if TYPE_CHECKING:
    from gpukeeper.projections.site import Site


def on_leader_elected(site: Site, event: Event, fact: site_facts.LeaderElected) -> None:
    del event
    site.leader = fact.instance_id


def on_command_refused(site: Site, event: Event, fact: site_facts.CommandRefused) -> None:
    del event
    site.commands.pop(fact.command_seq, None)


def on_cancel(site: Site, event: Event, fact: operator_facts.Cancel) -> None:
    _command(site, event, tag=fact.TYPE, job=fact.job, reason=fact.reason)


def on_reclaim(site: Site, event: Event, fact: operator_facts.Reclaim) -> None:
    _command(
        site,
        event,
        tag=fact.TYPE,
        reason=fact.reason,
        host=fact.host,
        device=fact.device,
        runtime=fact.runtime,
        model=fact.model,
        vram_mb=fact.vram_mb,
    )


def on_pin(site: Site, event: Event, fact: operator_facts.Pin | operator_facts.Unpin) -> None:
    _command(site, event, tag=fact.TYPE, reason=fact.reason, host=fact.host, runtime=fact.runtime, model=fact.model)


def on_drain(site: Site, event: Event, fact: operator_facts.Drain | operator_facts.Resume) -> None:
    _command(site, event, tag=fact.TYPE, reason=fact.reason, host=fact.host, device=fact.device)


def on_runtime_act(site: Site, event: Event, fact: operator_facts.RuntimeAct) -> None:
    _command(site, event, tag=fact.TYPE, reason=fact.reason, host=fact.host, runtime=fact.runtime, act=fact.act)


def on_unreadable(site: Site, event: Event, fact: Unreadable) -> None:
    site.unreadable += 1
    _command(site, event, problem=fact.problem)


def on_unknown(site: Site, event: Event, fact: Unknown) -> None:
    site.unknown += 1
    _command(site, event, problem=f"unknown command {fact.type!r}")


def _command(
    site: Site,
    event: Event,
    *,
    tag: str = "",
    job: str | None = None,
    reason: str = "",
    problem: str = "",
    **names: Any,
) -> None:
    stored = event.stored
    if not stored.subject.startswith(COMMAND_PREFIX):
        return
    given = stored.subject[len(COMMAND_PREFIX) :]
    actor = cleaned_token(given)
    if actor != given:
        tag, job, names, problem = "", None, {}, f"the actor's name must be {TOKEN_RULE}; shown as {actor}"
    site.commands[event.seq] = Command(
        event.seq, stored.stored_ns, actor, event.event_id, job, reason, problem, tag, **names
    )
