"""What is wrong between the registries of a site's hosts, which no host can see by itself. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from gpukeeper.events.endpoints import Endpoint, endpoint_of
from gpukeeper.projections.host import Host, Runtime
from gpukeeper.projections.site import Site


def registry_problems(site: Site) -> tuple[str, ...]:
    """In sentences without their full stops, in the order of the hosts' names; empty where all is well."""
    return (*_on_two_hosts(site), *_without_device(site))


def _on_two_hosts(site: Site) -> Iterator[str]:
    """A server belongs to one host: two agents would both take its memory and its work for their own."""
    seen: dict[Endpoint, tuple[str, str]] = {}
    for host, runtime in _registered(site):
        endpoint = endpoint_of(runtime.url)
        if endpoint is None or endpoint.is_local:
            continue
        first = seen.setdefault(endpoint, (host.name, runtime.name))
        if first[0] != host.name:
            yield (
                f"runtime {host.name}/{runtime.name} is the server of {first[0]}/{first[1]}, {runtime.url}: "
                "list it on the host that it runs on only"
            )


def _without_device(site: Site) -> Iterator[str]:
    for host, runtime in _registered(site):
        missing = [device for device in runtime.devices if device not in host.devices]
        if missing:
            has = ", ".join(host.devices) or "none"
            name, lacks = f"{host.name}/{runtime.name}", ", ".join(missing)
            yield f"runtime {name} names devices that are not there: {lacks}; there: {has}"


def _registered(site: Site) -> Iterator[tuple[Host, Runtime]]:
    """The runtimes of agents that have not left."""
    for _, host in sorted(site.hosts.items()):
        for runtime in () if host.left else host.registry:
            if runtime.name in host.runtimes:
                yield host, runtime
