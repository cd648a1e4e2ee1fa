"""Cases C5, C24, C41 and C57 on the whole path: releases that are late, short, stale, or never come.

The Ollama is a fake whose models show on the cards of the stub driver; the rest is real.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpukeeper.events.device import Changed, HandedOff, Reclaimed, ReclaimFailed, ReclaimRequested
from gpukeeper.events.job import Admitted, Cancelled, Succeeded, Waiting
from gpukeeper.events.readings import DeviceState
from gpukeeper.events.reasons import Reason
from gpukeeper.events.route import Routed
from support.cards import IDLE_MB, MB, cards
from support.nats import NatsServer
from support.nvml_stub import NvmlStub
from support.ollama import FakeOllama
from support.reclaim import TOTAL_MB, A, B, begin, card, command, job, reclaim_site, resident, waits_for
from support.site import HOST, Served, Site
from support.waiting import until

pytestmark = pytest.mark.processes
pytest_plugins = ["support.nvml_fixture"]

MODELS = {"big:1": 10_000 * MB, "old:1": 16_000 * MB, "small:1": 2_000 * MB}


@pytest.fixture
async def site(
    tmp_path: Path,
    nats_server: NatsServer,
    nvml: NvmlStub,
    nvml_library: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Site]:
    async with reclaim_site(tmp_path, nats_server, nvml_library, monkeypatch) as site:
        yield site


async def states(site: Site, device: str, *wanted: DeviceState) -> list[Changed]:
    """Wait until the device was told to be in these states, one after the other."""

    def look() -> list[Changed] | None:
        found = site.watch.of_device(HOST, device, Changed)
        return found if [fact.state for fact in found] == list(wanted) else None

    return await site.watch.until(look, f"{device} was {wanted}")


async def test_c37_an_idle_model_goes_for_a_job_that_needs_its_room_and_the_device_is_read_again(
    site: Site, nvml: NvmlStub
) -> None:
    """The plain way, as C37 wants it of memory: exactly one release, then success."""
    async with cards(nvml, card(A)) as host:
        host.ollama.installed = dict(MODELS)
        await begin(site, host)
        await resident(site, host, "old:1")
        made = await site.submit(job("big:1", "after the release"))
        end = await site.watch.end(made)

    assert isinstance(end, Succeeded), end
    (requested,) = site.watch.of_device(HOST, A, ReclaimRequested)
    (reclaimed,) = site.watch.of_device(HOST, A, Reclaimed)
    (handed,) = site.watch.of_device(HOST, A, HandedOff)
    assert (requested.model, requested.promised_mb, requested.job) == ("old:1", 16_000, made)
    assert (reclaimed.measured_mb, handed.job) == (16_000, made)
    assert host.ollama.unloads == 1
    await site.check()


def asked(site: Site) -> list[str]:
    """The models that somebody was asked to let go of, in order."""
    return [fact.model or fact.runtime for fact in site.watch.all(ReclaimRequested)]


# --- C5: a release that never comes


async def test_c5_a_release_that_never_comes_blocks_its_device_and_the_others_go_on(site: Site, nvml: NvmlStub) -> None:
    """C5, ollama#14364: the row stays with an end in the past, and so does the memory."""
    async with cards(nvml, card(A), card(B)) as host, FakeOllama() as other:
        host.ollama.installed = dict(MODELS)
        other.count_prompts = True
        other.installed = {"other:1": 1_000 * MB}
        other.on_vram = lambda vram: host.holds(B, vram // MB)
        site.served.append(Served("other", "ollama", other, settings={"devices": [B], "sole_client": True}))
        await begin(site, host, devices=[A], release_timeout_s=2)
        await resident(site, host, "old:1", on=A)
        host.ollama.stays = True
        stuck = await site.submit(job("big:1", "needs the room", vram_mb=11_000))
        (blocked,) = await states(site, A, "blocked")
        await waits_for(site, stuck, Reason.NO_ROUTE)
        warm = await site.submit(job("old:1", "would even be warm"))
        goes_on = await site.run(job("other:1", "on the other card"))
        await waits_for(site, warm, Reason.NO_ROUTE)
        admitted = len([fact for fact in site.watch.all(Admitted) if fact.device == A])
        host.ollama.stays = False
        host.runner_dies()
        ends = [await site.watch.end(each) for each in (stuck, warm)]

    (given_back,) = [fact for fact in site.watch.of_job(stuck, Waiting) if fact.epoch is not None]
    (failed,) = site.watch.of_device(HOST, A, ReclaimFailed)
    assert given_back.reason == failed.reason == Reason.HANDOFF_TIMEOUT
    assert "it still lists what it should have let go of" in failed.detail
    assert failed.waited_s == pytest.approx(2, abs=1.5)
    assert failed.detail == blocked.detail
    assert isinstance(goes_on, Succeeded), goes_on
    # The job that ran there first, and the one whose room never came.
    assert admitted == 2
    assert all(isinstance(end, Succeeded) for end in ends), ends
    assert [fact.state for fact in site.watch.of_device(HOST, A, Changed)] == ["blocked", "healthy"]
    await site.check()


async def test_c5_an_operator_resumes_a_blocked_device(site: Site, nvml: NvmlStub) -> None:
    async with cards(nvml, card(A)) as host:
        host.ollama.installed = dict(MODELS)
        await begin(site, host, release_timeout_s=2)
        await resident(site, host, "old:1")
        host.ollama.stays = True
        stuck = await site.submit(job("big:1", "needs the room", vram_mb=11_000))
        await states(site, A, "blocked")
        small = await site.submit(job("small:1", "fits beside it", vram_mb=2_000))
        await waits_for(site, small, Reason.NO_ROUTE)
        await command(site, "resume", device=A)
        await states(site, A, "blocked", "healthy")
        end = await site.watch.end(small)
        await waits_for(site, stuck, Reason.CAPACITY)

    assert isinstance(end, Succeeded), end
    assert "old:1 holds 16000 MB and stays: it is on its way out already" in site.watch.site.jobs[stuck].detail
    assert asked(site) == ["old:1"]
    await site.check()


# --- C24: less than was promised


async def test_c24_a_release_that_gives_back_too_little_is_followed_by_the_next(site: Site, nvml: NvmlStub) -> None:
    """C24, Castwright#1976: 60 % of what was listed becomes free, and nobody lists the rest any more."""
    async with cards(nvml, card(A)) as host:
        host.ollama.installed = {"first:1": 10_000 * MB, "second:1": 9_000 * MB, "big:1": 12_000 * MB}
        await begin(site, host, release_timeout_s=10)
        await resident(site, host, "first:1")
        await resident(site, host, "second:1")
        host.ollama.release_share = 0.6
        made = await site.submit(job("big:1", "needs most of it", vram_mb=13_000))
        end = await site.watch.end(made)

    assert isinstance(end, Succeeded), end
    # The least that was promised to be enough, then the rest.
    assert asked(site) == ["second:1", "first:1"]
    measured = [(fact.promised_mb, fact.measured_mb) for fact in site.watch.of_device(HOST, A, Reclaimed)]
    assert measured == [(9_000, 5_400), (10_000, 6_000)]
    (handed,) = site.watch.of_device(HOST, A, HandedOff)
    assert handed.free_mb == TOTAL_MB - IDLE_MB - 4_000 - 3_600
    await site.check()


async def test_c24_a_job_is_never_admitted_on_a_promise(site: Site, nvml: NvmlStub) -> None:
    """C24: what is left after the release is too little, and nobody else may go: it waits, and says for what."""
    async with cards(nvml, card(A)) as host:
        host.ollama.installed = dict(MODELS)
        await begin(site, host, release_timeout_s=10)
        await resident(site, host, "old:1")
        host.ollama.release_share = 0.6
        made = await site.submit(job("big:1", "needs the room", vram_mb=20_000))
        given_back = await site.watch.until(
            lambda: [fact for fact in site.watch.of_job(made, Waiting) if fact.epoch is not None], "it is given back"
        )
        await waits_for(site, made, Reason.CAPACITY)
        assert host.ollama.prompts["needs the room"] == 0
        assert not site.watch.of_device(HOST, A, HandedOff)
        host.ollama.leaked = 0
        host.runner_dies()
        end = await site.watch.end(made)

    left_mb = TOTAL_MB - IDLE_MB - 6_400
    assert given_back[0].reason == Reason.INSUFFICIENT
    assert f"asked for 20000 MB, {left_mb} MB usable" in given_back[0].detail
    assert isinstance(end, Succeeded), end
    await site.check()


# --- C57: it says that it let go


async def test_c57_a_release_that_the_device_does_not_show_is_no_release(site: Site, nvml: NvmlStub) -> None:
    """C57, LocalAI#2277: "shut down", and the process still holds it."""
    async with cards(nvml, card(A)) as host:
        host.ollama.installed = dict(MODELS)
        await begin(site, host, release_timeout_s=2)
        await resident(site, host, "old:1")
        host.ollama.release_share = 0.0
        stuck = await site.submit(job("big:1", "needs the room", vram_mb=11_000))
        (blocked,) = await states(site, A, "blocked")
        assert host.ollama.loaded == {}
        await waits_for(site, stuck, Reason.NO_ROUTE)
        host.ollama.leaked = 0
        host.runner_dies()
        end = await site.watch.end(stuck)

    (failed,) = site.watch.of_device(HOST, A, ReclaimFailed)
    assert failed.reason == Reason.RELEASE_FAILED
    assert "the owner of the rest is unknown" in blocked.detail
    assert not site.watch.of_device(HOST, A, Reclaimed)
    assert isinstance(end, Succeeded), end
    await site.check()


# --- C41: stale and late releases


async def test_c41_a_release_that_outlives_its_job_lands_before_the_next_job_goes_on(
    site: Site, nvml: NvmlStub
) -> None:
    """C41, LLMKube#1837: the last waiter leaves while its release is under way, and the model is asked for at once."""
    async with cards(nvml, card(A)) as host:
        host.ollama.installed = dict(MODELS)
        await begin(site, host, release_timeout_s=20)
        await resident(site, host, "old:1")
        host.ollama.hold_unload = asyncio.Event()
        first = await site.submit(job("big:1", "first", vram_mb=11_000))
        await until(lambda: host.ollama.unloads == 1, "the Ollama is asked to unload")
        await site.command("cancel", first)
        cancelled = await site.watch.end(first)
        second = await site.submit(job("old:1", "second"))
        await site.watch.until(lambda: [fact for fact in site.watch.all(Routed) if fact.job == second], "it is sent")
        host.ollama.hold_unload.set()
        end = await site.watch.end(second)

    assert isinstance(cancelled, Cancelled)
    assert isinstance(end, Succeeded), end
    assert host.ollama.prompts["first"] == 0
    # Once for each of the two jobs with it: the release had landed before the second was let in.
    assert (host.ollama.loads, host.ollama.unloads) == (2, 1)
    (reclaimed,) = site.watch.of_device(HOST, A, Reclaimed)
    assert (reclaimed.job, reclaimed.measured_mb) == (first, 16_000)
    assert not site.watch.of_device(HOST, A, HandedOff)
    await site.check()


async def test_c41_a_release_whose_answer_is_late_ends_by_its_deadline_and_the_resident_models_keep_serving(
    site: Site, nvml: NvmlStub
) -> None:
    """C41, LLMKube#1838: no deadline there, and every request failed, also those for what was still loaded."""
    async with cards(nvml, card(A), card(B)) as host, FakeOllama() as other:
        host.ollama.installed = dict(MODELS)
        other.count_prompts = True
        other.installed = {"other:1": 1_000 * MB}
        other.on_vram = lambda vram: host.holds(B, vram // MB)
        site.served.append(Served("other", "ollama", other, settings={"devices": [B], "sole_client": True}))
        await begin(site, host, devices=[A], release_timeout_s=2)
        await resident(site, host, "old:1", on=A)
        assert isinstance(await site.run(job("other:1", "before")), Succeeded)
        host.ollama.hold_unload = asyncio.Event()
        first = await site.submit(job("big:1", "first", vram_mb=11_000))
        await until(lambda: host.ollama.unloads == 1, "the Ollama is asked to unload")
        during = await site.run(job("other:1", "during"))
        await states(site, A, "blocked")
        second = await site.submit(job("old:1", "second"))
        await waits_for(site, second, Reason.NO_ROUTE)
        host.ollama.hold_unload.set()
        ends = [await site.watch.end(each) for each in (first, second)]

    (failed,) = site.watch.of_device(HOST, A, ReclaimFailed)
    assert failed.reason == Reason.HANDOFF_TIMEOUT
    assert isinstance(during, Succeeded), during
    assert other.loads == 1
    assert all(isinstance(end, Succeeded) for end in ends), ends
    await site.check()
