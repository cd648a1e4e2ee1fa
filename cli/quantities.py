"""Durations, ages and sizes in words. Pure."""

from __future__ import annotations

from datetime import UTC, datetime


def duration(seconds: float | None) -> str:
    """``0.42 s``, ``12.3 s``, ``3 min 05 s``, ``2 h 07 min``, ``4 d 03 h``; ``?`` for an unknown one."""
    if seconds is None:
        return "?"
    seconds = max(seconds, 0.0)
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600:02d} h"


def limit(seconds: float) -> str:
    """A configured duration: ``60 s``, ``10 min``, ``24 h``."""
    for size, unit in ((86_400 * 2, "d"), (3600, "h"), (60, "min")):
        per = 86_400 if unit == "d" else size
        if seconds >= size and seconds % per == 0:
            return f"{seconds / per:g} {unit}"
    return f"{seconds:g} s"


def moment(stored_ns: int) -> str:
    """RFC 3339 in UTC with milliseconds."""
    return datetime.fromtimestamp(stored_ns / 1e9, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def clock_time(stored_ns: int) -> str:
    """The time of day where the reader is, with milliseconds."""
    return datetime.fromtimestamp(stored_ns / 1e9, UTC).astimezone().strftime("%H:%M:%S.%f")[:-3]


def megabytes(count: int | None) -> str:
    """``812 MB`` or ``23.9 GB`` (of 2^20 and 2^30 bytes); ``?`` for an unknown one."""
    if count is None:
        return "?"
    return f"{count} MB" if count < 10_000 else f"{count / 1024:.1f} GB"


def size(count: int) -> str:
    """Bytes: ``512 bytes``, ``64.0 KiB``, ``2.0 MiB``."""
    if count < 10_240:
        return f"{count} bytes"
    return f"{count / 1024:.1f} KiB" if count < 1_048_576 else f"{count / 1_048_576:.1f} MiB"
