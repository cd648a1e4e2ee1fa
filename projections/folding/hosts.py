"""What facts about hosts and runtimes do to the site."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpukeeper.events import host as host_facts
from gpukeeper.events import runtime as runtime_facts
from gpukeeper.events.codec import Event
from gpukeeper.projections.host import Runtime, act_wish, pin_of, why_suspect

if TYPE_CHECKING:
    from gpukeeper.projections.site import Site


def on_registered(site: Site, event: Event, fact: runtime_facts.Registered) -> None:
    site.change_runtime(
        event.seq,
        fact.host,
        fact.runtime,
        provider=fact.provider,
        url=fact.url,
        devices=fact.devices,
        loads_models=fact.loads_models,
        releases=fact.releases,
        idle_grace_s=fact.idle_grace_s,
        container=fact.container,
        pull=fact.pull,
    )


def on_health_changed(site: Site, event: Event, fact: runtime_facts.HealthChanged) -> None:
    changes: dict[str, Any] = {"suspect": fact.suspect}
    if fact.suspect is None:
        changes |= {"suspect_model": "", "suspect_device": ""}
    site.change_runtime(
        event.seq,
        fact.host,
        fact.runtime,
        healthy=fact.healthy,
        models=fact.models,
        detail=fact.detail,
        **changes,
    )


def on_model_loaded(site: Site, event: Event, fact: runtime_facts.ModelLoaded) -> None:
    site.learned.apply(fact)
    site.change_runtime(event.seq, fact.host, fact.runtime)


def on_runtime_note(
    site: Site,
    event: Event,
    fact: runtime_facts.ModelUnloaded
    | runtime_facts.ProvisionStarted
    | runtime_facts.ProvisionProgress
    | runtime_facts.Provisioned
    | runtime_facts.ProvisionFailed,
) -> None:
    site.change_runtime(event.seq, fact.host, fact.runtime)


def on_suspect(site: Site, event: Event, fact: runtime_facts.Suspect) -> None:
    site.change_runtime(
        event.seq,
        fact.host,
        fact.runtime,
        suspect=why_suspect(fact),
        suspect_model=fact.model,
        suspect_device=fact.device,
    )


def on_pinned(site: Site, event: Event, fact: runtime_facts.Pinned) -> None:
    if fact.command_seq is not None:
        site.commands.pop(fact.command_seq, None)
    pins = _runtime(site, fact.host, fact.runtime).pins
    site.change_runtime(event.seq, fact.host, fact.runtime, pins=tuple(sorted({*pins, pin_of(fact.model)})))


def on_unpinned(site: Site, event: Event, fact: runtime_facts.Unpinned) -> None:
    if fact.command_seq is not None:
        site.commands.pop(fact.command_seq, None)
    pins = _runtime(site, fact.host, fact.runtime).pins
    site.change_runtime(
        event.seq, fact.host, fact.runtime, pins=tuple(pin for pin in pins if pin != pin_of(fact.model))
    )


def on_act_wanted(site: Site, event: Event, fact: runtime_facts.ActWanted) -> None:
    site.commands.pop(fact.command_seq, None)
    wishes = _runtime(site, fact.host, fact.runtime).wishes
    site.change_runtime(event.seq, fact.host, fact.runtime, wishes=(*wishes, act_wish(event.seq, fact)))


def on_acted(site: Site, event: Event, fact: runtime_facts.Acted) -> None:
    wishes = _runtime(site, fact.host, fact.runtime).wishes
    site.change_runtime(
        event.seq, fact.host, fact.runtime, wishes=tuple(wish for wish in wishes if wish.seq != fact.wanted_seq)
    )


def _runtime(site: Site, host: str, name: str) -> Runtime:
    known = site.hosts.get(host)
    return (None if known is None else known.runtime(name)) or Runtime(name=name, seq=0)


def on_joined(site: Site, event: Event, fact: host_facts.Joined) -> None:
    site.change_host(
        fact.host,
        seq=event.seq,
        instance_id=fact.instance_id,
        boot_id=fact.boot_id,
        version=fact.version,
        joined_ns=event.stored.stored_ns,
        joined_seq=event.seq,
        left=False,
        devices=fact.devices,
        runtimes=fact.runtimes,
    )


def on_left(site: Site, event: Event, fact: host_facts.Left) -> None:
    del event
    known = site.hosts.get(fact.host)
    if known is None or known.instance_id == fact.instance_id:
        # The goodbye of an earlier instance says nothing about the one that speaks for the host now.
        site.change_host(fact.host, left=True)
