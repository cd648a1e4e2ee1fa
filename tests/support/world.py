"""A host's cards and runtimes with a truth of their own, in virtual time, and what may go wrong with each of them.

They know what is really held where. What the agent may see of it (readings, looks) and what it asks for (loads,
releases, runs) goes through here, so that :mod:`support.worldchecks` can hold both against the truth.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from datetime import datetime
from typing import Literal, Protocol

import msgspec

from gpukeeper.agents.config import AgentConfig, RuntimeConfig
from gpukeeper.agents.devices.inventory import Inventory
from gpukeeper.agents.runtimes.port import Done, PullProgress, RuntimeFailure, Signs, Token
from gpukeeper.capacity.device import Device
from gpukeeper.events.instants import parse_utc, utc_text
from gpukeeper.events.modelnames import find_resident
from gpukeeper.events.readings import (
    Activity,
    DeviceReading,
    DeviceState,
    ProcessUse,
    Releases,
    ResidentModel,
    RuntimeReading,
)
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import JobResult, Task, Work
from support.virtual_time import now

MB = 1024 * 1024

#: What a runtime makes of a wish to let go: it does; late; a part; it says so and keeps it, or keeps the row as well;
#: it refuses; it never answers, and does it later; it breaks in a way that nobody foresaw.
ReleaseMode = Literal["ok", "late", "part", "lie", "stuck", "fail", "hang", "break"]
#: What becomes of a load: it works, fails half-way, takes more or less than anybody said.
LoadMode = Literal["ok", "fail", "more", "less"]
#: What a look shows: all; it fails; it does not say what is held; a row is missing; whether it works is not said.
LookMode = Literal["ok", "down", "mute", "row_missing", "activity_unknown"]


class Watcher(Protocol):
    """Who holds what is asked against the rules, as it is asked."""

    def load_asked(self, runtime: WorldRuntime, model: str) -> None: ...
    def load_over(self, runtime: WorldRuntime) -> None: ...
    def release_asked(self, runtime: WorldRuntime, model: str | None) -> None: ...
    def release_over(self, runtime: WorldRuntime) -> None: ...
    def run_asked(self, runtime: WorldRuntime, model: str) -> None: ...


class Given(msgspec.Struct, frozen=True):
    """A reading or a look as it was given out: when it began, and when it was there (the loop's clock)."""

    begun_at: datetime
    there_s: float
    reading: DeviceReading | RuntimeReading


class WorldCard:
    """One device and its truth."""

    def __init__(self, device: Device, total_mb: int) -> None:
        self.device = device
        self.total_mb = total_mb
        #: By (owner, what): registered runtimes by their names, anybody else by another one.
        self.held: dict[tuple[str, str], int] = {}
        self.state: DeviceState = "healthy"
        self.read_s = 0.0
        self.given: list[Given] = []

    @property
    def free_mb(self) -> int:
        return self.total_mb - sum(self.held.values())

    def held_by(self, owner: str) -> int:
        return sum(mb for (name, _), mb in self.held.items() if name == owner)

    def reading(self) -> DeviceReading:
        known = self.state == "healthy"
        return DeviceReading(
            device=self.device.id,
            source="nvml",
            read_at=utc_text(now()),
            state=self.state,
            error=None if known else "scripted",
            total_mb=self.total_mb if known else None,
            used_mb=self.total_mb - self.free_mb if known else None,
            free_mb=self.free_mb if known else None,
            processes=tuple(
                ProcessUse(pid=1000 + number, used_mb=self.held_by(owner), container=owner)
                for number, owner in enumerate(sorted({owner for owner, _ in self.held}))
            )
            if known
            else None,
        )


class WorldInventory(Inventory):
    """The devices of the host, read as slowly as they are."""

    def __init__(self, cards: list[WorldCard]) -> None:
        super().__init__(AgentConfig(host="h1", find_devices=False), now=now)
        self.cards = {card.device.id: card for card in cards}

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(card.device for card in self.cards.values())

    async def find(self) -> tuple[Device, ...]:
        return self.devices

    async def read(self, device_id: str) -> DeviceReading:
        card = self.cards[device_id]
        reading = card.reading()
        await asyncio.sleep(card.read_s)
        card.given.append(Given(parse_utc(reading.read_at), asyncio.get_running_loop().time(), reading))
        return reading

    async def read_all(self) -> dict[str, DeviceReading]:
        return dict(zip(self.cards, await asyncio.gather(*(self.read(each) for each in self.cards)), strict=True))


class WorldRuntime:
    """One registered runtime under the contract of ``port.Provider``."""

    loads_models = True
    reports_vram = True
    pulls = False

    def __init__(
        self, config: RuntimeConfig, releases: Releases, cards: list[WorldCard], sizes: dict[str, int]
    ) -> None:
        self.config = config
        self.releases: Releases = releases
        self.cards = [card for card in cards if not config.devices or card.device.id in config.devices]
        self.sizes = sizes
        self.watcher: Watcher | None = None
        #: By model: on which card.
        self.sits: dict[str, WorldCard] = {}
        self.kept: set[str] = set()
        self.release_mode: ReleaseMode = "ok"
        self.load_mode: LoadMode = "ok"
        self.look_mode: LookMode = "ok"
        self.look_s = 0.0
        self.load_s = 2.0
        self.run_s = 2.0
        self.foreign_until_s = 0.0
        self.loading = 0
        self.working = 0
        #: When it worked for the agent last, by the loop's clock.
        self.worked_s = -1.0
        self.given: list[Given] = []
        #: What went away behind the agent's back.
        self.went_by_itself: set[str] = set()
        self._orphans = 0

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def activity(self) -> Activity:
        return "busy" if self.working or asyncio.get_running_loop().time() < self.foreign_until_s else "idle"

    def put(self, model: str, card: WorldCard, mb: int | None = None) -> None:
        """The model sits there."""
        self.sits[model] = card
        card.held[self.name, model] = self.sizes[model] if mb is None else mb

    def drop(self, model: str) -> None:
        """The model is gone, and so is what it held."""
        card = self.sits.pop(model, None)
        if card is not None:
            card.held.pop((self.name, model), None)

    def heal(self) -> None:
        """Nothing is wrong with it any more; what it failed to give back is given back."""
        self.release_mode, self.load_mode, self.look_mode = "ok", "ok", "ok"
        self.foreign_until_s = 0.0
        for card in self.cards:
            for key in [key for key in card.held if key[0] == self.name and key[1].startswith("left over")]:
                del card.held[key]

    # --- looks

    def _reading(self, *, with_activity: bool) -> RuntimeReading:
        down = self.look_mode == "down"
        rows = [
            ResidentModel(
                model=model,
                size_bytes=card.held[self.name, model] * MB,
                vram_bytes=card.held[self.name, model] * MB,
                pinned=model in self.kept,
            )
            for model, card in sorted(self.sits.items())
        ]
        if self.look_mode == "row_missing" and rows:
            rows.pop()
        activity = self.activity if with_activity and self.look_mode != "activity_unknown" and not down else "unknown"
        return RuntimeReading(
            runtime=self.name,
            read_at=utc_text(now()),
            healthy=not down,
            activity=activity,
            resident=None if down or self.look_mode == "mute" else tuple(rows),
            models=tuple(self.sizes),
            error="scripted" if down else None,
        )

    async def look(self) -> RuntimeReading:
        reading = self._reading(with_activity=True)
        await asyncio.sleep(self.look_s)
        self.given.append(Given(parse_utc(reading.read_at), asyncio.get_running_loop().time(), reading))
        return reading

    async def residency(self) -> RuntimeReading:
        reading = self._reading(with_activity=False)
        await asyncio.sleep(self.look_s)
        return reading

    async def signs(self, model: str) -> Signs:
        await asyncio.sleep(self.look_s)
        return Signs(activity=self.activity, resident=model in self.sits)

    def find(self, reading: RuntimeReading, model: str) -> ResidentModel | None:
        return find_resident(reading.resident or (), model)

    async def model_bytes(self, model: str) -> int | None:
        return self.sizes[model] * MB

    def load_options(self, work: Work) -> str:
        return ""

    # --- work

    async def load(self, model: str, *, on_cpu: bool, work: Work | None = None) -> None:
        assert self.watcher is not None
        self.watcher.load_asked(self, model)
        self.loading += 1
        self.working += 1
        mode, key = self.load_mode, f"{model} (loading)"
        card = max(self.cards, key=lambda each: each.free_mb)
        try:
            await asyncio.sleep(self.load_s / 2)
            mb = self.sizes[model] * {"more": 120, "less": 70}.get(mode, 100) // 100
            card.held[self.name, key] = max(0, min(mb // 2, card.free_mb))
            await asyncio.sleep(self.load_s / 2)
            del card.held[self.name, key]
            if mode == "fail" or card.free_mb < mb:
                raise RuntimeFailure(Reason.LOAD_FAILED, "out of memory")
            self.drop(model)
            self.went_by_itself.discard(model)
            self.put(model, card, mb)
        finally:
            card.held.pop((self.name, key), None)
            self._worked()
            self.loading -= 1
            self.watcher.load_over(self)

    async def run(
        self, model: str, task: Task, work: Work, *, on_cpu: bool, keep_alive_s: int | None = None
    ) -> AsyncGenerator[Token | Done]:
        assert self.watcher is not None
        self.watcher.run_asked(self, model)
        self.working += 1
        try:
            await asyncio.sleep(self.run_s / 2)
            yield Token("text")
            await asyncio.sleep(self.run_s / 2)
            yield Done(JobResult(text="text"))
        finally:
            self._worked()

    def _worked(self) -> None:
        self.working -= 1
        self.worked_s = asyncio.get_running_loop().time()

    async def release(self, model: str | None) -> None:
        assert self.watcher is not None
        self.watcher.release_asked(self, model)
        mode, loop = self.release_mode, asyncio.get_running_loop()
        models = list(self.sits) if model is None else [model]
        try:
            match mode:
                case "ok":
                    await asyncio.sleep(0.01)
                    self._let_go(models)
                case "late":
                    loop.call_later(3.0, self._let_go_late, models)
                case "part" | "lie":
                    self._let_go(models, kept_percent=100 if mode == "lie" else 40)
                case "stuck":
                    return
                case "fail":
                    raise RuntimeFailure(Reason.RUNTIME_UNREACHABLE, "it would not")
                case "hang":
                    loop.call_later(30.0, self._let_go_late, models)
                    await asyncio.sleep(100_000)
                case "break":
                    raise ValueError("nobody foresaw that")
        finally:
            self.watcher.release_over(self)

    def _let_go(self, models: list[str], *, kept_percent: int = 0) -> None:
        for model in models:
            card = self.sits.get(model)
            if card is None:
                continue
            mb = card.held[self.name, model] * kept_percent // 100
            self.drop(model)
            if mb:
                self._orphans += 1
                card.held[self.name, f"left over {self._orphans}"] = mb

    def _let_go_late(self, models: list[str]) -> None:
        self.went_by_itself.update(models)
        self._let_go(models)

    async def pull(self, model: str) -> AsyncGenerator[PullProgress]:
        raise RuntimeFailure(Reason.MODEL_MISSING, f"no pull of {model} was scripted")
        yield

    async def close(self) -> None:
        return
