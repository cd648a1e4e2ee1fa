"""GPUs of the stub driver, for agents in processes of their own, and an Ollama whose models show on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from support.nvml_stub import MB as MB
from support.nvml_stub import Gpu, NvmlStub, Slice
from support.ollama import FakeOllama

#: What a driver keeps for itself on an empty card.
IDLE_MB = 300


def offer_driver(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let programs that are started from now on find the stub where they look for the driver's library."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))


class Cards:
    """The GPUs of one host, as :attr:`gpus` has them without the models that the Ollama holds."""

    def __init__(self, nvml: NvmlStub, *gpus: Gpu) -> None:
        self._nvml = nvml
        self.gpus = list(gpus)
        self.ollama = FakeOllama()
        self.ollama.count_prompts = True
        self.ollama.on_vram = self._follow
        #: The GPU or slice that the Ollama loads onto and unloads from.
        self.onto = gpus[0].uuid
        #: GPUs that the next model is spread over evenly; empty: it goes onto one.
        self.spread: tuple[str, ...] = ()
        #: What the Ollama holds is listed as this process's, where the driver lists processes.
        self.pid: int | None = None
        self._held_mb: Counter[str] = Counter()
        #: What another runtime holds, by GPU.
        self._others_mb: Counter[str] = Counter()
        self.show()

    def show(self) -> None:
        """Tell the driver's callers, as one step."""
        self._nvml.host(*(self._with_models(gpu) for gpu in self.gpus))

    def gpu(self, uuid: str) -> Gpu:
        return next(gpu for gpu in self.gpus if gpu.uuid == uuid)

    def runner_dies(self) -> None:
        """The Ollama's runner ends: its answers break off, and what it held is gone."""
        for held in self.ollama.loaded.values():
            for exchange in list(held.requests):
                exchange.drop()
        self.ollama.loaded.clear()
        self._held_mb.clear()
        self.show()

    def holds(self, uuid: str, mb: int) -> None:
        """Another runtime holds so much of this GPU now."""
        self._others_mb[uuid] = mb
        self.show()

    def _follow(self, vram_bytes: int) -> None:
        change_mb = vram_bytes // MB - self._held_mb.total()
        places = self.spread or (self.onto,)
        for place in places:
            self._held_mb[place] += change_mb // len(places)
        if change_mb < 0:
            self.spread = ()
        self.show()

    def _with_models(self, gpu: Gpu) -> Gpu:
        mig = gpu.mig and {place: replace(part, memory=self._left(part)) for place, part in gpu.mig.items()}
        return replace(gpu, memory=self._left(gpu), mig=mig, compute=self._listed(gpu))

    def _listed(self, gpu: Gpu) -> str | None:
        held_mb = self._held_mb[gpu.uuid]
        if self.pid is None or not held_mb:
            return gpu.compute
        return " ".join((f"{self.pid}:{held_mb * MB}:none", *([gpu.compute] if gpu.compute else [])))

    def _left(self, part: Gpu | Slice) -> tuple[int, int] | str | None:
        if not isinstance(part.memory, tuple):
            return part.memory
        total_mb, free_mb = part.memory
        return total_mb, free_mb - self._held_mb[part.uuid] - self._others_mb[part.uuid]


@asynccontextmanager
async def cards(nvml: NvmlStub, *gpus: Gpu) -> AsyncGenerator[Cards]:
    """These GPUs, with an Ollama that serves while the block runs."""
    made = Cards(nvml, *gpus)
    async with made.ollama:
        yield made
