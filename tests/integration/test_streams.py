"""Setting up a site's streams on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats.js.errors
import pytest
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig, StreamSource, SubjectTransform

from gpukeeper.events import subjects
from gpukeeper.events.connection import Connection, NatsSettings, connect
from gpukeeper.events.errors import IncompatibleStream, LogUnavailable
from gpukeeper.events.jetstream import JetStreamLog
from gpukeeper.events.log import Appended, Refused
from gpukeeper.events.streams import SiteStreams, beats_config, ensure_site, log_config, problems
from support.nats import NatsCluster, NatsServer
from support.records import record

pytestmark = pytest.mark.processes

ALL = [subjects.BEATS_STREAM, subjects.LOG_STREAM, "KV_GPUQ_LEASE", "OBJ_GPUQ_PAYLOADS", "OBJ_GPUQ_SNAPSHOTS"]


async def settings_of_all(connection: Connection) -> dict[str | None, dict[str, object]]:
    return {info.config.name: info.config.as_dict() for info in await connection.js.streams_info()}


async def test_a_site_is_set_up_with_every_stream_and_bucket(connection: Connection) -> None:
    await ensure_site(connection, SiteStreams(beats_max_age_s=3_600, payload_ttl_s=60))

    found = await settings_of_all(connection)
    assert sorted(name or "" for name in found) == sorted(ALL)
    log = found[subjects.LOG_STREAM]
    assert log["deny_delete"] is True
    assert log["deny_purge"] is True
    assert log["allow_direct"] is True
    assert not log["allow_rollup_hdrs"]
    assert log["compression"] == "s2"
    assert log["max_age"] == 0
    assert log["max_bytes"] == -1
    assert found[subjects.BEATS_STREAM]["max_age"] == 3_600 * 1_000_000_000
    assert log["retention"] == "limits"


async def test_setting_up_again_changes_nothing(connection: Connection) -> None:
    await ensure_site(connection)
    before = await settings_of_all(connection)
    log = JetStreamLog(connection)
    assert await log.append(record(subjects.SITE, "e1", expected=0)) == Appended(1)

    await ensure_site(connection)
    await ensure_site(connection, SiteStreams(beats_max_age_s=60))

    assert await settings_of_all(connection) == before
    assert await log.last_seq() == 1


async def test_many_processes_can_set_up_at_once(nats_settings: NatsSettings) -> None:
    connections = [await connect(nats_settings, name=f"setup-{n}") for n in range(8)]

    await asyncio.gather(*(ensure_site(connection) for connection in connections))

    assert sorted(name or "" for name in await settings_of_all(connections[0])) == sorted(ALL)
    for connection in connections:
        await connection.close()


def other_log(**changes: Any) -> StreamConfig:
    return log_config(SiteStreams()).evolve(**changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"deny_delete": False}, "deny_delete is False"),
        ({"deny_purge": False}, "deny_purge is False"),
        ({"deny_purge": False, "allow_rollup_hdrs": True}, "allow_rollup_hdrs is True"),
        ({"allow_msg_ttl": True}, "allow_msg_ttl is True"),
        ({"max_msgs_per_subject": 5}, "max_msgs_per_subject is 5"),
        ({"retention": RetentionPolicy.INTEREST}, "retention is"),
        ({"retention": RetentionPolicy.WORK_QUEUE}, "retention is"),
        ({"no_ack": True}, "no_ack is True"),
        ({"subjects": ["gpuq.ev.>"]}, "subjects lacks gpuq.cmd.*, gpuq.submit.*"),
        ({"duplicate_window": 1}, "duplicate_window is 1 s"),
        ({"max_age": 3_600}, "max_age is 3600"),
        ({"max_bytes": 1_000_000}, "max_bytes is 1000000"),
        ({"max_msgs": 100}, "max_msgs is 100"),
        ({"max_msg_size": 1_000}, "max_msg_size is 1000"),
        ({"max_consumers": 4}, "max_consumers is 4"),
        ({"storage": StorageType.MEMORY}, "storage is"),
        ({"sources": [StreamSource(name="OTHER")]}, "sources is"),
        (
            {"subject_transform": SubjectTransform(src="gpuq.cmd.*", dest="gpuq.ev.{{wildcard(1)}}")},
            "subject_transform",
        ),
    ],
)
async def test_a_log_with_a_setting_that_cannot_work_is_refused_with_that_setting(
    connection: Connection, changes: dict[str, Any], named: str
) -> None:
    await connection.js.add_stream(other_log(**changes))

    with pytest.raises(IncompatibleStream) as raised:
        await ensure_site(connection)

    assert subjects.LOG_STREAM in raised.value.message
    assert named in raised.value.message
    assert any(named in problem for problem in await problems(connection))


@pytest.mark.parametrize(
    "changes",
    [{"compression": "none"}, {"discard": DiscardPolicy.NEW}, {"allow_direct": False}, {"description": "ours"}, {}],
)
async def test_a_log_that_differs_in_what_does_not_matter_is_left_as_it_is(
    connection: Connection, changes: dict[str, Any]
) -> None:
    await connection.js.add_stream(other_log(**changes))
    before = (await settings_of_all(connection))[subjects.LOG_STREAM]

    await ensure_site(connection)

    assert (await settings_of_all(connection))[subjects.LOG_STREAM] == before


async def test_a_log_that_mirrors_another_stream_is_refused(connection: Connection) -> None:
    await connection.js.add_stream(StreamConfig(name="OTHER", subjects=["other"]))
    await connection.js.add_stream(StreamConfig(name=subjects.LOG_STREAM, mirror=StreamSource(name="OTHER")))

    with pytest.raises(IncompatibleStream, match="mirror is"):
        await ensure_site(connection)


async def test_a_log_that_was_sealed_is_refused(connection: Connection) -> None:
    await ensure_site(connection)
    await connection.js.update_stream(other_log(sealed=True))

    with pytest.raises(IncompatibleStream, match="sealed is True"):
        await ensure_site(connection)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"retention": RetentionPolicy.INTEREST}, "retention is"),
        ({"no_ack": True}, "no_ack is True"),
        ({"max_msg_size": 1_000}, "max_msg_size is 1000"),
        ({"max_consumers": 4}, "max_consumers is 4"),
        ({"sources": [StreamSource(name="OTHER")]}, "sources is"),
    ],
)
async def test_beats_that_could_not_be_written_or_read_are_refused(
    connection: Connection, changes: dict[str, Any], named: str
) -> None:
    await connection.js.add_stream(beats_config(SiteStreams()).evolve(**changes))

    with pytest.raises(IncompatibleStream, match=f"{subjects.BEATS_STREAM}.*{named}"):
        await ensure_site(connection)


@pytest.mark.parametrize(
    "changes",
    [{"max_age": 60}, {"max_bytes": 1_000_000}, {"storage": StorageType.MEMORY}, {"max_msgs_per_subject": 5}],
)
async def test_beats_with_limits_of_their_own_are_left_as_they_are(
    connection: Connection, changes: dict[str, Any]
) -> None:
    await connection.js.add_stream(beats_config(SiteStreams()).evolve(**changes))
    before = (await settings_of_all(connection))[subjects.BEATS_STREAM]

    await ensure_site(connection)

    assert (await settings_of_all(connection))[subjects.BEATS_STREAM] == before


async def test_another_stream_on_the_same_subjects_is_named_as_what_is_in_the_way(connection: Connection) -> None:
    await connection.js.add_stream(StreamConfig(name="MINE", subjects=["gpuq.ev.job.*"]))

    with pytest.raises(IncompatibleStream, match=r"cannot create stream GPUQ_LOG: .*overlap"):
        await ensure_site(connection)


async def test_more_copies_than_there_are_servers_is_an_error_that_says_so(connection: Connection) -> None:
    with pytest.raises(IncompatibleStream, match="replicas"):
        await ensure_site(connection, SiteStreams(replicas=3))


async def test_a_site_that_is_not_set_up_has_its_streams_named_as_missing(connection: Connection) -> None:
    found = await problems(connection)

    assert [problem.split()[1] for problem in found] == [subjects.LOG_STREAM, subjects.BEATS_STREAM]


async def test_a_site_that_is_set_up_has_no_problems(connection: Connection) -> None:
    await ensure_site(connection)

    assert await problems(connection) == []


async def test_nobody_can_erase_what_is_in_the_log(connection: Connection) -> None:
    """Neither by its API nor by a header of a message."""
    await ensure_site(connection)
    log = JetStreamLog(connection)
    await log.append(record(subjects.SITE, "e1"))

    with pytest.raises(nats.js.errors.APIError):
        await connection.js.purge_stream(subjects.LOG_STREAM)
    with pytest.raises(nats.js.errors.APIError):
        await connection.js.delete_msg(subjects.LOG_STREAM, 1)
    with pytest.raises(nats.js.errors.APIError):
        await connection.js.publish(subjects.SITE, b"{}", headers={"Nats-Rollup": "all"})

    assert await log.last_seq() == 1
    assert await log.get(1) is not None


@pytest.fixture
async def on_cluster(nats_cluster: NatsCluster) -> AsyncIterator[Connection]:
    opened = await connect(nats_cluster.settings(), name="tests")
    yield opened
    for info in await opened.js.streams_info():
        assert info.config.name is not None
        await opened.js.delete_stream(info.config.name)
    await opened.close()


async def test_on_a_cluster_everything_has_the_copies_that_are_asked_for(on_cluster: Connection) -> None:
    await ensure_site(on_cluster, SiteStreams(replicas=3))

    found = await settings_of_all(on_cluster)
    assert {name: config["num_replicas"] for name, config in found.items()} == dict.fromkeys(ALL, 3)


async def test_a_log_that_takes_no_more_answers_full(connection: Connection) -> None:
    config = other_log(max_msgs=2, discard=DiscardPolicy.NEW)
    await connection.js.add_stream(config)
    log = JetStreamLog(connection)
    outcomes = [await log.append(record(subjects.SITE, f"e{n}")) for n in range(3)]

    assert outcomes[:2] == [Appended(1), Appended(2)]
    assert isinstance(outcomes[2], Refused)
    assert outcomes[2].code == "full"


async def test_a_stream_on_other_subjects_takes_nothing(connection: Connection) -> None:
    outcome = await JetStreamLog(connection).append(record(subjects.SITE, "e1"))

    assert outcome == Refused("unavailable", "no stream listens on this subject")


async def test_a_server_without_jetstream_is_a_log_that_is_not_available(tmp_path: Path) -> None:
    server = NatsServer(tmp_path, accounts="BARE { users: [ { user: bare, password: b } ] }")
    try:
        server.start()
        opened = await connect(NatsSettings(servers=(server.url,), user="bare", password="b"), name="bare")
        with pytest.raises(LogUnavailable):
            await ensure_site(opened)
        await opened.close()
    finally:
        server.stop()


async def test_processes_that_want_other_limits_can_set_up_at_once(nats_settings: NatsSettings) -> None:
    connections = [await connect(nats_settings, name=f"setup-{n}") for n in range(6)]

    await asyncio.gather(
        *(
            ensure_site(connection, SiteStreams(beats_max_age_s=n + 3_600, lease_ttl_s=n + 5, payload_ttl_s=n + 60))
            for n, connection in enumerate(connections)
        )
    )

    assert sorted(name or "" for name in await settings_of_all(connections[0])) == sorted(ALL)
    for connection in connections:
        await connection.close()
