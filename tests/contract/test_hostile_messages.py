"""Messages that no client library would send and the server stores all the same: reading goes on behind them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from gpukeeper.events import subjects
from gpukeeper.events.connection import Connection, NatsSettings
from gpukeeper.events.jetstream import JetStreamLog
from gpukeeper.events.log import Appended, Stored
from gpukeeper.events.streams import SiteStreams, log_config
from gpukeeper.projections.runner import SiteProjection
from gpukeeper.projections.snapshot import encode_state
from gpukeeper.scheduler.accept import decide_submissions
from gpukeeper.scheduler.config import SchedulerConfig
from gpukeeper.scheduler.live import Live
from support.rawnats import publish_raw
from support.records import record
from support.wait import until_answered

pytestmark = pytest.mark.processes

WITHIN_S = 20.0

#: What is odd -> (last token of the subject, headers).
HOSTILE: dict[str, tuple[bytes, bytes | None]] = {
    "a subject that is not UTF-8": (b"\xff", None),
    "a subject with half a character": (b"a\xe2\x82", None),
    "a subject with a vertical tab": (b"a\x0b1", None),
    "a subject with a form feed": (b"a\x0cb", None),
    "a subject with an escape sequence": (b"\x1b[31mred", None),
    "a subject with a null": (b"\x00", None),
    "a subject of thousands of characters": (b"a" * 3_900, None),
    "headers that are none": (b"web", b"X"),
    "headers that end in their first line": (b"web", b"NATS/1.0"),
    "a status that is not UTF-8": (b"web", b"NATS/1.0 \xff\xff\xff"),
    "a description that is not UTF-8": (b"web", b"NATS/1.0 100 \xff\xff\r\n\r\n"),
    "a header that is not UTF-8": (b"web", b"NATS/1.0\r\n\xff: \xff\r\n\r\n"),
    "a status of the server's": (b"web", b"NATS/1.0 503\r\n\r\n"),
}
BODY = b'{"model":"m","prompt":"p"}'


@pytest.fixture
async def log(connection: Connection) -> AsyncIterator[JetStreamLog]:
    await connection.js.add_stream(log_config(SiteStreams()))
    yield JetStreamLog(connection)
    assert connection.connected
    assert not connection.closed.done()


async def stored_raw(log: JetStreamLog, settings: NatsSettings, token: bytes, headers: bytes | None) -> int:
    """Publish as a submission, and return the sequence that it got."""
    before = await log.last_seq()
    await publish_raw(settings, b"gpuq.submit." + token, BODY, headers=headers)

    async def there() -> bool:
        return await log.last_seq() == before + 1

    await until_answered(there, "the message is stored")
    return before + 1


@pytest.mark.parametrize(("token", "headers"), HOSTILE.values(), ids=HOSTILE)
async def test_a_follower_hands_it_on_and_goes_on_behind_it(
    log: JetStreamLog, nats_settings: NatsSettings, connection: Connection, token: bytes, headers: bytes | None
) -> None:
    reconnects: list[bool] = []

    async def reconnected() -> None:
        reconnects.append(True)

    connection.on_reconnect(reconnected)
    live: list[Stored] = []
    follower = await log.follow(live.append, after=0)
    seq = await stored_raw(log, nats_settings, token, headers)
    behind = await log.append(record(subjects.SITE, "behind", expected=0))
    assert behind == Appended(seq + 1)

    await follower.wait_seen(seq + 1, WITHIN_S)
    await follower.stop()
    anew: list[Stored] = []
    again = await log.follow(anew.append, after=0)
    await again.wait_seen(seq + 1, WITHIN_S)
    await again.stop()

    assert live == anew
    assert [stored.seq for stored in live] == [1, 2]
    assert live[0].body == BODY
    assert live[0].subject.startswith(subjects.SUBMIT_PREFIX)
    read = await log.get(seq)
    assert read is not None
    assert read.body == BODY
    assert not reconnects


async def test_the_site_is_folded_over_all_of_them_and_each_gets_one_answer_that_can_be_stored(
    log: JetStreamLog, nats_settings: NatsSettings
) -> None:
    for token, headers in HOSTILE.values():
        await stored_raw(log, nats_settings, token, headers)
    last = await log.append(record(subjects.SITE, "behind", expected=0))
    assert isinstance(last, Appended)
    projection = SiteProjection(log)

    await asyncio.wait_for(projection.start(), WITHIN_S)

    site = projection.site
    assert site.seq == last.seq
    assert list(site.submissions) == list(range(1, last.seq))
    assert encode_state(site)
    answers = decide_submissions(site, Live(), SchedulerConfig(), {})
    assert [answer.fact.TYPE for answer in answers] == [
        "gpuq.job.rejected.v1" if headers is None else "gpuq.job.accepted.v1" for _, headers in HOSTILE.values()
    ]
    await projection.stop()
