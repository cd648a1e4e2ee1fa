"""What one GPU is and what it measures, asked of NVML in the thread of that GPU's lane.

How memory is read, first match wins:

1. MIG is on: the GPU as a whole is not schedulable. Each slice is a device with figures of its own.
2. The part is *integrated* and NVML either gives no memory figures or gives the host's memory as the GPU's (both were
   seen on GB10, by driver): the figures are the host's `MemTotal` and `MemAvailable`, so that what the host uses is
   subtracted, and the reading says ``meminfo`` and ``unified``.
3. NVML gives no memory figures for any other part: the capacity is unknown, and the device is not schedulable.
   Host memory says nothing about a card with memory of its own.
4. Otherwise NVML's own figures.

*Integrated* needs a positive sign, because `Not Supported` alone is also what a discrete card in trouble answers: the
name of a known integrated family, or the host's page tables (ATS) together with no BAR1 window. ATS alone is not
enough: a GH200 has it and 96 GB of its own.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import msgspec

from gpukeeper.agents.devices.containers import PROC, container_of
from gpukeeper.agents.devices.hostmemory import MeminfoUnreadable, read_meminfo
from gpukeeper.agents.devices.nvml_library import Memory, NvmlFailure, NvmlLibrary, Status
from gpukeeper.capacity.device import Device
from gpukeeper.events.ids import is_token
from gpukeeper.events.readings import DeviceReading, DeviceState, ProcessUse

MIG_PARENT = "MIG is on: its slices are devices of their own"
NO_FIGURES = "NVML gives no memory figures for this device: its capacity is unknown, and unknown is never free"

_INTEGRATED_NAMES = re.compile(r"\b(GB10|Thor|Orin|Xavier|Tegra|nvgpu)\b")
_BYTES_PER_MB = 1 << 20
#: No part has this much; a figure beyond it is nonsense, not capacity.
_BYTES_MAX = 1 << 50
_TOKEN_LENGTH_MAX = 64
#: How close NVML's total must come to the host's for the two to be the same memory.
_SAME_MEMORY_RATIO = 0.05

#: What a device that fell off the bus answers. Only a handle that cannot be had makes ``UNKNOWN`` mean lost.
_LOST = frozenset({Status.GPU_IS_LOST, Status.RESET_REQUIRED, Status.GPU_NOT_FOUND})
_LOST_HANDLE = _LOST | {Status.UNKNOWN, Status.NOT_FOUND, Status.INVALID_ARGUMENT}
#: The driver as a whole is not there; says nothing about one device.
DRIVER_GONE = frozenset({Status.UNINITIALIZED, Status.DRIVER_NOT_LOADED})


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A device that NVML listed, and where to find it again."""

    device: Device
    uuid: str
    #: The driver's place of the GPU, or of the GPU that this is a slice of.
    index: int
    is_slice: bool = False
    mig_on: bool = False
    integrated: bool = False


def device_token(uuid: str) -> str:
    """A UUID as an id that may stand in a subject. Those of today's drivers already may; old MIG names hold slashes."""
    if is_token(uuid):
        return uuid
    token = re.sub(r"[^A-Za-z0-9_-]", "_", uuid)
    if 0 < len(token) <= _TOKEN_LENGTH_MAX:
        return token
    digest = hashlib.sha256(uuid.encode()).hexdigest()[:8]
    return f"{token[: _TOKEN_LENGTH_MAX - 9]}-{digest}"


def probe(library: NvmlLibrary, index: int) -> tuple[Found, ...]:
    """The GPU at ``index`` and its MIG slices.

    Raises:
        NvmlFailure: it cannot be identified.
    """
    handle = library.handle(index)
    uuid = library.uuid(handle)
    name = library.name(handle)
    mig_on = library.mig_on(handle)
    integrated = not mig_on and _is_integrated(library, handle, name)
    if mig_on:
        unschedulable = MIG_PARENT
    elif not integrated and not _has_figures(library, handle):
        unschedulable = NO_FIGURES
    else:
        unschedulable = None
    parent = Device(id=device_token(uuid), kind="gpu", name=name, index=index, unschedulable=unschedulable)
    found = [Found(device=parent, uuid=uuid, index=index, mig_on=mig_on, integrated=integrated)]
    if mig_on:
        found += [_probe_slice(library, each, parent) for each in library.slices(handle)]
    return tuple(found)


def measure(library: NvmlLibrary, found: Found, *, read_at: str, meminfo: Path, proc: Path = PROC) -> DeviceReading:
    """Read one device. Whatever fails is said in the reading, except that the driver itself is gone.

    Raises:
        NvmlFailure: with a status of :data:`DRIVER_GONE`.
    """

    def failed(state: DeviceState, error: str) -> DeviceReading:
        return DeviceReading(device=found.device.id, source="nvml", read_at=read_at, state=state, error=error)

    try:
        handle = _handle_of(library, found)
    except NvmlFailure as failure:
        _raise_if_driver_gone(failure)
        return failed("lost" if failure.status in _LOST_HANDLE else "unknown", failure.message)
    if handle is None:
        return failed("lost", f"GPU {found.index} of the driver no longer is {found.uuid}")

    try:
        memory = library.memory(handle)
    except NvmlFailure as failure:
        _raise_if_driver_gone(failure)
        if not (found.integrated and failure.status == Status.NOT_SUPPORTED):
            return failed("lost" if failure.status in _LOST else "unknown", failure.message)
        memory = None

    try:
        processes, note = _processes(library, handle, found, proc), None
    except NvmlFailure as failure:
        _raise_if_driver_gone(failure)
        if failure.status in _LOST:
            return failed("lost", failure.message)
        processes, note = None, failure.message

    try:
        # Of a card with MIG the driver tells nothing, and the whole card's figure would say nothing of a slice.
        percent = None if found.is_slice or found.mig_on else library.utilization_percent(handle)
    except NvmlFailure as failure:
        _raise_if_driver_gone(failure)
        if failure.status in _LOST:
            return failed("lost", failure.message)
        percent, note = None, note or failure.message

    if found.integrated:
        try:
            host = read_meminfo(meminfo)
        except MeminfoUnreadable as error:
            return failed("unknown", error.message)
        if memory is None or _is_host_memory(memory, host.total_mb):
            return DeviceReading(
                device=found.device.id,
                source="meminfo",
                read_at=read_at,
                total_mb=host.total_mb,
                used_mb=host.total_mb - host.available_mb,
                free_mb=host.available_mb,
                processes=processes,
                unified=True,
                utilization_percent=percent,
                error=note,
            )
    assert memory is not None
    if not 0 <= memory.free <= memory.total or not 0 < memory.total <= _BYTES_MAX:
        return failed("unknown", f"{memory.free} bytes free of {memory.total} cannot be")
    total_mb = memory.total // _BYTES_PER_MB
    free_mb = memory.free // _BYTES_PER_MB
    return DeviceReading(
        device=found.device.id,
        source="nvml",
        read_at=read_at,
        total_mb=total_mb,
        used_mb=total_mb - free_mb,
        free_mb=free_mb,
        processes=processes,
        utilization_percent=percent,
        error=note,
    )


def _probe_slice(library: NvmlLibrary, handle: object, parent: Device) -> Found:
    uuid = library.uuid(handle)
    try:
        name = library.name(handle)
    except NvmlFailure as failure:
        if failure.status not in (Status.NOT_SUPPORTED, Status.INVALID_ARGUMENT):
            raise
        name = f"{parent.name} MIG"
    assert parent.index is not None
    device = Device(
        id=device_token(uuid),
        kind="gpu",
        name=name,
        parent=parent.id,
        index=parent.index,
        unschedulable=None if _has_figures(library, handle) else NO_FIGURES,
    )
    return Found(device=device, uuid=uuid, index=parent.index, is_slice=True)


def _is_integrated(library: NvmlLibrary, handle: object, name: str) -> bool:
    if _INTEGRATED_NAMES.search(name):
        return True
    return library.shares_page_tables(handle) and not library.has_bar1(handle)


def _has_figures(library: NvmlLibrary, handle: object) -> bool:
    try:
        library.memory(handle)
    except NvmlFailure as failure:
        # Anything else may pass; the reading says what is wrong until then.
        return failure.status not in (Status.NOT_SUPPORTED, Status.FUNCTION_NOT_FOUND)
    return True


def _is_host_memory(memory: Memory, host_total_mb: int) -> bool:
    return abs(memory.total / _BYTES_PER_MB - host_total_mb) <= _SAME_MEMORY_RATIO * host_total_mb


def _handle_of(library: NvmlLibrary, found: Found) -> object | None:
    """The handle now, checked by UUID: an index alone may mean another GPU after a change."""
    handle = library.handle(found.index)
    candidates = library.slices(handle) if found.is_slice else [handle]
    for candidate in candidates:
        if library.uuid(candidate) == found.uuid:
            return candidate
    return None


def _processes(library: NvmlLibrary, handle: object, found: Found, proc: Path) -> tuple[ProcessUse, ...]:
    instance = library.gpu_instance(handle) if found.is_slice else None
    used: dict[int, int | None] = {}
    for row in library.processes(handle):
        if instance is not None and row.gpu_instance not in (None, instance):
            continue  # some drivers list the whole GPU's processes for each of its slices
        used_mb = None if row.used_bytes is None else row.used_bytes // _BYTES_PER_MB
        before = used.get(row.pid)
        # A process with several kinds of contexts is listed once for each, with the same figure.
        used[row.pid] = used_mb if before is None else max(before, used_mb or 0)
    return tuple(
        ProcessUse(pid=pid, used_mb=used_mb, container=container_of(pid, proc=proc))
        for pid, used_mb in sorted(used.items())
    )


def _raise_if_driver_gone(failure: NvmlFailure) -> None:
    if failure.status in DRIVER_GONE:
        raise failure
