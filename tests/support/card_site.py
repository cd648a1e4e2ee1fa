"""A site whose host has one card of the stub driver, and fakes of runtimes whose memory shows on it.

The site itself and the card are fixtures: ``support.card_fixture``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from gpukeeper.events.job import Accepted, Waiting
from gpukeeper.events.readings import Activity, Heartbeat
from gpukeeper.events.reasons import Reason
from support.comfyui_fake import FakeComfyUI
from support.nvml_stub import MB
from support.ollama import FakeOllama
from support.shared_cards import SharedCards
from support.site import Served, Site
from support.vllm_fake import FakeVllm

CARD = "GPU-aaaaaaaa-0000-0000-0000-000000000001"
TOTAL_MB = 24_564
#: What is free of an empty card: artokun/comfyui-mcp#2050.
EMPTY_MB = 22_875
GRACE_S = 1.0
#: Beyond the grace, so that whoever stays after them does not stay for that.
BEATS = 3


@asynccontextmanager
async def ollama(site: Site, card: SharedCards) -> AsyncGenerator[FakeOllama]:
    """An Ollama on the card that nobody else uses."""
    fake = FakeOllama()
    fake.count_prompts = True
    fake.on_vram = card.follow("ollama", on=CARD)
    async with fake:
        site.served.append(Served("ollama", "ollama", fake, {"sole_client": True}))
        yield fake


@asynccontextmanager
async def comfyui(site: Site, card: SharedCards, *, held_mb: int) -> AsyncGenerator[FakeComfyUI]:
    """A ComfyUI that holds so much of the card."""
    fake = FakeComfyUI()
    fake.count_prompts = True
    fake.on_held = card.follow("comfyui", on=CARD)
    fake.held = held_mb * MB
    async with fake:
        site.served.append(Served("comfyui", "comfyui", fake))
        yield fake


@asynccontextmanager
async def vllm(site: Site, card: SharedCards, *, holds_mb: int) -> AsyncGenerator[FakeVllm]:
    """A vLLM that is awake, and holds so much of the card while it is."""
    fake = FakeVllm()
    fake.count_prompts = True
    fake.on_awake = lambda awake: card.hold("vllm", holds_mb if awake else 0, on=CARD)
    fake.on_awake(True)
    async with fake:
        site.served.append(Served("vllm", "vllm", fake, {"holds_mb": holds_mb}))
        yield fake


async def begin(site: Site) -> None:
    site.scheduler()
    site.agent()
    await site.ready()


def job(prompt: str, vram_mb: int, *, model: str = "m:8b") -> dict[str, object]:
    return {"model": model, "prompt": prompt, "need": {"vram_mb": vram_mb}}


async def waits(site: Site, job_id: str, reason: Reason = Reason.CAPACITY) -> str:
    """Wait until the job waits for this reason; the scheduler's words."""
    await site.watch.until(lambda: site.watch.site.jobs[job_id].reason == reason, f"{job_id} waits: {reason}")
    told = [(fact.reason, fact.detail) for fact in site.watch.of_job(job_id, Waiting)]
    told += [(fact.waiting, fact.detail) for fact in site.watch.of_job(job_id, Accepted)]
    return next(detail for why, detail in told if why == reason)


async def beats(site: Site, runtime: str, activity: Activity, *, times: int = BEATS) -> Heartbeat:
    """Wait for so many more heartbeats that show this of the runtime."""

    def shows(beat: Heartbeat) -> bool:
        return any(each.runtime == runtime and each.activity == activity for each in beat.runtimes)

    return await site.new_heartbeat(shows, times=times)
