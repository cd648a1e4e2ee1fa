"""Tasks end, also those that lost a cancel."""

from __future__ import annotations

import asyncio

import pytest

from gpukeeper.events import tasks
from gpukeeper.events.tasks import end_all


async def test_a_task_that_loses_its_first_cancel_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_AGAIN_S", 0.001)
    lost: list[str] = []

    async def loses_one() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            lost.append("once")
        await asyncio.Event().wait()

    running = [asyncio.create_task(loses_one()), asyncio.create_task(asyncio.Event().wait())]
    await asyncio.sleep(0)
    await end_all(running)

    assert lost == ["once"]
    assert all(task.cancelled() for task in running)


async def test_what_has_ended_already_is_left_as_it_is() -> None:
    done = asyncio.create_task(asyncio.sleep(0, "result"))
    await done
    await end_all([done])

    assert done.result() == "result"
    await end_all([])
