"""Several schedulers, or none for a while: submissions are answered once, by whoever leads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpukeeper.events.job import Accepted, Rejected, Resubmitted, Succeeded
from gpukeeper.events.reasons import Reason
from gpukeeper.events.site import LeaderElected
from support.nats import NatsServer
from support.parts import Part
from support.site import DEVICE, HOST, Site, site_in

pytestmark = pytest.mark.processes

JOBS = 40


@pytest.fixture
async def site(tmp_path: Path, nats_server: NatsServer) -> AsyncIterator[Site]:
    async with site_in(tmp_path, nats_server.settings()) as site:
        site.devices = [{"id": DEVICE, "source": "static", "kind": "cpu", "total_mb": 1000, "slots": 4}]
        await site.llama()
        yield site


async def two_schedulers(site: Site) -> dict[str, Part]:
    """The one that leads as ``leader``, the other as ``follower``."""
    leader = site.scheduler()
    await site.watch.until(lambda: site.watch.all(LeaderElected), "the first leads")
    return {"leader": leader, "follower": site.scheduler("scheduler2")}


async def test_when_the_leader_is_killed_the_other_goes_on(site: Site) -> None:
    parts = await two_schedulers(site)
    site.agent()
    await site.ready()
    sent = await site.send_many(JOBS // 2)
    await parts["leader"].kill()
    sent += await site.send_many(JOBS // 2, first=JOBS // 2)

    await site.all_ended(sent)
    await site.check(sent)
    first, second = site.watch.all(LeaderElected)
    assert first.instance_id != second.instance_id
    assert site.watch.count[Succeeded.TYPE] == JOBS


async def test_a_leader_that_stood_still_comes_back_and_harms_nothing(site: Site) -> None:
    """It wakes up believing that it leads, with a state that is old."""
    parts = await two_schedulers(site)
    site.agent()
    await site.ready()
    sent = await site.send_many(JOBS // 4)
    parts["leader"].freeze()
    sent += await site.send_many(JOBS // 2, first=JOBS // 4)
    await site.watch.until(lambda: len(site.watch.all(LeaderElected)) == 2, "the other leads")
    parts["leader"].resume()
    sent += await site.send_many(JOBS // 4, first=3 * JOBS // 4)

    await site.all_ended(sent)
    await site.check(sent)
    assert site.watch.count[Succeeded.TYPE] == JOBS
    # Both are alive and of use: without the new leader the old one leads again.
    await parts["follower"].kill()
    assert isinstance(await site.run({"model": "fake", "prompt": "the last"}), Succeeded)


async def test_a_lease_that_was_made_shorter_than_configured_is_renewed_in_time(site: Site) -> None:
    """The bucket keeps the time it was made with (2 s here), whatever the configuration says later."""
    site.sections["scheduler"] |= {"lease_ttl_s": 9}
    scheduler = site.scheduler()
    site.agent()
    await site.ready()
    await site.heartbeat(lambda beat: beat.host == HOST, times=7)

    assert "lease_lost" not in scheduler.log
    assert len(site.watch.all(LeaderElected)) == 1


async def test_a_submission_without_a_scheduler_is_accepted_when_one_starts(site: Site) -> None:
    site.agent()
    seq = await site.send({"model": "fake", "prompt": "early"})
    site.scheduler()

    answer = await site.watch.answer(seq)
    assert isinstance(answer, Accepted)
    assert isinstance(await site.watch.end(answer.job), Succeeded)
    await site.check()


async def test_the_same_submission_twice_is_one_job_and_another_body_under_its_id_is_refused(site: Site) -> None:
    """The copies come without a message id, so that nothing but the job's own id tells that they are one."""
    job = {"id": "mine", "model": "fake", "prompt": "once"}
    first = await site.send(job)
    second = await site.send(dict(reversed(job.items())))
    other = await site.send({**job, "prompt": "another"})
    site.scheduler()
    site.agent()

    assert isinstance(await site.watch.answer(first), Accepted)
    assert isinstance(await site.watch.answer(second), Resubmitted)
    refused = await site.watch.answer(other)
    assert isinstance(refused, Rejected)
    assert (refused.reason, refused.problems[0].path, refused.requested_id) == (Reason.DUPLICATE_ID, "id", "mine")
    assert isinstance(await site.watch.end("mine"), Succeeded)
    # After the end, too.
    assert isinstance(await site.watch.answer(await site.send(job)), Resubmitted)
    await site.check()
    assert await site.fakes[0].prompts() == {"once": 1}
