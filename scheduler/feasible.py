"""Which devices could ever run a job, as far as the log knows. What is unknown is not infeasible."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator

import msgspec

from gpukeeper.events.modelnames import matches, same_model
from gpukeeper.events.reasons import Reason
from gpukeeper.projections.device import Device, device_key
from gpukeeper.projections.host import Host, Runtime
from gpukeeper.projections.site import Site

#: Where nothing is known against a job, and nothing for it.
NO_HOST_YET = "no host offers it yet"


class Want(msgspec.Struct, frozen=True):
    """What a job asks of the place it runs in. Equal wants have equal options."""

    model: str
    runtime: str | None = None
    host: str | None = None
    device: str | None = None
    place: str = "any"
    vram_mb: int | None = None
    gpus: int = 1


class Option(msgspec.Struct, frozen=True):
    """One place that could run it."""

    host: Host
    runtime: Runtime
    #: The device; the first one where the job takes several.
    device: Device
    #: Where the job takes several: all devices that could be among them, in the order in which they are claimed.
    candidates: tuple[Device, ...] = ()
    gpus: int = 1

    @property
    def pool(self) -> tuple[Device, ...]:
        """The devices to choose from."""
        return self.candidates or (self.device,)


class Infeasible(msgspec.Struct, frozen=True):
    """No place could, ever, as the site stands: the field that is at fault, and why."""

    reason: Reason
    path: str
    detail: str
    value: str


def may_have(runtime: Runtime, model: str) -> bool:
    """Whether the runtime has ``model``, may have it as far as it said, or may fetch it."""
    return has_model(runtime, model) is not False or matches(runtime.pull, model)


def must_fetch(runtime: Runtime, model: str) -> bool:
    """Whether it said that it lacks ``model``, and may fetch it."""
    return bool(runtime.pull) and has_model(runtime, model) is False and matches(runtime.pull, model)


def has_model(runtime: Runtime, model: str) -> bool | None:
    """Whether the runtime lists ``model``; None where it did not say."""
    return None if runtime.models is None else lists_model(runtime.models, model)


def lists_model(models: Collection[str], model: str) -> bool:
    """Whether ``models`` has ``model``, under whichever of its names."""
    return model in models or any(same_model(name, model) for name in models)


def options(site: Site, want: Want) -> list[Option] | Infeasible:
    """Every place that could run ``want``, or why none ever could.

    An empty list means that nothing is known against it: no host has joined yet, or a runtime has not said what it has.
    """
    if not site.hosts:
        return []
    if want.host is not None and want.host not in site.hosts:
        detail = f"no such host; known: {_some(site.hosts)}"
        return Infeasible(Reason.UNKNOWN_HOST, "host", detail, want.host)
    runtimes = list(_runtimes(site, want))
    if not runtimes:
        if want.runtime is None or any(_is_coming(host, want.runtime) for host in _hosts(site, want)):
            return []
        names = {
            runtime.name for host in _hosts(site, want) for runtime in host.registry if runtime.name in host.runtimes
        }
        detail = f"no host lists a runtime of that name; known: {_some(names)}"
        return Infeasible(Reason.UNKNOWN_RUNTIME, "runtime", detail, want.runtime)
    with_model = [(host, runtime) for host, runtime in runtimes if may_have(runtime, want.model)]
    if not with_model:
        models = {model for _, runtime in runtimes for model in runtime.models or ()}
        close = difflib.get_close_matches(want.model, models, n=3)
        detail = (
            f"no runtime has it or may fetch it; {'close: ' + ', '.join(close) if close else 'known: ' + _some(models)}"
        )
        return Infeasible(Reason.UNKNOWN_MODEL, "model", detail, want.model)
    return _on_devices(site, want, with_model)


def _hosts(site: Site, want: Want) -> list[Host]:
    return [host for host in site.hosts.values() if want.host in (None, host.name)]


def _runtimes(site: Site, want: Want) -> Iterator[tuple[Host, Runtime]]:
    for host in _hosts(site, want):
        for runtime in host.registry:
            if runtime.name in host.runtimes and want.runtime in (None, runtime.name):
                yield host, runtime


def _is_coming(host: Host, name: str) -> bool:
    """Whether the host's agent has told of this runtime since it joined last: it is about to join with it."""
    runtime = host.runtime(name)
    return runtime is not None and runtime.seq > host.joined_seq


def _on_devices(site: Site, want: Want, runtimes: list[tuple[Host, Runtime]]) -> list[Option] | Infeasible:
    found: list[Option] = []
    named: list[Device] = []
    too_small: list[Device] = []
    for host, runtime in runtimes:
        for device_id in runtime.devices or host.devices:
            device = site.devices.get(device_key(host.name, device_id))
            if device is None or device_id not in host.devices or want.device not in (None, device_id):
                continue
            if want.place not in ("any", device.kind):
                continue
            named.append(device)
            if _never_fits(want, device):
                too_small.append(device)
                continue
            found.append(Option(host, runtime, device))
    if want.gpus > 1:
        found = _of_several(found, want.gpus)
        if not found and named and not too_small:
            most = max(len({each.id for each in named if each.host == host.name}) for host, _ in runtimes)
            detail = f"more than the runtimes of any host have; the most are {most}"
            return Infeasible(Reason.NEED_EXCEEDS_DEVICES, "need.gpus", detail, str(want.gpus))
    if found:
        return found
    if too_small and len(too_small) == len(named):
        largest = max(too_small, key=lambda device: device.total_mb or 0)
        usable = (largest.total_mb or 0) - largest.headroom_mb
        detail = f"more than any device has even when empty; the largest is {largest.key} with {usable} MB"
        return Infeasible(Reason.NEED_EXCEEDS_DEVICES, "need.vram_mb", detail, str(want.vram_mb))
    if want.device is not None and want.host is not None:
        known = site.hosts[want.host].devices
        detail = f"the host's runtimes use no such device; its devices: {_some(known)}"
        return Infeasible(Reason.UNKNOWN_DEVICE, "device", detail, want.device)
    if want.place != "any" and any(host.devices for host, _ in runtimes):
        return Infeasible(Reason.UNKNOWN_DEVICE, "place", f"no {want.place} device runs this model", want.place)
    return []


def _of_several(found: list[Option], gpus: int) -> list[Option]:
    """One option for each runtime with enough GPUs: which of them are taken is settled when the job is sent."""
    pools: dict[tuple[str, str], list[Option]] = {}
    for option in found:
        if option.device.kind == "gpu":
            pools.setdefault((option.host.name, option.runtime.name), []).append(option)
    several: list[Option] = []
    for pool in pools.values():
        if len(pool) >= gpus:
            devices = tuple(sorted((option.device for option in pool), key=lambda device: device.id))
            several.append(Option(pool[0].host, pool[0].runtime, devices[0], devices, gpus))
    return several


def _never_fits(want: Want, device: Device) -> bool:
    """Whether the need is larger than the device even when empty. Unknown on either side is not a no."""
    if want.vram_mb is None or device.total_mb is None:
        return False
    return want.vram_mb > device.total_mb - device.headroom_mb


def _some(names: Iterable[str], limit: int = 10) -> str:
    known = sorted(names)
    if not known:
        return "none"
    more = f" and {len(known) - limit} more" if len(known) > limit else ""
    return ", ".join(known[:limit]) + more
