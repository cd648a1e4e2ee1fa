"""Each step of an attempt and of a decision is hit by each mishap: the message is lost, its answer is, its writer dies.

The line of one part goes through the test, which knows what passes. So the moment is exact, and the same every time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpukeeper.events.job import Accepted, Lost, Rejected, Succeeded
from support.nats import NatsServer
from support.proxy import Mishap, Network, network
from support.site import DEVICE, HOST, Site, site_in

pytestmark = pytest.mark.processes

ATTEMPT = (
    "gpuq.device.claimed.v1",
    "gpuq.job.admitted.v1",
    "gpuq.job.placement_verified.v1",
    "gpuq.job.started.v1",
    "gpuq.job.succeeded.v1",
    "gpuq.device.released.v1",
)


@pytest.fixture
async def link(nats_server: NatsServer) -> AsyncIterator[Network]:
    async with network(int(nats_server.url.rpartition(":")[2])) as link:
        yield link


@pytest.fixture
async def site(tmp_path: Path, nats_server: NatsServer) -> AsyncIterator[Site]:
    async with site_in(tmp_path, nats_server.settings()) as site:
        site.devices = [{"id": DEVICE, "source": "static", "kind": "cpu", "total_mb": 1000}]
        await site.llama()
        yield site


@pytest.mark.parametrize("mishap", ["lose", "lose_ack"])
async def test_an_agent_that_is_cut_off_at_any_step_goes_on_where_it_was(
    site: Site, link: Network, mishap: Mishap
) -> None:
    site.scheduler()
    site.agent(through=link.port)
    await site.ready()
    for step in ATTEMPT:
        trap = link.trap(step.encode(), mishap)
        end = await site.run({"model": "fake", "prompt": step})
        await trap.sprung.wait()

        assert isinstance(end, Succeeded), f"{step}: {end}"
    await site.watch.until(lambda: not site.watch.site.devices[f"{HOST}/{DEVICE}"].claims, "the slot is free again")
    assert link.cuts == len(ATTEMPT)
    assert await site.fakes[0].prompts() == dict.fromkeys(ATTEMPT, 1)
    await site.check()


@pytest.mark.parametrize("step", ATTEMPT)
async def test_an_agent_that_dies_at_any_step_leaves_a_job_that_ends_once(site: Site, link: Network, step: str) -> None:
    """What the runtime cannot have seen runs on the next agent; what it may have seen is lost, and not run again."""
    site.sections["scheduler"] |= {"claim_ttl_s": 600}
    site.scheduler()
    agent = site.agent(through=link.port)
    await site.ready()
    trap = link.trap(step.encode(), "withhold")
    job = await site.submit({"model": "fake", "prompt": step})
    await trap.sprung.wait()
    await agent.kill()
    site.agent("agent2")
    end = await site.watch.end(job)

    expected = Lost if step == "gpuq.job.succeeded.v1" else Succeeded
    assert isinstance(end, expected)
    assert isinstance(await site.run({"model": "fake", "prompt": "after"}), Succeeded)
    await site.watch.until(lambda: not site.watch.site.devices[f"{HOST}/{DEVICE}"].claims, "the slot is free again")
    assert await site.fakes[0].prompts() == {step: 1, "after": 1}
    await site.check()


@pytest.mark.parametrize("mishap", ["lose", "lose_ack"])
async def test_a_scheduler_that_is_cut_off_at_any_step_decides_each_thing_once(
    site: Site, link: Network, mishap: Mishap
) -> None:
    site.scheduler(through=link.port)
    site.agent()
    await site.ready()
    trap = link.trap(b"gpuq.job.rejected.v1", mishap)
    assert isinstance(await site.watch.answer(await site.send(b"no job")), Rejected)
    await trap.sprung.wait()
    for step in ("gpuq.job.accepted.v1", "gpuq.route.routed.v1"):
        trap = link.trap(step.encode(), mishap)
        answer = await site.watch.answer(await site.send({"model": "fake", "prompt": step}))
        assert isinstance(answer, Accepted)
        end = await site.watch.end(answer.job)
        await trap.sprung.wait()

        assert isinstance(end, Succeeded), f"{step}: {end}"
    assert link.cuts == 3
    await site.check()
