"""A host whose agent takes memory back after a second or two, for tests of the whole path."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpukeeper.events.job import Succeeded
from gpukeeper.events.reasons import Reason
from support.cards import IDLE_MB, Cards, offer_driver
from support.nats import NatsServer
from support.nvml_stub import Gpu
from support.site import HOST, Served, Site, site_in

A = "GPU-aaaaaaaa-0000-0000-0000-000000000001"
B = "GPU-bbbbbbbb-0000-0000-0000-000000000002"
TOTAL_MB = 24_564


@asynccontextmanager
async def reclaim_site(
    folder: Path, nats_server: NatsServer, library: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[Site]:
    """A site whose host finds the GPUs that the stub of the driver lists, with a grace of a second."""
    offer_driver(library, monkeypatch)
    async with site_in(folder, nats_server.settings()) as site:
        site.devices = []
        site.sections["agent"] |= {"find_devices": True, "idle_grace_s": 1}
        yield site


async def begin(site: Site, host: Cards, **settings: object) -> None:
    """Start everything, with one Ollama that nobody else uses; ``settings`` go into its registry entry."""
    entry = {"sole_client": True, "release_timeout_s": 3, **settings}
    site.served.append(Served("ollama", "ollama", host.ollama, settings=entry))
    site.scheduler()
    site.agent()
    await site.ready()


def card(uuid: str, *, total_mb: int = TOTAL_MB, used_mb: int = IDLE_MB, **changes: object) -> Gpu:
    return Gpu(**{"uuid": uuid, "memory": (total_mb, total_mb - used_mb), **changes})  # pyright: ignore[reportArgumentType]


def job(
    model: str, prompt: str, *, on: str | None = None, vram_mb: int | None = None, **fields: object
) -> dict[str, object]:
    made: dict[str, object] = {"model": model, "prompt": prompt, **fields}
    if on is not None:
        made |= {"host": HOST, "device": on}
    if vram_mb is not None:
        made["need"] = {"vram_mb": vram_mb}
    return made


async def resident(site: Site, host: Cards, model: str, *, on: str | None = None) -> None:
    """Let one job run with the model, which stays."""
    host.onto = on or host.onto
    end = await site.run(job(model, f"brings in {model}", on=on))
    assert isinstance(end, Succeeded), end
    assert model in host.ollama.loaded


async def waits_for(site: Site, job_id: str, reason: Reason) -> None:
    await site.watch.until(lambda: site.watch.site.jobs[job_id].reason == reason, f"{job_id} waits: {reason}")


async def command(site: Site, kind: str, **data: object) -> int:
    """Send an operator's command about this host. Returns its sequence."""
    return await site.operate(kind, {"host": HOST, "reason": "tests", **data})
