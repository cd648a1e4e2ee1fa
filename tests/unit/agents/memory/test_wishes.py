"""What operators ask of an agent: each wish is answered once, in its turn on the devices that it is about."""

from __future__ import annotations

import asyncio

from gpukeeper.agents.config import AgentConfig, RuntimeConfig
from gpukeeper.agents.containers.steward import Steward
from gpukeeper.agents.memory.wishes import TURN_LIMIT_S, Wishes
from gpukeeper.events import subjects
from gpukeeper.events.reasons import Reason
from gpukeeper.events.runtime import Act, Acted
from gpukeeper.projections.host import ActWish
from support.bench import Bench
from support.scripted import Runtime
from support.scripted_engine import ScriptedEngine
from support.virtual_time import in_virtual_time


class Operated:
    """A host whose Ollama lives in a container."""

    def __init__(self) -> None:
        self.bench = Bench()
        self.engine = ScriptedEngine()
        self.engine.after = {"stop": "exited", "start": "running"}
        runtime = Runtime(self.bench.card, container="box", devices=("g0",))
        self.bench.room.tenancy.register(runtime, grace_s=300, gap_max_s=15)
        config = AgentConfig(host="h1", runtimes=(RuntimeConfig(name="ollama", provider="ollama", container="box"),))
        self.wishes = Wishes(self.bench.room, Steward(config, self.engine))

    def wants(self, act: Act, seq: int = 7) -> None:
        self.bench.view.act_wishes[seq] = ("ollama", ActWish(seq, act, "mo"))
        self.wishes.take_up()

    async def acted(self) -> list[tuple[str, bool, Reason | None]]:
        facts = await self.bench.facts(subjects.runtime("h1", "ollama"))
        return [(fact.act, fact.done, fact.reason) for fact in facts if isinstance(fact, Acted)]


@in_virtual_time
async def test_a_wish_is_carried_out_once_however_often_it_is_seen() -> None:
    host = Operated()
    host.wants("stop")
    host.wants("stop")
    await asyncio.sleep(1)

    assert await host.acted() == [("stop", True, None)]
    assert host.engine.acts == ["stop"]


@in_virtual_time
async def test_a_container_is_stopped_only_when_nobody_loads_on_its_devices() -> None:
    """The device would show what one freed and the other took as one change, and misjudge the load."""
    host = Operated()
    turn = await host.bench.room.turns.take(("g0",))
    host.wants("stop")
    await asyncio.sleep(60)
    while_it_loads = list(host.engine.acts)
    turn.leave()
    await asyncio.sleep(1)

    assert while_it_loads == []
    assert host.engine.acts == ["stop"]
    assert await host.acted() == [("stop", True, None)]


@in_virtual_time
async def test_a_job_that_comes_while_the_wish_waits_for_its_turn_keeps_the_container() -> None:
    host = Operated()
    turn = await host.bench.room.turns.take(("g0",))
    host.wants("restart")
    await asyncio.sleep(1)
    host.bench.room.tenancy.enter("ollama", 5)
    turn.leave()
    await asyncio.sleep(1)

    assert host.engine.acts == []
    assert await host.acted() == [("restart", False, Reason.OWNER_BUSY)]


@in_virtual_time
async def test_a_turn_that_never_comes_is_an_answer_and_holds_nothing() -> None:
    host = Operated()
    turn = await host.bench.room.turns.take(("g0",))
    host.wants("stop")
    await asyncio.sleep(TURN_LIMIT_S + 1)
    told = await host.acted()
    turn.leave()

    assert told == [("stop", False, Reason.OWNER_BUSY)]
    assert host.engine.acts == []
    assert not host.bench.room.turns.taken("g0")
    assert not host.bench.room.tenancy.is_releasing("ollama")
