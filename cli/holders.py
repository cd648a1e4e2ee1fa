"""Who holds a device's memory: the parts that a bar shows, their figures, and the bar in letters. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from gpukeeper.capacity.reclaim import unmanaged_mb
from gpukeeper.cli.devicewords import owner
from gpukeeper.cli.evidence import HostEvidence
from gpukeeper.cli.quantities import duration, megabytes
from gpukeeper.projections.device import Device
from gpukeeper.projections.host import is_pinned

#: ``job``: a runtime on which a job of ours loads or runs. ``reserved``: promised to such a job, and not yet in the
#: reading. ``busy``, ``idle`` and ``unsure``: a registered runtime, by what it does. ``unmanaged``: nobody registered.
#: ``unknown``: in use, and nobody can tell by whom; or all of a device that could not be read.
Kind = Literal["job", "reserved", "busy", "idle", "unsure", "unmanaged", "unknown", "free"]

LETTERS: dict[Kind, str] = {
    "job": "J",
    "reserved": "r",
    "busy": "B",
    "idle": "I",
    "unsure": "A",
    "unmanaged": "u",
    "unknown": "?",
    "free": ".",
}
LEGEND = "J our jobs  r reserved  B busy, I idle, A active or not: nobody can tell  u unmanaged  ? unknown  . free"


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Some of a device's memory, and who holds it. ``mb`` is None where nobody can tell how much."""

    kind: Kind
    mb: int | None
    runtime: str = ""
    model: str | None = None
    #: Of a runtime that does nothing: for how long that is proven.
    idle_s: float | None = None
    pinned: bool = False
    jobs: tuple[str, ...] = ()


def parts(evidence: HostEvidence, device: Device) -> tuple[Part, ...]:
    """The parts in the order of the bar; together they are the whole of what the reading shows."""
    reading = evidence.reading(device)
    if reading.state != "healthy" or reading.total_mb is None or reading.free_mb is None:
        return (Part(kind="unknown", mb=device.total_mb if reading.total_mb is None else reading.total_mb),)
    pins = {runtime.name: runtime.pins for runtime in evidence.registered()}
    owners = evidence.owners(device)
    found: list[Part] = []
    for each in owners:
        if each.on_device is False or (each.on_device is None and not each.held_mb) or each.held_mb == 0:
            continue
        jobs = tuple(job.id for name, job in evidence.jobs if name == each.runtime)
        working: Kind = "busy" if each.activity == "busy" else "idle" if each.idle_s is not None else "unsure"
        found.append(
            Part(
                kind="job" if jobs else working,
                mb=each.held_mb,
                runtime=each.runtime,
                model=each.model,
                idle_s=each.idle_s,
                pinned=each.pinned or is_pinned(pins.get(each.runtime, ()), each.model),
                jobs=jobs,
            )
        )
    nobodys_mb = unmanaged_mb(reading, owners)
    used_mb = reading.total_mb - reading.free_mb if reading.used_mb is None else reading.used_mb
    if nobodys_mb is not None:
        found.append(Part(kind="unmanaged", mb=nobodys_mb))
    else:
        # Some owner holds an unknown part of this.
        found.append(Part(kind="unknown", mb=max(used_mb - sum(part.mb or 0 for part in found), 0)))
    reserved_mb = min(evidence.reserved_mb(device, reading), max(reading.free_mb, 0))
    found.append(Part(kind="reserved", mb=reserved_mb, jobs=tuple(claim.job for claim in device.claims)))
    found.append(Part(kind="free", mb=max(reading.free_mb - reserved_mb, 0)))
    order: tuple[Kind, ...] = tuple(LETTERS)
    return tuple(sorted((part for part in found if part.mb != 0), key=lambda part: order.index(part.kind)))


def bar(shown: Iterable[Part], width: int) -> str:
    """``width`` letters, as many for each part as it holds of the whole; at least one for whatever holds anything."""
    sizes = [(LETTERS[part.kind], part.mb) for part in shown if part.mb]
    total_mb = sum(mb for _, mb in sizes)
    if not total_mb or width < 1:
        return LETTERS["unknown"] * max(width, 0)
    cells = [max(round(mb * width / total_mb), 1) for _, mb in sizes]
    # What rounding took or gave too much, the largest give or get.
    while sum(cells) != width:
        step = 1 if sum(cells) < width else -1
        largest = max(range(len(cells)), key=lambda place: cells[place])
        if cells[largest] + step < 0:
            break
        cells[largest] += step
    return "".join(letter * count for (letter, _), count in zip(sizes, cells, strict=True))


def in_words(shown: Sequence[Part]) -> str:
    """Each part with its figure."""
    return "; ".join(_part_words(part) for part in shown)


def _part_words(part: Part) -> str:
    size = megabytes(part.mb)
    pinned = ", pinned" if part.pinned else ""
    jobs = f" for {', '.join(part.jobs)}" if part.jobs else ""
    match part.kind:
        case "job":
            return f"{owner(part.runtime, part.model)} {size}{jobs}{pinned}"
        case "busy":
            return f"{owner(part.runtime, part.model)} {size}, busy{pinned}"
        case "idle":
            return f"{owner(part.runtime, part.model)} {size}, idle {duration(part.idle_s)}{pinned}"
        case "unsure":
            return f"{owner(part.runtime, part.model)} {size}, nobody can tell whether it works{pinned}"
        case "reserved":
            return f"reserved {size}{jobs}"
        case "unknown":
            return f"{size} of which nobody can tell who holds it"
        case _:
            return f"{part.kind} {size}"
