"""Hand-made heartbeats: what an agent would have said of its devices and runtimes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from gpukeeper.cli.livesite import Heard
from gpukeeper.events.instants import utc_text
from gpukeeper.events.readings import DeviceReading, Heartbeat, Holding, ResidentModel, RuntimeReading

MIB = 1024 * 1024


def at(stored_ns: int, *, before_s: float = 0.0) -> str:
    """The moment as agents write it."""
    return utc_text(datetime.fromtimestamp(stored_ns / 1e9, UTC) - timedelta(seconds=before_s))


def card(now_ns: int, *, free_mb: int | None, total_mb: int | None = 24_000, name: str = "g0", **fields: Any) -> Any:
    """A reading of a GPU."""
    used_mb = None if free_mb is None or total_mb is None else total_mb - free_mb
    given: dict[str, Any] = {"source": "nvml", "total_mb": total_mb, "used_mb": used_mb, "free_mb": free_mb}
    return DeviceReading(device=name, read_at=at(now_ns), **(given | fields))


def look(
    now_ns: int,
    name: str,
    *,
    holds_mb: int | None = None,
    idle_s: float | None = None,
    resident: dict[str, int] | None = None,
    device: str = "g0",
    **fields: Any,
) -> RuntimeReading:
    """A look at a runtime; ``resident`` has the size of each model in MB, all of it in VRAM."""
    rows = [
        ResidentModel(model=model, size_bytes=mb * MIB, vram_bytes=mb * MIB) for model, mb in (resident or {}).items()
    ]
    given: dict[str, Any] = {
        "healthy": True,
        "activity": "unknown" if idle_s is None else "idle",
        "idle_since": None if idle_s is None else at(now_ns, before_s=idle_s),
        "resident": tuple(rows),
        "holdings": None if holds_mb is None else (Holding(device=device, mb=holds_mb),),
    }
    return RuntimeReading(runtime=name, read_at=at(now_ns), **(given | fields))


def heard(
    now_ns: int,
    *,
    devices: Sequence[DeviceReading] = (),
    runtimes: Sequence[RuntimeReading] = (),
    name: str = "h1",
    ago_s: float = 1.0,
) -> dict[str, Heard]:
    """The newest heartbeat of one host, as the server got it ``ago_s`` before ``now_ns``."""
    beat = Heartbeat(
        host=name,
        boot_id=f"boot-{name}",
        instance_id=f"{name}-1",
        sent_at=at(now_ns),
        interval_s=5.0,
        devices=tuple(devices),
        runtimes=tuple(runtimes),
    )
    return {name: Heard(beat, now_ns - int(ago_s * 1e9))}
