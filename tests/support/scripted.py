"""A runtime and cards that do what a test says, for what must happen around them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from gpukeeper.agents.config import AgentConfig, RuntimeConfig
from gpukeeper.agents.devices.inventory import Inventory
from gpukeeper.agents.runtimes.port import Done, PullProgress, RuntimeFailure, Signs, Token
from gpukeeper.capacity.device import Device
from gpukeeper.events.instants import utc_text
from gpukeeper.events.modelnames import find_resident
from gpukeeper.events.readings import Activity, DeviceReading, DeviceState, Releases, ResidentModel, RuntimeReading
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import JobResult, Task, Work
from support.virtual_time import now

MB = 1024 * 1024

#: A step of a run: a piece of text, seconds of silence, a failure, or the end.
Step = str | float | Exception | Done


def done(text: str = "hello", **fields: object) -> Done:
    return Done(JobResult(text=text, **fields))  # type: ignore[arg-type]


class Card:
    """One device and its truth."""

    def __init__(self, device: Device, *, total_mb: int = 24_000, used_mb: int = 0) -> None:
        self.device = device
        self.total_mb: int | None = total_mb
        self.used_mb = used_mb
        self.state: DeviceState = "healthy"
        self.error: str | None = None
        self.reads = 0

    def reading(self) -> DeviceReading:
        self.reads += 1
        figures = self.state == "healthy" and self.total_mb is not None
        return DeviceReading(
            device=self.device.id,
            source="nvml",
            read_at=utc_text(now()),
            state=self.state,
            error=self.error,
            total_mb=self.total_mb if figures else None,
            used_mb=self.used_mb if figures else None,
            free_mb=(self.total_mb or 0) - self.used_mb if figures else None,
            processes=(),
        )


class Cards(Inventory):
    """The devices of a host, as scripted."""

    def __init__(self, cards: Sequence[Card]) -> None:
        super().__init__(AgentConfig(host="h1", find_devices=False), now=now)
        self._cards = {card.device.id: card for card in cards}

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(card.device for card in self._cards.values())

    async def find(self) -> tuple[Device, ...]:
        return self.devices

    async def read(self, device_id: str) -> DeviceReading:
        return self._cards[device_id].reading()

    async def read_all(self) -> dict[str, DeviceReading]:
        return {name: card.reading() for name, card in self._cards.items()}


class Runtime:
    """A runtime under the contract of ``port.Provider``. Its fields are the script, and what was asked of it."""

    loads_models = True
    reports_vram = True
    pulls = False
    releases: Releases = "model"

    def __init__(self, card: Card, *, name: str = "ollama", size_mb: int = 5000, **config: object) -> None:
        self._card = card
        self._config = RuntimeConfig(name=name, provider="ollama", url="http://x", **config)  # type: ignore[arg-type]
        self.size_mb: int | None = size_mb
        self.healthy = True
        self.error: str | None = None
        #: None: it does not say what it holds.
        self.resident: list[ResidentModel] | None = []
        self.load_s = 2.0
        self.load_failure: Exception | None = None
        #: What it says of a model after having loaded it; None: all of it in VRAM, and the card shows it.
        self.row_after_load: ResidentModel | None = None
        self.card_shows_load = True
        self.steps: list[Step] = [0.5, "hel", "lo", done()]
        #: How long it stays busy after its client went away, and what it says of itself then.
        self.busy_after_cut_s = 0.0
        self.idle_word: Activity = "idle"
        self.look_s = 0.0
        self.size_s = 0.0
        self.find_failure: Exception | None = None
        self.models: tuple[str, ...] | None = ("m",)
        # What was asked of it.
        self.loads: list[str] = []
        self.runs: list[str] = []
        self.works: list[Work] = []
        self.looks = 0
        #: When each load or run was broken off.
        self.cuts: list[float] = []
        self.going = 0
        self.going_max = 0

        self.releases_asked: list[str | None] = []
        #: The share of what a release promised that the card shows, and how it fails.
        self.release_share = 1.0
        self.release_failure: Exception | None = None
        #: How long its answer to a release takes, and how long after that the card shows it.
        self.release_s = 0.0
        self.shown_after_s = 0.0
        #: Called when it is asked to let go.
        self.on_release: Callable[[str | None], object] = lambda _model: None

    @property
    def config(self) -> RuntimeConfig:
        return self._config

    def load_options(self, work: Work) -> str:
        return ""

    async def release(self, model: str | None) -> None:
        self.releases_asked.append(model)
        self.on_release(model)
        await asyncio.sleep(self.release_s)
        if self.release_failure is not None:
            raise self.release_failure
        gone = [row for row in self.resident or () if model in (None, row.model)]
        self.resident = [row for row in self.resident or () if row not in gone]
        freed_mb = sum((row.vram_bytes or 0) // MB for row in gone)
        shown_mb = int(freed_mb * self.release_share)
        asyncio.get_running_loop().call_later(self.shown_after_s, self._let_go, shown_mb)
        await asyncio.sleep(0)

    def _let_go(self, mb: int) -> None:
        self._card.used_mb -= mb

    async def pull(self, model: str) -> AsyncGenerator[PullProgress]:
        raise RuntimeFailure(Reason.MODEL_MISSING, f"no pull of {model} was scripted")
        yield

    def holds(self, model: str = "m", *, vram_mb: int | None = None, **fields: object) -> ResidentModel:
        """The model is resident, and the card shows it."""
        size_mb = self.size_mb or 0
        vram = size_mb if vram_mb is None else vram_mb
        row = ResidentModel(model=model, size_bytes=size_mb * MB, vram_bytes=vram * MB, **fields)  # type: ignore[arg-type]
        self.resident = [*(self.resident or []), row]
        self._card.used_mb += vram
        return row

    def _activity(self) -> Activity:
        now_s = asyncio.get_running_loop().time()
        if self.going or (self.cuts and now_s < self.cuts[-1] + self.busy_after_cut_s):
            return "busy"
        return self.idle_word

    async def look(self) -> RuntimeReading:
        self.looks += 1
        await asyncio.sleep(self.look_s)
        return RuntimeReading(
            runtime=self._config.name,
            read_at=utc_text(now()),
            healthy=self.healthy,
            activity=self._activity(),
            resident=None if self.resident is None else tuple(self.resident),
            models=self.models,
            error=self.error,
        )

    async def residency(self) -> RuntimeReading:
        return await self.look()

    async def signs(self, model: str) -> Signs:
        look = await self.look()
        return Signs(
            activity=look.activity, resident=None if look.resident is None else self.find(look, model) is not None
        )

    def find(self, reading: RuntimeReading, model: str) -> ResidentModel | None:
        if self.find_failure is not None:
            raise self.find_failure
        return find_resident(reading.resident or (), model)

    async def model_bytes(self, model: str) -> int | None:
        await asyncio.sleep(self.size_s)
        return None if self.size_mb is None else self.size_mb * MB

    async def load(self, model: str, *, on_cpu: bool, work: Work | None = None) -> None:
        self.loads.append(model)
        self.going += 1
        try:
            await asyncio.sleep(self.load_s)
        except asyncio.CancelledError:
            self.cuts.append(asyncio.get_running_loop().time())
            raise
        finally:
            self.going -= 1
        if self.load_failure is not None:
            raise self.load_failure
        for row in [row for row in self.resident or () if row.model == model]:
            # A load takes the place of the same model.
            self.resident = [other for other in self.resident or () if other is not row]
            self._card.used_mb -= (row.vram_bytes or 0) // MB
        if self.row_after_load is not None:
            self.resident = [*(self.resident or []), self.row_after_load]
            if self.card_shows_load:
                self._card.used_mb += (self.row_after_load.vram_bytes or 0) // MB
        else:
            used_mb = self._card.used_mb
            self.holds(model)
            if not self.card_shows_load:
                self._card.used_mb = used_mb

    async def run(
        self, model: str, task: Task, work: Work, *, on_cpu: bool, keep_alive_s: int | None = None
    ) -> AsyncGenerator[Token | Done]:
        self.runs.append(model)
        self.works.append(work)
        self.going += 1
        self.going_max = max(self.going, self.going_max)
        finished = False
        try:
            for step in self.steps:
                if isinstance(step, str):
                    yield Token(step)
                elif isinstance(step, Done):
                    finished = True
                    yield step
                elif isinstance(step, Exception):
                    finished = True
                    raise step
                else:
                    await asyncio.sleep(step)
            finished = True
        finally:
            self.going -= 1
            if not finished:
                self.cuts.append(asyncio.get_running_loop().time())

    async def close(self) -> None:
        return
