"""A part is killed (SIGKILL) in the middle of a run: nothing acknowledged is lost, nothing runs twice.

The whole site runs under `gpuq up`, which starts again what died; where `gpuq up` itself is killed, the test does.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from gpukeeper.events.host import Joined
from gpukeeper.events.job import Preempted, Succeeded
from support.site import site_in

pytestmark = pytest.mark.processes

JOBS = 50
#: When the kill comes: after so many ended jobs, drawn between the two.
MOMENTS = {"early": (0, 5), "middle": (15, 30), "late": (40, JOBS - 1)}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("victim", ["scheduler", "agent", "up", "nats"])
async def test_a_kill_loses_nothing_and_runs_nothing_twice(tmp_path: Path, victim: str, moment: str) -> None:
    seed = f"{victim} {moment} {os.environ.get('GPUQ_TEST_SEED', '1')}"
    after = random.Random(seed).randint(*MOMENTS[moment])
    print(f"seed {seed!r}: {victim} is killed after {after} ended jobs")
    async with site_in(tmp_path) as site:
        await site.llama(pace_s=0.05)
        site.devices = [{"id": "cpu0", "source": "static", "kind": "cpu", "total_mb": 1000, "slots": 2}]
        up = site.up()
        await site.follow_up()
        await site.ready()
        sending = asyncio.create_task(site.send_many(JOBS))
        await site.watch.until(
            lambda: site.watch.ended() >= after and site.watch.count["gpuq.job.started.v1"] > after,
            "the moment of the kill",
        )

        if victim == "up":
            await up.kill()
            up.start()
        else:
            os.kill(site.child_of_up(up, victim), signal.SIGKILL)
        sent = await sending
        # A job for the parts that came back: where the kill came last, nothing else would wait for them.
        sent.append(await site.send_patiently("the last"))

        await site.all_ended(sent)
        await site.check(sent)
        assert await up.stop() == 0


async def test_a_job_that_ran_when_up_was_killed_ends_once_and_the_next_runs(tmp_path: Path) -> None:
    """The agent outlives `gpuq up` for its grace; the new one neither fails for it nor is spoilt by its farewell."""
    async with site_in(tmp_path) as site:
        fake = await site.llama(hold=True)
        site.devices = [{"id": "cpu0", "source": "static", "kind": "cpu", "total_mb": 1000}]
        up = site.up()
        await site.follow_up()
        await site.ready()
        held = await site.submit({"model": "fake", "prompt": "held"})
        await fake.until_asked("held")
        await up.kill()
        up.start()
        await site.watch.until(lambda: len(site.watch.all(Joined)) > 1, "another agent joined")
        await fake.set(hold=False)

        after = await site.run({"model": "fake", "prompt": "after"})
        end = await site.watch.end(held)
        await site.check(handed_back=["held"])
        assert isinstance(after, Succeeded)
        assert site.watch.ends(held) == [end]
        assert (await fake.prompts())["held"] == 1 + len(site.watch.of_job(held, Preempted))
        assert await up.stop() == 0
