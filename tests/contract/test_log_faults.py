"""The log while servers are killed, frozen and cut off: nothing acknowledged is lost, nothing is stored twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import nats.errors
import nats.js.errors
import pytest

from gpukeeper.events import follower as follower_module
from gpukeeper.events.connection import Connection, NatsSettings, connect
from gpukeeper.events.errors import LogUnavailable
from gpukeeper.events.jetstream import JetStreamLog
from gpukeeper.events.log import Appended, Refused, Stored, Unanswered
from gpukeeper.events.recorder import Recorder, Stamp
from gpukeeper.events.streams import SiteStreams, log_config
from gpukeeper.events.subjects import LOG_STREAM
from support.nats import NatsCluster, NatsServer
from support.proxy import Network, network
from support.records import record
from support.wait import until_answered

pytestmark = pytest.mark.processes

JOB = "gpuq.ev.job.a"
WITHIN_S = 30.0

STAMP = Stamp(source="/tests", new_id=lambda: "unused", now=lambda: "unused")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server of one's own, to kill."""
    own = NatsServer(tmp_path / "nats")
    try:
        own.start()
        yield own
    finally:
        own.stop()


@pytest.fixture
async def own(server: NatsServer) -> AsyncIterator[Connection]:
    connection = await connect(server.settings(), name="faults")
    await connection.js.add_stream(log_config(SiteStreams()))
    yield connection
    await connection.close()


@pytest.fixture
async def cuttable(nats_settings: NatsSettings) -> AsyncIterator[tuple[Network, Connection]]:
    """A connection to the shared server over a network that can be cut."""
    port = urlsplit(nats_settings.servers[0]).port
    assert port is not None
    async with network(port) as passing:
        through = msgspec.structs.replace(nats_settings, servers=(f"nats://127.0.0.1:{passing.port}",))
        connection = await connect(through, name="cuttable")
        await connection.js.add_stream(log_config(SiteStreams()))
        yield passing, connection
        await connection.close()


def reconnected(connection: Connection) -> asyncio.Event:
    """Set at the next reconnect."""
    event = asyncio.Event()

    async def notice() -> None:
        event.set()

    connection.on_reconnect(notice)
    return event


async def test_a_killed_server_loses_no_acknowledged_append_and_its_follower_goes_on_without_gap_or_repeat(
    server: NatsServer, own: Connection
) -> None:
    log = JetStreamLog(own, append_timeout_s=1.0)
    recorder = Recorder(log, STAMP, settle_s=WITHIN_S, retry_s=0.05)
    seen: list[Stored] = []
    follower = await log.follow(seen.append, after=0)
    acknowledged: dict[str, int] = {}
    enough = asyncio.Event()

    async def write(worker: int) -> None:
        last = 0
        for n in range(150):
            event_id = f"{worker}-{n}"
            outcome = await recorder.settle(record(f"gpuq.ev.job.w{worker}", event_id, expected=last))
            assert isinstance(outcome, Appended), outcome
            acknowledged[event_id] = last = outcome.seq
            if len(acknowledged) >= 300:
                enough.set()

    async def kill_and_restart() -> None:
        await enough.wait()
        server.kill()
        await asyncio.to_thread(server.start)

    await asyncio.gather(kill_and_restart(), *(write(worker) for worker in range(8)))
    last_seq = await log.last_seq()
    await follower.wait_seen(last_seq, WITHIN_S)

    assert last_seq == 8 * 150
    assert [stored.seq for stored in seen] == list(range(1, last_seq + 1))
    assert {msgspec.json.decode(stored.body)["id"]: stored.seq for stored in seen} == acknowledged
    await follower.stop()


async def test_an_append_that_a_frozen_server_took_unanswered_is_found_and_not_stored_again(
    server: NatsServer, own: Connection
) -> None:
    log = JetStreamLog(own, append_timeout_s=0.2)
    once = record(JOB, "e1", expected=0)
    server.freeze()
    assert isinstance(await log.append(once), Unanswered)
    server.resume()

    outcome = await Recorder(JetStreamLog(own), STAMP).settle(once)

    assert outcome == Appended(1)
    assert await log.last_seq() == 1


async def test_an_append_without_a_connection_is_refused_and_not_sent_later(
    server: NatsServer, own: Connection
) -> None:
    log = JetStreamLog(own, append_timeout_s=0.5)
    server.kill()
    lost = await log.append(record(JOB, "noticed while it is sent"))
    assert not isinstance(lost, Appended)
    await until_answered(lambda: is_disconnected(own), "the client noticed")

    outcome = await log.append(record(JOB, "e2"))

    assert outcome == Refused("unavailable", "not connected")
    with pytest.raises(LogUnavailable, match="not connected"):
        await log.last(JOB)
    again = reconnected(own)
    await asyncio.to_thread(server.start)
    await asyncio.wait_for(again.wait(), WITHIN_S)
    ids = [msgspec.json.decode(stored.body)["id"] for stored in await log.read(JOB)]
    assert "e2" not in ids


async def is_disconnected(connection: Connection) -> bool:
    return not connection.connected


async def test_a_follower_over_a_network_that_is_cut_in_mid_message_misses_nothing(
    cuttable: tuple[Network, Connection],
) -> None:
    passing, connection = cuttable
    log = JetStreamLog(connection)
    count = 1_500
    await asyncio.gather(*(log.append(record(JOB, f"e{n}", data="x" * 1_000)) for n in range(count)))
    seen: list[int] = []

    def cut_again(stored: Stored) -> None:
        seen.append(stored.seq)
        if stored.seq in (50, 300, 800):
            passing.bytes_until_cut = 200_000

    follower = await log.follow(cut_again, after=0)
    await follower.wait_seen(count, WITHIN_S)

    # How many of the three cuts fall depends on how far the network ran ahead of the reader.
    assert 1 <= passing.cuts <= 3
    assert seen == list(range(1, count + 1))
    await follower.stop()


async def test_reconnects_in_quick_succession_leave_one_consumer(cuttable: tuple[Network, Connection]) -> None:
    passing, connection = cuttable
    log = JetStreamLog(connection)
    seen: list[int] = []
    follower = await log.follow(lambda stored: seen.append(stored.seq), after=0)
    for _ in range(4):
        again = reconnected(connection)
        passing.cut()
        await asyncio.wait_for(again.wait(), WITHIN_S)
    # As when the client reports two reconnects before the first could be acted on.
    await asyncio.gather(connection.reconnected(), connection.reconnected())

    outcome = await Recorder(log, STAMP).settle(record(JOB, "e1"))
    await follower.wait_seen(1, WITHIN_S)

    async def one_listens() -> bool:
        consumers = await connection.js.consumers_info(LOG_STREAM)
        return sum(bool(consumer.push_bound) for consumer in consumers) == 1

    assert outcome == Appended(1)
    await until_answered(one_listens, "one consumer has a listener")
    assert seen == [1]
    await follower.stop()


async def test_a_follower_whose_consumer_is_gone_makes_another(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server says nothing when a consumer goes: only its heartbeats stop."""
    monkeypatch.setattr(follower_module, "_IDLE_HEARTBEAT_S", 0.1)
    monkeypatch.setattr(follower_module, "_SILENCE_S", 0.3)
    await connection.js.add_stream(log_config(SiteStreams()))
    log = JetStreamLog(connection)
    seen: list[int] = []
    follower = await log.follow(lambda stored: seen.append(stored.seq), after=0)
    await log.append(record(JOB, "e1"))
    await follower.wait_seen(1, WITHIN_S)

    (consumer,) = await connection.js.consumers_info(LOG_STREAM)
    await connection.js.delete_consumer(LOG_STREAM, consumer.name)
    await log.append(record(JOB, "e2"))
    await follower.wait_seen(2, WITHIN_S)

    assert seen == [1, 2]
    await follower.stop()


async def test_a_follower_that_is_too_slow_for_its_client_reads_again_what_was_dropped(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client drops what does not fit into its queue; holes show in the numbers, a lost end in the heartbeats."""
    monkeypatch.setattr(follower_module, "_IDLE_HEARTBEAT_S", 0.1)
    monkeypatch.setattr(follower_module, "_PENDING_MSGS_MAX", 16)
    await connection.js.add_stream(log_config(SiteStreams()))
    log = JetStreamLog(connection)
    count = 400
    await asyncio.gather(*(log.append(record(JOB, f"e{n}", data="x" * 1_000)) for n in range(count)))
    seen: list[int] = []

    follower = await log.follow(lambda stored: seen.append(stored.seq), after=0)
    await follower.wait_seen(count, WITHIN_S)

    assert seen == list(range(1, count + 1))
    await follower.stop()


async def test_closing_the_connection_breaks_its_followers_which_can_still_be_stopped(own: Connection) -> None:
    follower = await JetStreamLog(own).follow(lambda _: None, after=0)

    await own.close()

    with pytest.raises(LogUnavailable, match="closed"):
        await asyncio.wait_for(follower.broken, WITHIN_S)
    await follower.stop()
    await follower.stop()


async def test_following_a_stream_that_is_not_there_says_that_the_log_is_unavailable(connection: Connection) -> None:
    with pytest.raises(LogUnavailable, match="GPUQ_LOG"):
        await JetStreamLog(connection).follow(lambda _: None, after=0)


async def test_appending_where_the_credentials_may_not_is_denied(tmp_path: Path) -> None:
    """The client reports the subject in small letters; ids of devices have others."""
    account = """
      LIMITED { jetstream: enabled, users: [
        { user: boss, password: b }
        { user: agent, password: a, permissions: { publish: { deny: "gpuq.ev.device.>" } } } ] }"""
    server = NatsServer(tmp_path, accounts=account)
    server.start()
    try:
        boss = await connect(NatsSettings(servers=(server.url,), user="boss", password="b"), name="boss")
        await boss.js.add_stream(log_config(SiteStreams()))
        agent = await connect(NatsSettings(servers=(server.url,), user="agent", password="a"), name="agent")
        log = JetStreamLog(agent, append_timeout_s=0.5)

        denied = await log.append(record("gpuq.ev.device.Host1.GPU-1", "e1", expected=0))
        allowed = await log.append(record(JOB, "e2", expected=0))

        assert isinstance(denied, Refused)
        assert denied.code == "denied"
        assert allowed == Appended(1)
        await agent.close()
        await boss.close()
    finally:
        server.stop()


async def test_a_killed_leader_of_a_cluster_loses_no_append_and_lets_nobody_win_twice(
    nats_cluster: NatsCluster,
) -> None:
    connection = await connect(nats_cluster.settings(), name="faults")
    try:
        await connection.js.add_stream(log_config(SiteStreams(replicas=3)))
        await kill_the_leader_under_load(connection, nats_cluster)
        await delete_once_there_is_a_leader(connection)
    finally:
        await connection.close()


async def delete_once_there_is_a_leader(connection: Connection) -> None:
    """The cluster is shared: whoever comes next finds no stream."""
    async with asyncio.timeout(60):
        while True:
            try:
                await connection.js.delete_stream(LOG_STREAM)
            except (nats.errors.TimeoutError, nats.js.errors.ServiceUnavailableError):
                # The server that came back takes part in an election.
                continue
            except nats.js.errors.NotFoundError:
                pass  # the answer to an earlier try was late
            return


async def kill_the_leader_under_load(connection: Connection, nats_cluster: NatsCluster) -> None:
    log = JetStreamLog(connection, append_timeout_s=1.0)
    recorder = Recorder(log, STAMP, settle_s=60.0, retry_s=0.05)
    places = [f"gpuq.ev.device.host1.GPU-{n}" for n in range(3)]
    acknowledged: dict[str, int] = {}
    enough = asyncio.Event()

    async def compete(worker: int) -> None:
        """Claim the next place of each subject in turn, from what one reads, until one has won often enough."""
        won = 0
        attempt = 0
        while won < 40:
            attempt += 1
            subject = places[attempt % len(places)]
            try:
                last = await log.last(subject)
            except LogUnavailable:
                continue
            expected = last.seq if last else 0
            event_id = f"{worker}-{attempt}"
            outcome = await recorder.settle(record(subject, event_id, expected=expected, data=expected))
            assert not isinstance(outcome, Unanswered)
            if isinstance(outcome, Appended):
                won += 1
                acknowledged[event_id] = outcome.seq
                if len(acknowledged) >= 60:
                    enough.set()

    killed: list[NatsServer] = []

    async def kill_leader() -> None:
        await enough.wait()
        info = await connection.js.stream_info(LOG_STREAM)
        assert info.cluster is not None
        assert info.cluster.leader is not None
        leader = nats_cluster.named(info.cluster.leader)
        leader.kill()
        killed.append(leader)

    try:
        async with asyncio.timeout(120):
            await asyncio.gather(kill_leader(), *(compete(worker) for worker in range(6)))
        chains = [await log.read(place) for place in places]
    finally:
        for server in killed:
            await asyncio.to_thread(server.start)

    stored = {msgspec.json.decode(one.body)["id"]: one.seq for chain in chains for one in chain}
    assert stored == acknowledged
    for chain in chains:
        rested_on = [msgspec.json.decode(one.body)["data"] for one in chain]
        assert rested_on == [0, *(one.seq for one in chain)][:-1]
