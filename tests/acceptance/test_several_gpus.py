"""Jobs that take several GPUs at once, on the whole path: claimed on all of them in one fixed order, or on none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpukeeper.events.device import Claimed, Released
from gpukeeper.events.job import Admitted, Succeeded
from gpukeeper.events.reasons import Reason
from support.cards import IDLE_MB, Cards, cards, offer_driver
from support.nats import NatsServer
from support.nvml_stub import Gpu, NvmlStub
from support.site import HOST, Served, Site, site_in
from support.waiting import until

pytestmark = pytest.mark.processes
pytest_plugins = ["support.nvml_fixture"]

A = "GPU-aaaaaaaa-0000-0000-0000-000000000001"
B = "GPU-bbbbbbbb-0000-0000-0000-000000000002"
C = "GPU-cccccccc-0000-0000-0000-000000000003"
TOTAL_MB = 24_564


@pytest.fixture
async def site(
    tmp_path: Path, nats_server: NatsServer, nvml: NvmlStub, nvml_library: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Site]:
    offer_driver(nvml_library, monkeypatch)
    async with site_in(tmp_path, nats_server.settings()) as site:
        site.devices = []
        site.sections["agent"] |= {"find_devices": True}
        yield site


async def begin(site: Site, host: Cards) -> None:
    site.served.append(Served("ollama", "ollama", host.ollama))
    site.scheduler()
    site.agent()
    await site.ready()


async def all_given_back(site: Site) -> None:
    await site.watch.until(
        lambda: not any(device.claims for device in site.watch.site.devices.values()), "no claim is left"
    )


def job(prompt: str, **need: int) -> dict[str, object]:
    return {"model": "m:8b", "prompt": prompt, "need": need}


async def test_a_job_holds_all_of_its_gpus_until_it_ends_and_who_needs_one_of_them_waits(
    site: Site, nvml: NvmlStub
) -> None:
    async with cards(nvml, *(Gpu(uuid=each, memory=(TOTAL_MB, TOTAL_MB - IDLE_MB)) for each in (A, B, C))) as host:
        await begin(site, host)
        host.ollama.hold = asyncio.Event()
        wide = await site.submit(job("wide", gpus=2, vram_mb=6_000))
        await until(lambda: host.ollama.prompts["wide"] > 0, "the Ollama has the wide job")
        held = {fact.device for fact in site.watch.all(Claimed) if fact.job == wide}
        other = await site.submit(job("also wide", gpus=2, vram_mb=6_000))
        await site.watch.until(lambda: site.watch.site.jobs[other].reason == Reason.CAPACITY, "the other waits")
        single = await site.submit(job("single", vram_mb=6_000))
        await until(lambda: host.ollama.prompts["single"] > 0, "a job for one card passes")
        asked_meanwhile = host.ollama.prompts["also wide"]
        host.ollama.hold.set()
        host.ollama.hold = None
        ends = [await site.watch.end(each) for each in (wide, single, other)]
        await all_given_back(site)

    assert held == {A, B}
    assert asked_meanwhile == 0
    assert all(isinstance(end, Succeeded) for end in ends), ends
    (admitted,) = site.watch.of_job(wide, Admitted)
    assert (admitted.device, admitted.more_devices) == (A, (B,))
    (alone,) = site.watch.of_job(single, Admitted)
    assert (alone.device, alone.more_devices) == (C, ())
    claims = [(fact.job, fact.device) for fact in site.watch.all(Claimed)]
    releases = [(fact.job, fact.device) for fact in site.watch.all(Released)]
    assert sorted(claims) == sorted(releases)
    assert len([each for each in claims if each[0] == other]) == 2
    await site.check()


async def test_a_card_that_cannot_hold_its_part_keeps_the_whole_job_waiting_and_nothing_is_kept(
    site: Site, nvml: NvmlStub
) -> None:
    """Something unmanaged fills the second card: the job is claimed on none for long, and starts when it has gone."""
    async with cards(nvml, *(Gpu(uuid=each, memory=(TOTAL_MB, TOTAL_MB - IDLE_MB)) for each in (A, B))) as host:
        host.gpu(B).memory = (TOTAL_MB, 2_000)
        host.show()
        await begin(site, host)
        wide = await site.submit(job("wide", gpus=2, vram_mb=6_000))
        await site.watch.until(
            lambda: site.watch.site.jobs[wide].reason in (Reason.CAPACITY, Reason.DENIED), "the wide job waits"
        )
        asked = host.ollama.prompts["wide"]
        host.gpu(B).memory = (TOTAL_MB, TOTAL_MB - IDLE_MB)
        host.show()
        end = await site.watch.end(wide)
        await all_given_back(site)

    assert asked == 0
    assert isinstance(end, Succeeded)
    assert {fact.device for fact in site.watch.all(Released)} == {A, B}
    assert HOST in {fact.host for fact in site.watch.all(Claimed)}
    await site.check()


async def test_an_agent_that_dies_with_several_claims_leaves_none_of_them_behind(site: Site, nvml: NvmlStub) -> None:
    async with cards(nvml, *(Gpu(uuid=each, memory=(TOTAL_MB, TOTAL_MB - IDLE_MB)) for each in (A, B))) as host:
        site.served.append(Served("ollama", "ollama", host.ollama))
        site.scheduler()
        agent = site.agent()
        await site.ready()
        host.ollama.hold = asyncio.Event()
        wide = await site.submit(job("wide", gpus=2, vram_mb=6_000))
        await until(lambda: host.ollama.prompts["wide"] > 0, "the Ollama has the wide job")
        await agent.kill()
        end = await site.watch.end(wide)
        await all_given_back(site)
        host.ollama.hold.set()

    assert type(end).__name__ == "Lost"
    await site.check()
