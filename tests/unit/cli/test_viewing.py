"""Who waits for a job is told why it does not start, on hand-made events."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gpukeeper.cli.exitcodes import Exit
from gpukeeper.cli.viewing import View, view_to_end
from gpukeeper.events.codec import Event, decode, encode
from gpukeeper.events.errors import WaitTimedOut
from gpukeeper.events.fact import Fact
from gpukeeper.events.job import Cancelled, Denied
from gpukeeper.events.log import Stored
from gpukeeper.events.reasons import Reason


def event(seq: int, fact: Fact) -> Event:
    body = encode(fact, event_id=str(seq), source="/tests", subject="j", time="2025-10-19T14:00:00Z")
    return decode(Stored(seq, 1, "gpuq.ev.job.j", body))


def denied(reason: Reason, attempt: int, job: str = "j") -> Denied:
    return Denied(
        job=job,
        host="box",
        device="g0",
        slot=0,
        epoch=1,
        attempt=attempt,
        route_seq=1,
        runtime="ollama",
        reason=reason,
        detail="so it is",
    )


class Heard:
    """An inbox that has heard these facts."""

    def __init__(self, *facts: Fact) -> None:
        self._events = [event(seq, fact) for seq, fact in enumerate(facts, start=1)]

    async def next(self) -> Event:
        return self._events.pop(0)

    def heard_already(self) -> list[Event]:
        return []


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("tells", [False, True])
async def test_who_waits_is_told_once_for_each_reason_why_a_device_did_not_take_the_job(
    capsys: pytest.CaptureFixture[str], streams: bool, tells: bool
) -> None:
    unknown, short = Reason.NEED_UNKNOWN, Reason.INSUFFICIENT
    facts = [denied(unknown, 1), denied(unknown, 2), denied(short, 3), denied(Reason.DRAINED, 1, job="other")]
    inbox: Any = Heard(*facts, Cancelled(job="j", actor="ann"))
    session: Any = SimpleNamespace(connection=None)

    code = await view_to_end(session, inbox, "j", View(streams=streams, tells_denials=tells), {})

    *waits, end = capsys.readouterr().err.splitlines()
    assert code == Exit.JOB_FAILED
    assert end.startswith("job j cancelled")
    assert len(waits) == (2 if tells else 0)
    assert all(line.startswith("j waits: denied on box/g0, ") for line in waits)


async def test_a_wait_that_ends_first_is_told_in_round_seconds() -> None:
    class Silent(Heard):
        async def next(self) -> Event:
            await asyncio.sleep(60)
            raise AssertionError

    inbox: Any = Silent()
    session: Any = SimpleNamespace(connection=None)

    with pytest.raises(WaitTimedOut, match=r"job j has not ended within 0\.1 s; it goes on"):
        await view_to_end(session, inbox, "j", View(timeout_s=0.0987654), {})
