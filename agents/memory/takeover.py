"""What an agent finds begun by the one before it: releases whose end nobody will tell any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from gpukeeper.events.device import ReclaimFailed
from gpukeeper.events.reasons import Reason

if TYPE_CHECKING:
    from gpukeeper.agents.room import HostRoom

_log = structlog.get_logger("gpukeeper.handoff")


async def close_releases(room: HostRoom, joined_seq: int) -> None:
    """Tell the end of every release that was begun before ``joined_seq``. What it freed, the next reading shows.

    The wish of an operator that it was for stays open, and is taken up anew.
    """
    for generation, (device, release) in tuple(room.view.releases.items()):
        if generation >= joined_seq:
            continue
        failed = ReclaimFailed(
            host=room.host,
            device=device,
            generation=generation,
            runtime=release.runtime,
            model=release.model,
            reason=Reason.HANDOFF_TIMEOUT,
            detail="the agent that asked is gone: whether it was let go of, the device's next reading shows",
            job=release.job,
        )
        await room.device_subject(device).append(failed, job=release.job)
        _log.warning("predecessors_release_ended", device=device, runtime=release.runtime, generation=generation)
