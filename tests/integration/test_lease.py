"""Who leads, on a real server."""

from __future__ import annotations

import asyncio

import pytest
from nats.js.api import DiscardPolicy, KeyValueConfig

from gpukeeper.events import subjects
from gpukeeper.events.connection import Connection
from gpukeeper.events.errors import IncompatibleStream
from gpukeeper.events.jetstream import JetStreamLog
from gpukeeper.events.log import Appended
from gpukeeper.events.streams import SiteStreams, ensure_site, lease_ttl_s, log_config, problems
from gpukeeper.scheduler.config import SchedulerConfig
from gpukeeper.scheduler.lease import Lease
from gpukeeper.scheduler.service import SchedulerService
from support.records import record
from support.wait import until_answered

pytestmark = pytest.mark.processes


async def test_a_lease_is_kept_by_one_until_it_is_given_up(connection: Connection) -> None:
    await ensure_site(connection)
    first = Lease(connection, "first", wanted_ttl_s=6)
    second = Lease(connection, "second", wanted_ttl_s=6)

    assert [await first.keep(), await second.keep(), await first.keep(), await second.keep()] == [
        True,
        False,
        True,
        False,
    ]
    await first.give_up()
    assert [await second.keep(), await first.keep()] == [True, False]


async def test_another_time_to_live_in_the_configuration_reaches_the_bucket_that_is_there(
    connection: Connection,
) -> None:
    """Else a lease that is renewed every ten seconds would be forgotten after six."""
    await ensure_site(connection, SiteStreams(lease_ttl_s=6))
    lease = Lease(connection, "first", wanted_ttl_s=30)

    assert await lease.keep()

    assert await lease_ttl_s(connection) == 30
    assert lease.ttl_s == 30
    assert await lease.keep()


async def test_of_two_schedulers_with_different_times_both_go_by_what_the_bucket_does(connection: Connection) -> None:
    await ensure_site(connection)
    first = Lease(connection, "first", wanted_ttl_s=30)
    assert await first.keep()
    second = Lease(connection, "second", wanted_ttl_s=9)
    assert not await second.keep()
    await first.give_up()

    assert await first.keep()

    assert first.ttl_s == second.ttl_s == await lease_ttl_s(connection) == 9


async def test_a_bucket_that_forgets_nothing_is_refused(connection: Connection) -> None:
    """The lease of a scheduler that died would never end."""
    await connection.js.create_key_value(KeyValueConfig(bucket=subjects.LEASE_BUCKET, history=1))

    with pytest.raises(IncompatibleStream, match=f"{subjects.LEASE_BUCKET}.*ttl is 0"):
        await ensure_site(connection)
    assert any(subjects.LEASE_BUCKET in problem for problem in await problems(connection))


async def test_an_election_that_could_not_be_recorded_is_tried_again(connection: Connection) -> None:
    await ensure_site(connection)
    assert isinstance(await JetStreamLog(connection).append(record("gpuq.ev.job.a", "e1")), Appended)
    full = log_config(SiteStreams()).evolve(max_msgs=1, discard=DiscardPolicy.NEW)
    await connection.js.update_stream(full)
    service = SchedulerService(connection, SchedulerConfig(lease_ttl_s=0.6))
    stop = asyncio.Event()
    running = asyncio.create_task(service.run(stop))
    bucket = await connection.js.key_value(subjects.LEASE_BUCKET)

    async def renewed() -> bool:
        # It renews only after it tried to record that it leads.
        status = await bucket.status()
        return status.stream_info.state.last_seq >= 2

    await until_answered(renewed, "the lease is renewed")
    assert not service.leading.is_set()
    await connection.js.update_stream(log_config(SiteStreams()))

    await asyncio.wait_for(service.leading.wait(), 20)
    stop.set()
    await running
