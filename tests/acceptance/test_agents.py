"""Agents that are killed, stopped, frozen or doubled in the middle of a job, as real processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpukeeper.events.device import ClaimLapsed
from gpukeeper.events.host import Joined, Left
from gpukeeper.events.job import Admitted, LateResult, Lost, Preempted, Started, Succeeded, Waiting
from gpukeeper.events.reasons import Reason
from support.nats import NatsServer
from support.site import DEVICE, HOST, Fake, Site, site_in
from support.waiting import until

pytestmark = pytest.mark.processes

JOB = {"model": "fake", "prompt": "the job"}
TTL_S = 6
#: The reaper looks once a second, and a second late on a busy machine.
LATE_S = 5


@pytest.fixture
async def site(tmp_path: Path, nats_server: NatsServer) -> AsyncIterator[Site]:
    async with site_in(tmp_path, nats_server.settings()) as site:
        site.devices = [{"id": DEVICE, "source": "static", "kind": "cpu", "total_mb": 1000}]
        site.sections["scheduler"] |= {"claim_ttl_s": TTL_S}
        yield site


async def running(site: Site, fake: Fake, prompt: str = "the job") -> str:
    """A job that has started and does not end by itself."""
    await fake.set(hold=True)
    job = await site.submit({"model": "fake", "prompt": prompt})
    await fake.until_asked(prompt)
    return job


async def test_a_job_whose_agent_is_killed_is_lost_with_evidence_and_the_device_goes_on(site: Site) -> None:
    fake = await site.llama()
    site.scheduler()
    agent = site.agent()
    await site.ready()
    job = await running(site, fake)
    # A heartbeat that lists the claim, to be found in the evidence.
    await site.heartbeat(lambda beat: any(claim.phase == "running" for claim in beat.claims))
    waiting = await site.submit({"model": "fake", "prompt": "the next"})
    await agent.kill()

    lost = await site.watch.end(job)
    assert isinstance(lost, Lost)
    admitted = await site.watch.fact(job, Admitted)
    assert (lost.reason, lost.epoch, lost.host, lost.device) == (
        Reason.OUTCOME_UNKNOWN,
        admitted.epoch,
        HOST,
        DEVICE,
    )
    assert lost.last_beat is not None
    assert (lost.last_beat.job, lost.last_beat.phase) == (job, "running")
    assert lost.last_beat_at is not None
    assert lost.silent_s is not None
    assert TTL_S <= lost.silent_s <= TTL_S + LATE_S
    assert "no heartbeat for" in lost.detail

    await fake.set(hold=False)
    site.agent("agent2")
    assert isinstance(await site.watch.end(waiting), Succeeded)
    await site.check()


async def test_a_new_agent_ends_the_claims_of_the_one_before_at_once(site: Site) -> None:
    site.sections["scheduler"] |= {"claim_ttl_s": 600}
    fake = await site.llama()
    site.scheduler()
    agent = site.agent()
    await site.ready()
    job = await running(site, fake)
    await agent.kill()
    await fake.set(hold=False)
    site.agent("agent2")

    lost = await site.watch.end(job)
    (lapse,) = site.watch.of_device(HOST, DEVICE, ClaimLapsed)
    admitted = await site.watch.fact(job, Admitted)
    assert isinstance(lost, Lost)
    assert (lapse.job, lapse.epoch) == (job, admitted.epoch)
    assert "a new agent speaks for the host" in lapse.detail
    assert isinstance(await site.run({"model": "fake", "prompt": "the next"}), Succeeded)
    await site.check()


async def test_an_agent_that_is_asked_to_stop_finishes_what_runs(site: Site) -> None:
    site.sections["agent"] |= {"stop_grace_s": 60}
    fake = await site.llama()
    site.scheduler()
    agent = site.agent()
    await site.ready()
    job = await running(site, fake)
    waiting = await site.submit({"model": "fake", "prompt": "the next"})
    stopping = site.ending(agent)
    await until(lambda: "agent_finishing" in agent.log, "the agent lets the job finish")
    await fake.set(hold=False)

    assert await stopping == 0
    assert isinstance(await site.watch.end(job), Succeeded)
    await site.watch.until(lambda: site.watch.all(Left), "the agent said goodbye")
    site.agent("agent2")
    assert isinstance(await site.watch.end(waiting), Succeeded)
    await site.check()


async def test_what_an_agent_cannot_finish_in_its_grace_is_handed_back_and_runs_on_the_next(site: Site) -> None:
    """One job runs, another is still loading: the first is preempted after the grace, the other handed back at once.

    An Ollama never proves that it has stopped, so the agent goes without giving the slot of the first back.
    """
    site.devices = [{"id": DEVICE, "source": "static", "kind": "gpu", "total_mb": 24_000, "slots": 2}]
    site.sections["agent"] |= {"stop_grace_s": 3}
    fake = await site.ollama()
    site.scheduler()
    agent = site.agent()
    await site.ready()
    await fake.set(hold=True)
    runs = await site.submit({"model": "m:8b", "prompt": "runs"})
    await fake.until_asked("runs")
    await fake.set(hold_load=True)
    loads = await site.submit({"model": "qwen3", "prompt": "loads"})
    await site.watch.fact(loads, Admitted)

    assert await agent.stop() == 0
    handed_back = await site.watch.fact(loads, Waiting)
    preempted = await site.watch.fact(runs, Preempted)
    assert handed_back.reason == Reason.HANDED_BACK
    assert preempted.reason == Reason.AGENT_STOPPING
    await fake.set(hold=False, hold_load=False)
    site.agent("agent2")
    for job in (runs, loads):
        assert isinstance(await site.watch.end(job), Succeeded)
        assert [fact.attempt for fact in site.watch.of_job(job, Admitted)] == [1, 2]
    await site.watch.until(lambda: not site.watch.site.devices[f"{HOST}/{DEVICE}"].claims, "every slot is free again")
    assert await fake.prompts() == {"runs": 2, "loads": 1}
    await site.check(handed_back=["runs"])


async def test_c50_a_frozen_agent_is_fenced_and_what_it_says_late_is_only_noted(site: Site) -> None:
    """C50: the agent stands still for longer than its claim lives, beside another agent that could take the job."""
    fake = await site.llama()
    site.scheduler()
    agents = {HOST: site.agent(), "other": site.agent("other", host="other")}
    await site.ready(HOST, "other")
    job = await running(site, fake)
    host = (await site.watch.fact(job, Admitted)).host
    agents[host].freeze()

    lost = await site.watch.end(job)
    # Its answer is there when it wakes up.
    await fake.set(hold=False)
    agents[host].resume()
    late = await site.watch.fact(job, LateResult)
    assert isinstance(lost, Lost)
    assert late.outcome in ("succeeded", "cancelled")
    assert site.watch.ends(job) == [lost]
    assert len(site.watch.of_job(job, Started)) == 1
    # It goes on: the claim was fenced, not the host.
    assert isinstance(await site.run({"model": "fake", "prompt": "the next", "host": host}), Succeeded)
    assert await fake.prompts() == {"the job": 1, "the next": 1}
    await site.check()


async def test_a_second_agent_for_a_host_is_refused_and_told_who_has_it(site: Site) -> None:
    await site.llama()
    site.scheduler()
    first = site.agent()
    await site.ready()
    second = site.agent("agent2")

    assert await second.end() == 7
    assert f"already has a live agent (pid {first.pid}, instance " in second.log
    assert len(site.watch.all(Joined)) == 1
    assert isinstance(await site.run(JOB), Succeeded)
