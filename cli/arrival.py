"""Waits for the parts of a site that is just starting. Unbounded: the caller has the bound."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import nats.errors

from gpukeeper.cli.livesite import LiveSite
from gpukeeper.cli.session import Session
from gpukeeper.events import subjects
from gpukeeper.events.errors import LogUnavailable

_LOOK_AGAIN_S = 0.05


async def until_log(session: Session) -> None:
    """Wait for the scheduler of a new site to create the log."""
    while True:
        try:
            await session.log.last_seq()
        except LogUnavailable:
            await asyncio.sleep(_LOOK_AGAIN_S)
        else:
            return


async def until_joined(session: Session, live: LiveSite, host: str) -> None:
    """Wait until the agent that answers for ``host`` is the one that speaks for it by the log, and has a pulse."""
    while not await _joined(session, live, host):
        await asyncio.sleep(_LOOK_AGAIN_S)


async def _joined(session: Session, live: LiveSite, host: str) -> bool:
    known = live.site.hosts.get(host)
    if known is None or known.left or host not in live.heard:
        return False
    try:
        answer = await session.connection.client.request(subjects.agent_ping(host), b"", timeout=1)
        said: dict[str, Any] = msgspec.json.decode(answer.data, type=dict[str, Any])
    except (TimeoutError, nats.errors.Error, msgspec.MsgspecError):
        return False
    return said.get("instance_id") == known.instance_id
