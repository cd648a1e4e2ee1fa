"""Cases from the field, over the whole path: a fake Ollama, a declared GPU, real processes between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.events.device import ClaimLapsed, Released
from gpukeeper.events.job import Admitted, Denied, Failed, PlacementFailed, Succeeded
from gpukeeper.events.reasons import Reason
from gpukeeper.events.runtime import HealthChanged
from support.nats import NatsServer
from support.proxy import network
from support.site import HOST, Fake, Sent, Site, site_in

pytestmark = pytest.mark.processes

JOB = {"model": "m:8b", "prompt": "the job"}


@pytest.fixture
async def site(tmp_path: Path, nats_server: NatsServer) -> AsyncIterator[Site]:
    async with site_in(tmp_path, nats_server.settings()) as site:
        await site.ollama()
        yield site


async def begin(site: Site) -> Fake:
    site.scheduler()
    site.agent()
    await site.ready()
    return site.fakes[0]


async def test_c1_a_model_whose_share_in_vram_is_left_out_is_on_the_cpu_and_does_not_start(site: Site) -> None:
    """C1, ollama#4840."""
    fake = await begin(site)
    await fake.set(vram_share=0.0)
    job = await site.submit(JOB)
    end = await site.watch.end(job)

    assert isinstance(end, Failed)
    assert end.reason == Reason.CPU_FALLBACK
    (placement,) = site.watch.of_job(job, PlacementFailed)
    assert (placement.ratio, placement.vram_bytes) == (0.0, 0)
    assert "0.0% of m:8b is in VRAM" in placement.detail
    assert await fake.prompts() == {}
    await site.check()


@pytest.mark.parametrize(
    ("size", "vram"),
    [
        (0, 0),
        (0, 5_000_000_000),
        (5_000_000_000, 6_000_000_000),
        (-5_000_000_000, 5_000_000_000),
        (5_000_000_000, -1),
        ("5000000000", "5000000000"),
        (None, None),
        (5_000_000_000, None),
    ],
)
async def test_c2_impossible_figures_are_never_a_pass_and_are_named(site: Site, size: Any, vram: Any) -> None:
    """C2, Ollama's rendering of ps."""
    row = {"name": "m:8b", "model": "m:8b", "size": size, "size_vram": vram, "expires_at": "2300-01-01T00:00:00Z"}
    fake = await begin(site)
    await fake.set(ps_rows=[row])
    job = await site.submit(JOB)
    end = await site.watch.end(job)

    assert isinstance(end, Failed)
    assert end.reason == Reason.PLACEMENT_UNKNOWN
    for name, figure in (("size", size), ("in VRAM", vram)):
        shown = f"{name} {figure} bytes" if isinstance(figure, int) else name
        assert shown in end.detail
    assert await fake.prompts() == {}
    assert (await fake.counters())["load_calls"] <= 1
    await site.check()


async def test_c7_one_slot_means_one_request_at_a_time_whatever_the_runtime_would_take(site: Site) -> None:
    """C7, ollama#7758: six at once to a model that is loaded."""
    fake = await begin(site)
    await fake.set(pace_s=0.05)
    sent = [Sent(str(n), await site.send({"model": "m:8b", "prompt": str(n)})) for n in range(6)]

    await site.all_ended(sent)
    assert site.watch.count[Succeeded.TYPE] == 6
    assert (await fake.counters())["max_overlap"] == 1
    await site.check(sent)


async def test_c8_a_flood_is_accepted_durably_and_dispatched_within_the_slots(site: Site) -> None:
    """C8, IBM/prompt-declaration-language#702: 1,319 at once, to a runtime that answers 503 beyond four in flight."""
    site.devices[0]["slots"] = 4
    fake = await begin(site)
    await fake.set(max_in_flight=4)
    seqs = await asyncio.gather(*(site.send({"model": "m:8b", "prompt": str(n)}) for n in range(1_319)))
    sent = [Sent(str(n), seq) for n, seq in enumerate(seqs)]

    await site.all_ended(sent, within_s=240)
    assert site.watch.count[Succeeded.TYPE] == 1_319
    counters = await fake.counters()
    assert counters["refused"] == 0
    assert counters["max_overlap"] <= 4
    await site.check(sent)


FAULTS: dict[str, dict[str, Any]] = {
    "500": {"kind": "status", "status": 500},
    "HTML": {"kind": "html"},
    "cut JSON": {"kind": "truncated"},
    "nothing": {"kind": "empty"},
    "a stall": {"kind": "stall"},
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_c14_a_runtime_that_does_not_say_what_it_holds_is_not_taken_for_empty(site: Site, fault: str) -> None:
    """C14, BASTION 0.4.1. The look before the admission tells, or the agent's own look where that came first."""
    site.sections["scheduler"] |= {"claim_ttl_s": 300}
    site.sections["agent"] |= {"heartbeat_s": 60}
    fake = await begin(site)
    # One look when the agent joins, one when it begins to look by itself; the next is a minute away.
    await site.heartbeat(lambda beat: beat.host == HOST, times=2)
    await fake.fault("/api/ps", **FAULTS[fault])
    job = await site.submit(JOB)

    def why_not() -> str | None:
        denied = site.watch.of_job(job, Denied)
        if denied:
            assert denied[0].reason in (Reason.RUNTIME_UNREACHABLE, Reason.RESIDENCY_UNKNOWN)
            return denied[0].detail
        known = site.watch.site.jobs.get(job)
        return known.detail if known is not None and known.reason == Reason.NO_ROUTE else None

    assert "/api/ps" in await site.watch.until(why_not, "why the job does not start is told")
    assert not site.watch.of_job(job, Admitted)
    await fake.fault("/api/ps", None)
    assert isinstance(await site.watch.end(job), Succeeded)
    assert await fake.prompts() == {"the job": 1}
    await site.check()


async def test_c14_a_runtime_that_refuses_connections_gets_no_work_until_it_is_back(site: Site) -> None:
    """C14, and the job says meanwhile why it waits."""
    fake = await begin(site)
    await fake.kill()
    await site.watch.until(lambda: not site.watch.all(HealthChanged)[-1].healthy, "it is known to be away")
    job = await site.submit(JOB)
    await site.watch.until(lambda: "ollama does not answer" in site.watch.site.jobs[job].detail, "the reason is told")

    assert site.watch.site.jobs[job].reason == Reason.NO_ROUTE
    await fake.start()
    assert isinstance(await site.watch.end(job), Succeeded)
    await site.check()


async def test_c49_an_end_is_final_though_the_agent_died_before_it_gave_the_slot_back(
    site: Site, nats_server: NatsServer
) -> None:
    """C49, skypilot#10061: the agent's release never arrives, and it is killed."""
    port = int(nats_server.url.rpartition(":")[2])
    async with network(port) as link:
        site.scheduler()
        agent = site.agent(through=link.port)
        await site.ready()
        trap = link.trap(b"gpuq.device.released.v1", "withhold")
        job = await site.submit(JOB)
        end = await site.watch.end(job)
        await trap.sprung.wait()
        await agent.kill()
        lapse = (await site.watch.until(lambda: site.watch.all(ClaimLapsed), "its claim lapses"))[0]

    assert isinstance(end, Succeeded)
    assert lapse.job == job
    assert site.watch.all(Released) == []
    site.agent("agent2")
    assert isinstance(await site.run({"model": "m:8b", "prompt": "the next"}), Succeeded)
    assert site.watch.ends(job) == [end]
    await site.check()
