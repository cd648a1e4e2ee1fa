"""The placement guard: whether a model sits where it was meant to, judged before any work. Pure.

Two sources are asked and kept apart: the runtime, which says how much of the model it put into VRAM, and the
devices, whose use of memory must agree. Figures that are missing, impossible or contradictory never pass,
whatever the other figures say. The rules stand in :func:`judge`, in order; the first that applies decides.

A runtime that may use several GPUs chooses among them by itself, or splits a model: its devices are judged together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from gpukeeper.events.readings import DeviceKind, DeviceReading, ResidentModel
from gpukeeper.events.reasons import Reason

MB = 1024 * 1024

#: The share of the claimed VRAM that the device must show: as a rise over the load or, where the model was
#: resident before it, as use. Half: allocators round, and other processes free memory while a model loads;
#: an idle card with a model "100% in VRAM" shows 3 MB (ollama#7323).
DEVICE_SHARE_MIN = 0.5
#: Readings are in whole MB and memory is given out in pages: a smaller claim cannot be seen on the device.
DEVICE_GRAIN_MB = 4

VramEvidence = Literal["runtime", "process", "none"]
DeviceEvidence = Literal["rise", "use", "not measured", "unknown"]


class Sources(msgspec.Struct, frozen=True, kw_only=True):
    """Where the figures of a verdict come from."""

    #: ``runtime``: its own word; ``process``: the device's count of what the runtime's process holds.
    vram: VramEvidence = "none"
    #: ``rise``: used memory before and after the load; ``use``: after it, where nothing had to be loaded;
    #: ``not measured``: a declared device or the CPU; ``unknown``: a reading that failed or is missing.
    device: DeviceEvidence = "unknown"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the guard found. ``reason`` is None when it passed, ``ratio`` where the figures have none."""

    passed: bool
    reason: Reason | None
    detail: str
    sources: Sources
    size_bytes: int | None = None
    vram_bytes: int | None = None
    ratio: float | None = None
    #: In use on the devices that were read, in all.
    device_before_mb: int | None = None
    device_after_mb: int | None = None
    #: The devices that could be read, by id.
    devices_read: tuple[str, ...] = ()


#: For a dispute: neither source can be believed over the other, so somebody has to look.
REMEDY = (
    "see `gpuq devices` for who holds what, then unload the model or restart the runtime; it is trusted again once the "
    "model is gone or both agree"
)


class _Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What the devices show together. ``before_mb`` is None where nothing had to be read before."""

    evidence: DeviceEvidence
    devices: tuple[str, ...] = ()
    before_mb: int | None = None
    after_mb: int | None = None
    #: What speaks for the model: the rises, or the use; and the same in words, device by device.
    seen_mb: int = 0
    shows: str = ""
    #: What could not be read, and why.
    missing: str = ""


class _Case(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one judgement, in bytes and MB, and the words for its verdicts."""

    model: str
    size: int | None
    vram: int | None
    vram_source: VramEvidence
    measured: _Measured

    @property
    def ratio(self) -> float | None:
        """The share in VRAM. A process also holds its context and buffers, so its share is limited to 1."""
        if self.size is None or self.vram is None or self.size <= 0 or self.vram < 0:
            return None
        if self.vram > self.size:
            return 1.0 if self.vram_source == "process" else None
        return self.vram / self.size

    @property
    def figures(self) -> str:
        """Both figures of the runtime, whatever they are."""
        size = "unknown" if self.size is None else f"{self.size} bytes"
        vram = "unknown" if self.vram is None else f"{self.vram} bytes"
        counted = " (what its process holds on the device)" if self.vram_source == "process" else ""
        return f"size {size}, in VRAM {vram}{counted}"

    def passes(self, detail: str) -> Verdict:
        return self._verdict(None, detail)

    def fails(self, reason: Reason, detail: str) -> Verdict:
        return self._verdict(reason, detail)

    def _verdict(self, reason: Reason | None, detail: str) -> Verdict:
        return Verdict(
            passed=reason is None,
            reason=reason,
            detail=f"{detail}: {self.figures}" + (f"; {REMEDY}" if reason is Reason.PLACEMENT_DISPUTED else ""),
            sources=Sources(vram=self.vram_source, device=self.measured.evidence),
            size_bytes=self.size,
            vram_bytes=self.vram,
            ratio=self.ratio,
            device_before_mb=self.measured.before_mb,
            device_after_mb=self.measured.after_mb,
            devices_read=self.measured.devices,
        )


def judge(
    *,
    intended: DeviceKind,
    model: str,
    resident: ResidentModel | None,
    residency_known: bool = True,
    reports_vram: bool = True,
    model_bytes: int | None = None,
    before: Sequence[DeviceReading],
    after: Sequence[DeviceReading],
    was_resident: bool,
    process_use_mb: int | None = None,
    min_ratio: float,
) -> Verdict:
    """Judge one load.

    Args:
        intended: the kind of the device that was claimed.
        model: as the job names it, for the words.
        resident: the runtime's row of the model after the load; None where it lists no such model.
        residency_known: False where the runtime did not say what it holds, which is not an empty list.
        reports_vram: whether this kind of runtime reports VRAM. Where it does, a missing figure is unknown.
        model_bytes: how large the runtime says the model is, for rows that have no size.
        before: the devices that the runtime may use, before the load.
        after: the same devices after it, read anew; the one that was claimed is the first.
        was_resident: whether the model was resident before the load, so that nothing needed to rise.
        process_use_mb: memory that the runtime's process holds on these devices, where the driver tells. It
            stands for the VRAM of a runtime that reports none. It counts context and buffers too, which makes
            it a weak proof for models of a few hundred MB.
        min_ratio: the share of the model that must be in VRAM, over 0 and at most 1.
    """
    vram = resident.vram_bytes if resident is not None else None
    # A figure that is there is judged, whoever was not expected to give it.
    reports_vram = reports_vram or vram is not None
    if not reports_vram and process_use_mb is not None:
        vram = process_use_mb * MB
    case = _Case(
        model=model,
        size=model_bytes if resident is None or resident.size_bytes is None else resident.size_bytes,
        vram=vram,
        vram_source="none" if vram is None else "runtime" if reports_vram else "process",
        measured=_measured(intended, before, after, was_resident=was_resident),
    )
    # 1. The runtime must have said that it holds the model, and that it will go on holding it.
    if not residency_known:
        return case.fails(Reason.PLACEMENT_UNKNOWN, f"the runtime did not say whether it holds {model}")
    if resident is None:
        return case.fails(Reason.PLACEMENT_UNKNOWN, f"the runtime does not list {model} after loading it")
    if resident.stopping:
        return case.fails(Reason.PLACEMENT_UNKNOWN, f"the runtime is already unloading {model}")
    # 2. On the CPU a runtime that never reports VRAM has nothing to say, and nothing may speak against it.
    if intended == "cpu" and not reports_vram and vram in (None, 0):
        return case.passes(f"{model} runs on the CPU as intended; this runtime reports no VRAM")
    # 3. Both figures must be there, and possible.
    if case.size is None or case.vram is None:
        return case.fails(Reason.PLACEMENT_UNKNOWN, f"a figure of {model} is missing")
    ratio = case.ratio
    if ratio is None:
        return case.fails(Reason.PLACEMENT_UNKNOWN, f"the figures of {model} are impossible")
    share = f"{_percent(ratio)} of {model} is in VRAM"
    # 4. Meant for the CPU: nothing may be in VRAM.
    if intended == "cpu":
        if case.vram == 0:
            return case.passes(f"{model} runs on the CPU as intended")
        return case.fails(Reason.PLACEMENT_DISPUTED, f"{share}, though it was meant for the CPU")
    # 5. Meant for the GPU: enough of it must be in VRAM, and the device must show it.
    if ratio < min_ratio:
        return case.fails(Reason.CPU_FALLBACK, f"{share}, where {_percent(min_ratio)} is required")
    return _judge_devices(case, share)


def _judge_devices(case: _Case, share: str) -> Verdict:
    """The second source. A declared device cannot be measured: the runtime's figures alone decide."""
    measured = case.measured
    if measured.evidence == "not measured":
        return case.passes(f"{share}; the device is declared and not measured")
    if measured.evidence == "unknown":
        return case.fails(Reason.PLACEMENT_UNKNOWN, f"{share}, but {measured.missing}")
    assert case.vram is not None
    needed_mb = DEVICE_SHARE_MIN * case.vram / MB
    if needed_mb < DEVICE_GRAIN_MB or measured.seen_mb >= needed_mb:
        return case.passes(f"{share}; the device agrees: {measured.shows}")
    plausible = f"{needed_mb:.0f} MB being plausible"
    if measured.missing:
        # It may sit on what could not be read.
        return case.fails(
            Reason.PLACEMENT_UNKNOWN, f"{share}, but {measured.shows}, {plausible}, and {measured.missing}"
        )
    return case.fails(Reason.PLACEMENT_DISPUTED, f"{share}, but {measured.shows}, {plausible}")


def _measured(
    intended: DeviceKind, before: Sequence[DeviceReading], after: Sequence[DeviceReading], *, was_resident: bool
) -> _Measured:
    """Add up what the devices show. What fell on one device takes nothing from what rose on another: a runtime makes
    room on one card while it loads onto the next."""
    if intended == "cpu" or (after and after[0].source == "static"):
        return _Measured(evidence="not measured")
    earlier = {} if was_resident else {reading.device: reading for reading in before}
    before_mb, after_mb, seen_mb = 0, 0, 0
    devices: list[str] = []
    words: list[str] = []
    missing: list[str] = [] if after else ["no device was read after the load"]
    for reading in after:
        used_mb = _used_mb(reading)
        first = earlier.get(reading.device)
        first_mb = 0 if was_resident else _used_mb(first)
        if used_mb is None or first_mb is None or reading.source == "static":
            missing.append(_why_missing(reading, first if used_mb is not None else reading, used_mb))
            continue
        devices.append(reading.device)
        before_mb, after_mb = before_mb + first_mb, after_mb + used_mb
        seen_mb += max(0, used_mb - first_mb)
        moved = f"has {used_mb} MB in use" if was_resident else f"went from {first_mb} MB to {used_mb} MB in use"
        words.append(f"{reading.device} {moved}")
    return _Measured(
        evidence="unknown" if not devices else "use" if was_resident else "rise",
        devices=tuple(devices),
        before_mb=before_mb if devices and not was_resident else None,
        after_mb=after_mb if devices else None,
        seen_mb=seen_mb,
        shows=", ".join(words),
        missing="; ".join(missing),
    )


def _why_missing(reading: DeviceReading, at_fault: DeviceReading | None, used_mb: int | None) -> str:
    if reading.source == "static":
        return f"{reading.device} is declared and not measured"
    when = "after" if used_mb is None else "before"
    why = (at_fault.error if at_fault is not None else None) or "no figure"
    return f"{reading.device} was not read {when} the load ({why})"


def _used_mb(reading: DeviceReading | None) -> int | None:
    """Memory in use, where the reading is one: a lost or unknown device has none, and less than 0 is none."""
    if reading is None or reading.state != "healthy" or reading.used_mb is None or reading.used_mb < 0:
        return None
    return reading.used_mb


def _percent(ratio: float) -> str:
    """Rounded down, so that what misses a limit by a little never reads as the limit."""
    return f"{int(ratio * 1000 + 1e-6) / 10:.1f}%"
