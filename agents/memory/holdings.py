"""What a runtime holds on each device, as the devices count it. Pure.

A driver that lists processes knows best. Where it lists none, or nobody can tell which are the runtime's, the runtime's
own figures stand in, and only where it can sit on one device alone. Otherwise it is unknown.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gpukeeper.events.readings import DeviceReading, Holding, ProcessUse, RuntimeReading

_MB = 1_048_576


def holdings_of(
    look: RuntimeReading,
    near: Sequence[DeviceReading],
    *,
    pids: Collection[int] | None,
    container: str | None,
    only_device: str | None,
) -> tuple[Holding, ...] | None:
    """What the runtime holds, device by device; None where that is not known.

    Args:
        look: at the runtime.
        near: readings of the devices that it may use.
        pids: its processes; None where they are unknown.
        container: the full id of the one that it runs in, where that is known: drivers' processes are told by it.
        only_device: the device that it may use, where that is one.
    """
    by_process = _by_process(near, pids, container)
    if by_process is not None:
        return by_process
    if only_device is None or not look.healthy or look.resident is None:
        return None
    held = [row.vram_bytes for row in look.resident]
    if any(each is None for each in held):
        return None
    return (Holding(device=only_device, mb=sum(each or 0 for each in held) // _MB, source="runtime"),)


def _by_process(
    near: Sequence[DeviceReading], pids: Collection[int] | None, container: str | None
) -> tuple[Holding, ...] | None:
    """By the drivers' lists of processes; None where some list is missing or the runtime's processes are unknown."""
    if not near or any(reading.processes is None for reading in near):
        return None
    if pids is None and container is None:
        return None
    found: list[Holding] = []
    seen = False
    for reading in near:
        own = [use for use in reading.processes or () if is_own(use, pids, container)]
        if own:
            seen = True
            known = [use.used_mb for use in own if use.used_mb is not None]
            found.append(Holding(device=reading.device, mb=sum(known) if len(known) == len(own) else None))
    if not seen and (pids is None or any(reading.processes for reading in near)):
        # Processes are listed, and none of them is known to be its own: it may be seen under another number.
        return None
    return tuple(found)


def is_own(use: ProcessUse, pids: Collection[int] | None, container: str | None) -> bool:
    """Whether a process on a device belongs to the runtime of these processes, or of this container by its full id.

    In a container, what listens on a port may be the engine's proxy: where both say, the container decides.
    """
    if container is not None and use.container is not None:
        return use.container == container
    return pids is not None and use.pid in pids
