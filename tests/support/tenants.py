"""A host whose runtimes hold memory of one card, in virtual time: what a handoff does there, and what it tells."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from gpukeeper.agents.memory.handoff import Made, Refused
from gpukeeper.agents.memory.release import Asker
from gpukeeper.events import subjects
from gpukeeper.events.codec import decode
from gpukeeper.events.fact import Fact
from gpukeeper.events.log import Stored
from support.bench import Bench
from support.scripted import Runtime

F = TypeVar("F", bound=Fact)

#: How long an owner must rest, in seconds.
GRACE_S = 300.0


class Tenants(Bench):
    """Make it inside a loop of virtual time, then :meth:`add` runtimes to the ``ollama`` that is there."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        #: Runtimes by name; the ``ollama`` of the bench holds nothing.
        self.owners: dict[str, Runtime] = {}
        self.runtime = self.register(Runtime(self.card, devices=("g0",)))

    def register(self, runtime: Runtime) -> Runtime:
        self.owners[runtime.config.name] = runtime
        self.room.tenancy.register(runtime, grace_s=GRACE_S, gap_max_s=15)
        return runtime

    def add(self, name: str, held_mb: int, **config: object) -> Runtime:
        """One more runtime, with a model of its own name on the card."""
        runtime = self.register(Runtime(self.card, name=name, size_mb=held_mb, **{"devices": ("g0",), **config}))
        runtime.holds(name)
        return runtime

    async def follow(self) -> None:
        """Let the host's view hear what is stored, as that of an agent does."""

        def on_stored(stored: Stored) -> None:
            self.view.apply(decode(stored))

        await self.log.follow(on_stored, after=0, subjects=subjects.followed_by_agent("h1"))

    async def rest(self, seconds: float) -> None:
        """Look at everything each second for so long."""
        await self.room.inventory.find()
        until = self.now_s + seconds
        while True:
            await self.room.observer.look_at_all(await self.room.inventory.read_all())
            if self.now_s >= until:
                return
            await asyncio.sleep(min(1.0, until - self.now_s))

    def asked(self) -> list[str]:
        """What was asked to go, runtime by runtime."""
        return [f"{name}/{model}" for name, owner in self.owners.items() for model in owner.releases_asked]

    async def make_room(self, need_mb: int | None, **asker: Any) -> Made | Refused:
        turn = await self.room.turns.take(("g0",))
        try:
            return await self.make_room_in_turn(need_mb, **asker)
        finally:
            await self.room.handoff.over("g0")
            turn.leave()

    async def device_facts(self, kind: type[F]) -> list[F]:
        return [fact for fact in await self.facts(subjects.device("h1", "g0")) if isinstance(fact, kind)]

    async def make_room_in_turn(self, need_mb: int | None, **asker: Any) -> Made | Refused:
        return await self.room.handoff.make_room(self.device, need_mb, Asker(turn_on=("g0",), **asker))
