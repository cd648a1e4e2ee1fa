"""Whether a runtime works, where it does not say so itself. Pure.

An Ollama never says it. What shows it from outside: jobs of ours, being its only client, or devices on which nothing
ran while no stay of a model moved on. Unknown is not idle: who has too little to go on leaves the runtime alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpukeeper.events.readings import Activity, DeviceReading, ResidentModel, RuntimeReading


def infer_activity(
    reading: RuntimeReading,
    *,
    own_jobs: int,
    sole_client: bool,
    device_readings: Sequence[DeviceReading],
    previous: RuntimeReading | None,
) -> Activity:
    """What the runtime does at the time of ``reading``.

    Args:
        reading: the newest look at it.
        own_jobs: how many jobs of this agent load or run there now.
        sole_client: whether this agent is its only client.
        device_readings: every device that it may use, read in the same look; none where that is not known.
        previous: the look before; None where there was none.
    """
    if own_jobs > 0:
        return "busy"
    if reading.activity != "unknown":
        return reading.activity
    if not reading.healthy or reading.resident is None:
        return "unknown"
    if any(row.loading for row in reading.resident):
        return "busy"
    if previous is not None and _fewer(previous.resident or (), reading.resident):
        # A busy model may be missing from a poll or two (BASTION 0.4.1): nobody can tell until they are alike again.
        return "unknown"
    if sole_client:
        return "idle"
    if len(_stays(reading.resident)) != len(reading.resident):
        # Two rows of one name contradict each other.
        return "unknown"
    if previous is None or previous.resident is None or not _rested(device_readings):
        return "unknown"
    return "idle" if _stays(previous.resident) == _stays(reading.resident) and not _leaving(reading) else "unknown"


def _fewer(before: Sequence[ResidentModel], now: Sequence[ResidentModel]) -> bool:
    """Whether a row of before is missing now."""
    names = [row.model for row in now]
    return len(now) < len(before) or any(row.model not in names for row in before)


def _rested(readings: Sequence[DeviceReading]) -> bool:
    """Whether nothing ran on any of the devices. One that does not tell may work."""
    return bool(readings) and all(one.state == "healthy" and one.utilization_percent == 0 for one in readings)


def _leaving(reading: RuntimeReading) -> bool:
    """Whether a stay is over and its model still there: it is on its way out, or works past its end."""
    return any(row.stopping for row in reading.resident or ())


def _stays(rows: Sequence[ResidentModel]) -> dict[str, str | None]:
    """How long each model stays: the end moves on when a request ends, and is another one at each look before that."""
    return {row.model: row.expires_at for row in rows}
