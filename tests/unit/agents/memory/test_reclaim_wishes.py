"""Wishes of operators to have memory freed: each is open until its last word, and answered once."""

from __future__ import annotations

import asyncio

import pytest

from gpukeeper.agents.memory.wishes import Wishes
from gpukeeper.agents.runtimes.port import RuntimeFailure
from gpukeeper.events.device import Reclaimed, ReclaimFailed, ReclaimRefused, ReclaimWanted
from gpukeeper.events.reasons import Reason
from support.tenants import GRACE_S, Tenants
from support.virtual_time import in_virtual_time


async def wish(host: Tenants, *, vram_mb: int | None = None, device: str = "g0") -> list[tuple[str, bool]]:
    """Ask for it, and let the agent answer. Each answer by its name, and whether the wish was open after it."""
    wishes = Wishes(host.room, None)
    host.room.open_slots([host.device])
    await host.put(ReclaimWanted(host="h1", device=device, command_seq=1, actor="mo", vram_mb=vram_mb))
    (seq,) = host.view.reclaim_wishes
    for _ in range(200):
        wishes.take_up()
        await asyncio.sleep(1)
    await wishes.close()
    assert not host.view.reclaim_wishes
    return [
        (type(fact).__name__, not isinstance(fact, ReclaimRefused) and fact.more)
        for fact in await host.facts(f"gpuq.ev.device.h1.{device}")
        if isinstance(fact, Reclaimed | ReclaimFailed | ReclaimRefused) and fact.wanted_seq == seq
    ]


async def rested(*held_mb: int) -> Tenants:
    host = Tenants()
    for number, mb in enumerate(held_mb):
        host.add(f"r{number}", mb)
    await host.follow()
    await host.rest(GRACE_S + 1)
    return host


@pytest.mark.parametrize(
    ("vram_mb", "told"),
    [
        (1_000, [("ReclaimRefused", False)]),
        (10_000, [("Reclaimed", False)]),
        (None, [("Reclaimed", True), ("Reclaimed", False)]),
        (23_999, [("Reclaimed", True), ("Reclaimed", False)]),
    ],
    ids=["free already", "one is enough", "all", "both are needed"],
)
@in_virtual_time
async def test_only_the_last_answer_to_a_wish_closes_it(vram_mb: int | None, told: list[tuple[str, bool]]) -> None:
    host = await rested(9_000, 8_000)

    assert await wish(host, vram_mb=vram_mb) == told


@in_virtual_time
async def test_a_wish_whose_only_owner_refuses_is_closed_by_the_refusal_that_follows() -> None:
    host = await rested(9_000)
    host.owners["r0"].release_failure = RuntimeFailure(Reason.RELEASE_FAILED, "no")

    assert await wish(host) == [("ReclaimFailed", True), ("ReclaimRefused", False)]
    assert host.asked() == ["r0/r0"]


@in_virtual_time
async def test_a_wish_that_blocks_the_device_is_closed_by_that() -> None:
    host = await rested(9_000)
    host.owners["r0"].release_share = 0.0

    assert await wish(host) == [("ReclaimFailed", False)]


@in_virtual_time
async def test_a_wish_about_a_device_that_is_not_there_is_refused() -> None:
    host = await rested(9_000)

    assert await wish(host, device="g9") == [("ReclaimRefused", False)]
    assert host.asked() == []
