"""Who holds memory on a device, made of what is known of each registered runtime. Pure.

The scheduler makes owners of heartbeats, the agent of live looks, the preview of either: the same rules decide for all.
What a runtime does not say stays unknown, and an owner of unknown holdings is never let go.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from gpukeeper.capacity.reclaim import Owner
from gpukeeper.events.device import Considered
from gpukeeper.events.instants import parse_utc
from gpukeeper.events.modelnames import canonical
from gpukeeper.events.readings import Activity, Holding, Releases, ResidentModel, RuntimeReading
from gpukeeper.events.reasons import Reason
from gpukeeper.projections.host import ALL, Runtime

_MB = 1024 * 1024


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one registered runtime."""

    runtime: str
    releases: Releases
    grace_s: float
    #: All devices that it may use, by id: those that its registry entry names, or all of the host.
    devices: tuple[str, ...]
    #: The newest look; None where there was none.
    reading: RuntimeReading | None = None
    #: :meth:`gpukeeper.capacity.idleness.Idleness.idle_s` at the time of the decision.
    idle_s: float | None = None
    #: Jobs of ours there, on whichever device and model, from the claim until the end.
    jobs: int = 0
    #: The runtime is being made to load something, a fetch included.
    loading: bool = False
    #: What is pinned, by model; None stands for whatever it holds.
    pins: tuple[str | None, ...] = ()


def tenant_by_beat(
    runtime: Runtime, look: RuntimeReading | None, *, devices: tuple[str, ...], jobs: int, loading: bool = False
) -> Tenant:
    """The runtime as its registry entry and its agent's last heartbeat show it.

    Args:
        runtime: as it is registered.
        look: from the heartbeat; None where that does not tell of it.
        devices: all of the host.
        jobs: that were sent to it and have not ended.
        loading: whether one of them is being loaded.
    """
    releases: Releases = runtime.releases if runtime.releases in ("model", "all") else "none"
    return Tenant(
        runtime=runtime.name,
        releases=releases,
        grace_s=runtime.idle_grace_s,
        devices=runtime.devices or devices,
        reading=look,
        idle_s=told_idle_s(look),
        jobs=jobs,
        loading=loading,
        pins=tuple(None if pin == ALL else pin for pin in runtime.pins),
    )


def told_idle_s(look: RuntimeReading | None) -> float | None:
    """The idleness that an agent had proven when it looked, in seconds; None where it had not."""
    if look is None or not look.healthy or look.activity != "idle" or look.idle_since is None:
        return None
    try:
        return max((parse_utc(look.read_at) - parse_utc(look.idle_since)).total_seconds(), 0.0)
    except ValueError:
        return None


def owners_on(device: str, tenants: Iterable[Tenant]) -> tuple[Owner, ...]:
    """The owners of memory on ``device``, each (runtime, model) once.

    A runtime that gives back one model at a time is one owner for each model that it holds, and one more for the rest
    of what its processes hold (which stays); any other runtime is one owner.
    """
    found: list[Owner] = []
    for tenant in tenants:
        reading = tenant.reading
        if tenant.releases == "model" and reading is not None and reading.healthy and reading.resident:
            found += _by_model(device, tenant, reading, reading.resident)
        else:
            found.append(_whole(device, tenant))
    return tuple(found)


def why_stays(considered: Iterable[Considered]) -> tuple[str, ...]:
    """Who stays and why, in words: one for each owner that holds something on the device, as far as anybody knows."""
    found: list[str] = []
    for each in considered:
        if each.kept is None or (each.kept is Reason.OTHER_DEVICE and each.held_mb == 0):
            continue
        name = each.runtime if each.model is None else f"{each.runtime}/{each.model}"
        held = "an unknown amount" if each.held_mb is None else f"{each.held_mb} MB"
        found.append(f"{name} holds {held} and stays: {each.detail} ({each.kept})")
    return tuple(found)


def _whole(device: str, tenant: Tenant) -> Owner:
    reading = tenant.reading if tenant.reading is not None and tenant.reading.healthy else None
    resident = None if reading is None else reading.resident
    held_mb, on_device = _held_by_runtime(device, tenant, reading)
    return _owner(
        tenant,
        model=None,
        held_mb=held_mb,
        on_device=on_device,
        # Everything goes at once, or nothing does: one pin keeps it all.
        pinned=bool(tenant.pins) or any(row.pinned for row in resident or ()),
        stopping=False,
    )


def _by_model(device: str, tenant: Tenant, reading: RuntimeReading, resident: tuple[ResidentModel, ...]) -> list[Owner]:
    here_mb, here = _held_by_runtime(device, tenant, reading)
    pins = {None if pin is None else canonical(pin) for pin in tenant.pins}
    alone = here is True and len(_sits_on(tenant, reading)) == 1
    # What its processes hold here is all of the one model, also of one that is spread over several devices.
    sole = sum(row.vram_bytes != 0 for row in resident) == 1
    found: dict[str, Owner] = {}
    for row in resident:
        held_mb = row.vram_bytes // _MB if row.vram_bytes is not None and (alone or row.vram_bytes == 0) else None
        if held_mb is not None and here_mb is not None:
            # Its processes hold no more than that in all, whatever it says.
            held_mb = min(held_mb, here_mb)
        elif held_mb is None and sole and reading.holdings is not None:
            held_mb = here_mb
        name = canonical(row.model)
        owner = _owner(
            tenant,
            model=row.model,
            held_mb=held_mb,
            on_device=here,
            pinned=row.pinned or None in pins or name in pins,
            stopping=row.stopping,
        )
        other = found.get(name)
        if other is not None:
            # Two rows under two names of one model contradict each other: how much it holds is not known.
            owner = msgspec.structs.replace(
                other,
                held_mb=None,
                pinned=owner.pinned or other.pinned,
                stopping=owner.stopping or other.stopping,
            )
        found[name] = owner
    owners = list(found.values())
    if here and here_mb is not None and all(owner.held_mb is not None for owner in owners):
        rest_mb = here_mb - sum(owner.held_mb or 0 for owner in owners)
        if rest_mb > 0:
            owners.append(
                _owner(tenant, model=None, held_mb=rest_mb, on_device=True, pinned=None in pins, stopping=False)
            )
    return owners


def _owner(
    tenant: Tenant, *, model: str | None, held_mb: int | None, on_device: bool | None, pinned: bool, stopping: bool
) -> Owner:
    reading = tenant.reading
    activity: Activity = reading.activity if reading is not None and reading.healthy else "unknown"
    return Owner(
        runtime=tenant.runtime,
        model=model,
        held_mb=held_mb,
        on_device=on_device,
        activity=activity,
        idle_s=tenant.idle_s if activity == "idle" else None,
        grace_s=tenant.grace_s,
        pinned=pinned,
        releases=tenant.releases,
        jobs_here=tenant.jobs,
        loading=tenant.loading,
        stopping=stopping,
    )


def _sits_on(tenant: Tenant, reading: RuntimeReading) -> tuple[str, ...]:
    """The devices that it holds anything on, as far as that is known; all it may use otherwise."""
    if reading.holdings is None:
        return tenant.devices
    return tuple(each.device for each in reading.holdings if each.mb != 0)


def _held_by_runtime(device: str, tenant: Tenant, reading: RuntimeReading | None) -> tuple[int | None, bool | None]:
    """What the runtime holds on ``device``, and whether it sits there at all."""
    if device not in tenant.devices:
        return 0, False
    if reading is not None and reading.holdings is not None:
        here = [each for each in reading.holdings if each.device == device and each.mb != 0]
        return (_sum(here), True) if here else (0, False)
    if reading is not None and reading.resident is not None:
        held = [row.vram_bytes for row in reading.resident]
        if not any(each != 0 for each in held):
            return 0, False
        if tenant.devices == (device,):
            known = [each // _MB for each in held if each is not None]
            return (sum(known) if len(known) == len(held) else None), True
    # A runtime with one device sits there. With several, nobody knows on which.
    return None, (True if tenant.devices == (device,) else None)


def _sum(holdings: list[Holding]) -> int | None:
    known = [each.mb for each in holdings if each.mb is not None]
    return sum(known) if len(known) == len(holdings) else None
