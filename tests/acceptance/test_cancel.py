"""A cancel by raw publish, in each state a job can be in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpukeeper.events.job import Admitted, Cancelled, CancelRequested, Started, Succeeded
from gpukeeper.events.reasons import Reason
from gpukeeper.events.site import CommandRefused
from support.nats import NatsServer
from support.site import DEVICE, Site, site_in

pytestmark = pytest.mark.processes

NEXT = {"model": "fake", "prompt": "the next"}


@pytest.fixture
async def site(tmp_path: Path, nats_server: NatsServer) -> AsyncIterator[Site]:
    async with site_in(tmp_path, nats_server.settings()) as site:
        site.devices = [{"id": DEVICE, "source": "static", "kind": "cpu", "total_mb": 1000}]
        yield site


async def begin(site: Site) -> None:
    site.scheduler()
    site.agent()
    await site.ready()


async def test_a_job_that_waits_ends_at_once_and_is_never_executed(site: Site) -> None:
    fake = await site.llama(hold=True)
    await begin(site)
    runs = await site.submit({"model": "fake", "prompt": "runs"})
    await fake.until_asked("runs")
    waits = await site.submit(NEXT)
    seq = await site.command("cancel", waits, actor="alice", reason="enough")
    end = await site.watch.end(waits)

    assert isinstance(end, Cancelled)
    assert (end.actor, end.reason, end.command_seq, end.epoch) == ("alice", "enough", seq, None)
    await fake.set(hold=False)
    assert isinstance(await site.watch.end(runs), Succeeded)
    await site.check()
    assert await fake.prompts() == {"runs": 1}


async def test_a_job_that_runs_is_stopped_with_what_it_had_and_its_slot_is_free_again(site: Site) -> None:
    fake = await site.llama(hold=True)
    await begin(site)
    runs = await site.submit({"model": "fake", "prompt": "runs"})
    await fake.until_asked("runs")
    await site.watch.fact(runs, Started)
    seq = await site.command("cancel", runs)
    end = await site.watch.end(runs)

    assert isinstance(end, Cancelled)
    (asked,) = site.watch.of_job(runs, CancelRequested)
    assert (end.command_seq, asked.command_seq) == (seq, seq)
    assert end.partial == "the"
    assert (await fake.counters())["aborted"] == 1
    await fake.set(hold=False)
    assert isinstance(await site.run(NEXT), Succeeded)
    await site.check()


async def test_a_job_whose_model_is_loading_is_stopped_and_its_work_never_sent(site: Site) -> None:
    """An Ollama never proves that it has stopped, so its slot stays taken for a while."""
    site.devices = [{"id": DEVICE, "source": "static", "kind": "gpu", "total_mb": 24_000}]
    fake = await site.ollama(hold_load=True)
    await begin(site)
    loads = await site.submit({"model": "m:8b", "prompt": "loads"})
    await site.watch.fact(loads, Admitted)
    await site.command("cancel", loads)
    end = await site.watch.end(loads)

    assert isinstance(end, Cancelled)
    assert end.partial is None
    assert not site.watch.of_job(loads, Started)
    await fake.set(hold_load=False)
    assert isinstance(await site.run({"model": "m:8b", "prompt": "the next"}), Succeeded)
    await site.check()
    assert await fake.prompts() == {"the next": 1}


async def test_a_cancel_of_what_is_unknown_or_over_is_refused_with_the_reason(site: Site) -> None:
    await site.llama()
    await begin(site)
    over = await site.submit(NEXT)
    assert isinstance(await site.watch.end(over), Succeeded)
    commands = {
        await site.command("cancel", "nobody"): Reason.UNKNOWN_JOB,
        await site.command("cancel", over): Reason.ALREADY_ENDED,
        await site.command("praise", over): Reason.INVALID_COMMAND,
    }

    refused = await site.watch.until(
        lambda: found if len(found := site.watch.all(CommandRefused)) >= 3 else None, "all are refused"
    )
    assert {fact.command_seq: fact.reason for fact in refused} == commands
    assert len(site.watch.ends(over)) == 1
    await site.check()
