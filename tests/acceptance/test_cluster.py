"""Three NATS servers that keep three copies: the one that leads the log is killed in the middle of a run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gpukeeper.events.job import Succeeded
from gpukeeper.events.subjects import LOG_STREAM
from support.nats import NatsCluster
from support.site import DEVICE, Site, site_in

pytestmark = pytest.mark.processes

JOBS = 30


async def leader_of_log(site: Site) -> str:
    info = await site.connection.js.stream_info(LOG_STREAM)
    assert info.cluster is not None
    assert info.cluster.leader is not None
    return info.cluster.leader


async def test_a_run_outlives_the_server_that_leads_the_log(tmp_path: Path, nats_cluster: NatsCluster) -> None:
    async with site_in(tmp_path, nats_cluster.settings(), replicas=3) as site:
        site.devices = [{"id": DEVICE, "source": "static", "kind": "cpu", "total_mb": 1000, "slots": 2}]
        await site.llama(pace_s=0.1)
        site.scheduler()
        site.agent()
        await site.ready()
        sending = asyncio.create_task(site.send_many(JOBS))
        await site.watch.until(lambda: site.watch.ended() >= 5, "some jobs have ended")
        victim = nats_cluster.named(await leader_of_log(site))
        victim.kill()
        try:
            sent = await sending
            await site.all_ended(sent, within_s=120)
            await site.check(sent)
            assert await leader_of_log(site) != victim.name
            assert isinstance(await site.run({"model": "fake", "prompt": "after"}), Succeeded)
        finally:
            victim.start()
