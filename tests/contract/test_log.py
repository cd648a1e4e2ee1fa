"""What every adapter of the log promises: in memory in both orders of checks, on one server, on a cluster of three."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import pytest

from gpukeeper.events.connection import connect
from gpukeeper.events.errors import WaitTimedOut
from gpukeeper.events.jetstream import JetStreamLog
from gpukeeper.events.log import Appended, Log, Record, Refused, Stored
from gpukeeper.events.memory import MemoryLog
from gpukeeper.events.streams import SiteStreams, log_config
from support.nats import NatsCluster, NatsServer
from support.records import record
from support.wait import until_answered

JOB = "gpuq.ev.job.a"
OTHER = "gpuq.ev.job.b"
DEVICE = "gpuq.ev.device.host1.GPU-1"
SUBMIT = "gpuq.submit.tests"

LIMIT = 1_048_576
WITHIN_S = 20.0

#: Adapters that look for duplicates before they compare sequences.
DUPLICATES_FIRST = ("memory-duplicates-first", "r3")


@pytest.fixture(
    params=[
        "memory-sequence-first",
        "memory-duplicates-first",
        pytest.param("r1", marks=pytest.mark.processes),
        pytest.param("r3", marks=pytest.mark.processes),
    ]
)
def adapter(request: pytest.FixtureRequest) -> str:
    return cast("str", request.param)


@pytest.fixture
async def log(adapter: str, request: pytest.FixtureRequest) -> AsyncIterator[Log]:
    """An empty log."""
    if adapter.startswith("memory"):
        now_ns = iter(range(1_000, 10_000_000))
        yield MemoryLog(
            now_ns=lambda: next(now_ns),
            check_order="duplicates_first" if adapter in DUPLICATES_FIRST else "sequence_first",
            message_bytes_max=LIMIT,
        )
        return
    server: NatsServer | NatsCluster = request.getfixturevalue("nats_server" if adapter == "r1" else "nats_cluster")
    connection = await connect(server.settings(), name="contract")
    config = log_config(SiteStreams(replicas=1 if adapter == "r1" else 3))
    await connection.js.add_stream(config)
    log = JetStreamLog(connection)
    await until_answered(lambda: takes_appends(log), "the stream takes appends through every server")
    yield log
    await connection.js.delete_stream(cast("str", config.name))
    await connection.close()


async def takes_appends(log: Log) -> bool:
    """Whether the server that we are connected to knows of the stream yet. Stores nothing."""
    outcome = await log.append(record(JOB, "probe", expected=1_000_000))
    return isinstance(outcome, Refused) and outcome.code == "stale"


class Reader:
    """What a follower handed on."""

    def __init__(self) -> None:
        self.stored: list[Stored] = []

    def __call__(self, stored: Stored) -> None:
        self.stored.append(stored)

    @property
    def seqs(self) -> list[int]:
        return [stored.seq for stored in self.stored]


async def append_all(log: Log, *records: Record) -> list[int]:
    """Append and return the sequences."""
    seqs: list[int] = []
    for one in records:
        outcome = await log.append(one)
        assert isinstance(outcome, Appended), outcome
        seqs.append(outcome.seq)
    return seqs


# --- append


async def test_an_append_that_expects_an_empty_subject_is_stored_when_it_is_empty(log: Log) -> None:
    await append_all(log, record(OTHER, "e1"))

    assert await log.append(record(JOB, "e2", expected=0)) == Appended(2)


async def test_an_append_that_expects_the_last_sequence_of_its_subject_is_stored(log: Log) -> None:
    await append_all(log, record(JOB, "e1", expected=0), record(OTHER, "e2", expected=0))

    assert await log.append(record(JOB, "e3", expected=1)) == Appended(3)


async def test_an_append_without_a_condition_is_stored_whatever_came_before(log: Log) -> None:
    assert await append_all(log, *(record(SUBMIT, f"e{n}") for n in range(3))) == [1, 2, 3]


@pytest.mark.parametrize("expected", [0, 1, 2, 4, 99])
async def test_an_append_on_a_sequence_that_is_not_the_subjects_last_is_refused_as_stale(
    log: Log, expected: int
) -> None:
    """The subject's last is 3; 2 is another subject's, 1 is passed, 4 and 99 are not there yet."""
    await append_all(log, record(JOB, "e1"), record(OTHER, "e2"), record(JOB, "e3"))

    outcome = await log.append(record(JOB, "e4", expected=expected))

    assert isinstance(outcome, Refused)
    assert outcome.code == "stale"
    assert await log.last_seq() == 3


async def test_of_many_appends_on_one_sequence_exactly_one_is_stored(log: Log) -> None:
    outcomes = await asyncio.gather(*(log.append(record(DEVICE, f"e{n}", expected=0)) for n in range(20)))

    refused = [outcome.code for outcome in outcomes if isinstance(outcome, Refused)]
    assert sum(isinstance(outcome, Appended) for outcome in outcomes) == 1
    assert len(refused) == 19
    assert set(refused) <= {"stale", "in_flight"}
    assert len(await log.read(DEVICE)) == 1


async def test_a_repeated_event_id_is_answered_with_the_place_of_the_first_and_not_stored_again(log: Log) -> None:
    await append_all(log, record(SUBMIT, "e1"), record(SUBMIT, "e2"))

    assert await log.append(record(SUBMIT, "e1")) == Appended(1)
    assert await log.last_seq() == 2


async def test_a_repeated_event_id_counts_on_whatever_subject_and_with_whatever_body(log: Log) -> None:
    await append_all(log, record(JOB, "e1", data="first"))

    assert await log.append(record(OTHER, "e1", data="second")) == Appended(1)
    assert await log.read(OTHER) == []


async def test_a_repeated_append_whose_condition_has_passed_is_answered_in_the_adapters_order_of_checks(
    log: Log, adapter: str
) -> None:
    """One server refuses what it has stored itself; a cluster says where it is. Neither stores it twice."""
    once = record(JOB, "e1", expected=0)
    await append_all(log, once)

    outcome = await log.append(once)

    if adapter in DUPLICATES_FIRST:
        assert outcome == Appended(1)
    else:
        assert isinstance(outcome, Refused)
        assert outcome.code == "stale"
    assert await log.last_seq() == 1


async def test_a_redelivered_publish_changes_nothing_for_readers(log: Log) -> None:
    """C50: what is published again while it is remembered is neither stored nor handed on again."""
    reader = Reader()
    follower = await log.follow(reader, after=0)
    claim = record(DEVICE, "claim", expected=0)
    await append_all(log, claim)

    for _ in range(5):
        await log.append(claim)
    (after,) = await append_all(log, record(JOB, "after"))

    await follower.wait_seen(after, WITHIN_S)
    assert reader.seqs == [1, 2]
    assert [stored.seq for stored in await log.read(DEVICE)] == [1]
    await follower.stop()


@pytest.mark.parametrize("over", [-10, 1, 100_000])
async def test_a_message_above_the_limit_is_refused_and_the_log_goes_on(log: Log, adapter: str, over: int) -> None:
    """On a server the limit holds for body and headers together: 10 bytes below it are too many there."""
    big = Record(subject=SUBMIT, body=b"x" * (LIMIT + over), event_id="e1")

    outcome = await log.append(big)

    if over < 0 and adapter.startswith("memory"):
        assert outcome == Appended(1)
    else:
        assert isinstance(outcome, Refused)
        assert outcome.code == "too_large"
    assert isinstance(await log.append(record(SUBMIT, "e2")), Appended)


async def test_a_message_just_below_the_limit_can_be_read_in_every_way(log: Log) -> None:
    body = b"x" * (LIMIT - 500)
    reader = Reader()
    await append_all(log, Record(subject=SUBMIT, body=body, event_id="e1"))

    follower = await log.follow(reader, after=0)
    await follower.wait_seen(1, WITHIN_S)

    last, got, (read,) = await log.last(SUBMIT), await log.get(1), await log.read(SUBMIT)
    assert last == got == read == reader.stored[0]
    assert read.body == body
    await follower.stop()


# --- read


@pytest.mark.parametrize("body", [b"", b"\x00\xff\r\n\xe2\x80\xa8", b"{}"])
async def test_what_is_read_is_what_was_appended_with_a_place_and_a_time(log: Log, body: bytes) -> None:
    await append_all(log, Record(subject=JOB, body=body, event_id="e1"), record(OTHER, "e2"))

    first, second = await log.get(1), await log.get(2)

    assert first is not None
    assert second is not None
    assert (first.seq, first.subject, first.body) == (1, JOB, body)
    assert 0 < first.stored_ns <= second.stored_ns


async def test_an_empty_log_has_nothing_anywhere(log: Log) -> None:
    assert await log.last_seq() == 0
    assert await log.last(JOB) is None
    assert await log.read(JOB) == []


@pytest.mark.parametrize("seq", [-1, 0, 2, 99])
async def test_a_sequence_that_holds_nothing_is_none(log: Log, seq: int) -> None:
    await append_all(log, record(JOB, "e1"))

    assert await log.get(seq) is None


async def test_last_is_the_newest_message_of_that_subject_alone(log: Log) -> None:
    await append_all(log, record(JOB, "e1"), record(JOB, "e2"), record(OTHER, "e3"))

    last = await log.last(JOB)

    assert last is not None
    assert last.seq == 2


@pytest.mark.parametrize(("after", "expected"), [(0, [1, 3, 4]), (1, [3, 4]), (2, [3, 4]), (4, []), (99, [])])
async def test_read_gives_the_subjects_messages_above_a_sequence_in_order(
    log: Log, after: int, expected: list[int]
) -> None:
    await append_all(log, record(JOB, "e1"), record(OTHER, "e2"), record(JOB, "e3"), record(JOB, "e4"))

    assert [stored.seq for stored in await log.read(JOB, after=after)] == expected


# --- follow


async def test_a_follower_gets_the_history_and_then_what_comes_once_each_in_order(log: Log) -> None:
    reader = Reader()
    await append_all(log, *(record(SUBMIT, f"h{n}") for n in range(50)))

    follower = await log.follow(reader, after=0)
    seqs = await append_all(log, *(record(JOB, f"l{n}") for n in range(50)))
    await follower.wait_seen(seqs[-1], WITHIN_S)

    assert reader.seqs == list(range(1, 101))
    assert follower.seen == 100
    assert reader.stored[60] == await log.get(61)
    await follower.stop()


@pytest.mark.parametrize(("after", "expected"), [(0, [1, 2, 3, 4]), (2, [3, 4]), (3, [4])])
async def test_a_follower_begins_after_the_sequence_it_is_given(log: Log, after: int, expected: list[int]) -> None:
    reader = Reader()
    await append_all(log, *(record(JOB, f"e{n}") for n in range(3)))

    follower = await log.follow(reader, after=after)
    assert follower.seen == after or follower.seen in expected
    (last,) = await append_all(log, record(JOB, "live"))
    await follower.wait_seen(last, WITHIN_S)

    assert reader.seqs == expected
    await follower.stop()


@pytest.mark.parametrize(
    ("subjects", "expected"),
    [
        ((JOB,), [1, 5]),
        (("gpuq.ev.job.*",), [1, 2, 5, 6]),
        (("gpuq.ev.>",), [1, 2, 3, 5, 6, 7]),
        ((JOB, "gpuq.ev.device.host1.*"), [1, 3, 5, 7]),
    ],
)
async def test_a_follower_of_subjects_hears_of_nothing_else(
    log: Log, subjects: tuple[str, ...], expected: list[int]
) -> None:
    reader = Reader()
    places = (JOB, OTHER, DEVICE, SUBMIT)
    await append_all(log, *(record(subject, f"h-{subject}") for subject in places))

    follower = await log.follow(reader, after=0, subjects=subjects)
    await append_all(log, *(record(subject, f"l-{subject}") for subject in places))
    await follower.wait_seen(expected[-1], WITHIN_S)

    assert reader.seqs == expected
    await follower.stop()


@pytest.mark.parametrize(
    ("subjects", "expected"),
    [
        ((), [3, 4, 5, 6, 7]),
        ((JOB,), [4, 6, 7]),
        ((JOB, OTHER), [3, 4, 5, 6, 7]),
        (("gpuq.ev.job.*",), [3, 4, 5, 6, 7]),
    ],
)
async def test_newest_only_gives_the_newest_of_each_subject_and_then_everything_that_comes(
    log: Log, subjects: tuple[str, ...], expected: list[int]
) -> None:
    reader = Reader()
    await append_all(log, record(OTHER, "e1"), record(JOB, "e2"), record(OTHER, "e3"), record(JOB, "e4"))

    follower = await log.follow(reader, after=0, subjects=subjects, newest_only=True)
    await follower.wait_seen(4, WITHIN_S)
    await append_all(log, record(OTHER, "e5"), record(JOB, "e6"), record(JOB, "e7"))
    await follower.wait_seen(7, WITHIN_S)

    assert reader.seqs == expected
    await follower.stop()


async def test_newest_only_after_a_sequence_gives_everything_above_it(log: Log) -> None:
    reader = Reader()
    await append_all(log, *(record(JOB, f"e{n}") for n in range(4)))

    follower = await log.follow(reader, after=1, newest_only=True)
    await follower.wait_seen(4, WITHIN_S)

    assert reader.seqs == [2, 3, 4]
    await follower.stop()


async def test_two_followers_each_get_everything(log: Log) -> None:
    one, two = Reader(), Reader()
    followers = [await log.follow(reader, after=0) for reader in (one, two)]

    await append_all(log, *(record(JOB, f"e{n}") for n in range(5)))

    for follower in followers:
        await follower.wait_seen(5, WITHIN_S)
    assert one.seqs == two.seqs == [1, 2, 3, 4, 5]
    for follower in followers:
        await follower.stop()


async def test_a_long_history_of_large_messages_arrives_whole(log: Log) -> None:
    """Enough bytes that the server waits for the reader in between."""
    reader = Reader()
    count = 400
    await asyncio.gather(
        *(log.append(Record(subject=SUBMIT, body=b"x" * 50_000, event_id=f"e{n}")) for n in range(count))
    )

    follower = await log.follow(reader, after=0)
    await follower.wait_seen(count, WITHIN_S)

    assert reader.seqs == list(range(1, count + 1))
    await follower.stop()


async def test_waiting_for_what_was_seen_returns_at_once(log: Log) -> None:
    follower = await log.follow(Reader(), after=0)
    await append_all(log, record(JOB, "e1"))
    await follower.wait_seen(1, WITHIN_S)

    await follower.wait_seen(1, 0)
    await follower.wait_seen(0, 0)

    await follower.stop()


async def test_several_can_wait_for_different_sequences(log: Log) -> None:
    follower = await log.follow(Reader(), after=0)
    waits = [asyncio.ensure_future(follower.wait_seen(seq, WITHIN_S)) for seq in (3, 1, 2, 1)]

    await append_all(log, *(record(JOB, f"e{n}") for n in range(3)))

    await asyncio.gather(*waits)
    await follower.stop()


async def test_waiting_for_what_does_not_come_ends_with_how_far_it_got(log: Log) -> None:
    follower = await log.follow(Reader(), after=0)
    await append_all(log, record(JOB, "e1"))
    await follower.wait_seen(1, WITHIN_S)

    with pytest.raises(WaitTimedOut) as raised:
        await follower.wait_seen(2, 0.01)

    assert raised.value.fields == {"seq": 2, "seen": 1}
    await follower.stop()


async def test_a_sequence_that_the_filter_leaves_out_is_passed_with_the_next_that_it_lets_in(log: Log) -> None:
    follower = await log.follow(Reader(), after=0, subjects=(JOB,))
    (left_out,) = await append_all(log, record(OTHER, "e1"))

    with pytest.raises(WaitTimedOut):
        await follower.wait_seen(left_out, 0.01)
    await append_all(log, record(JOB, "e2"))
    await follower.wait_seen(left_out, WITHIN_S)

    assert follower.seen == 2
    await follower.stop()


async def test_a_stopped_follower_hands_on_nothing_and_can_be_stopped_again(log: Log) -> None:
    stopped, going = Reader(), Reader()
    first = await log.follow(stopped, after=0)
    second = await log.follow(going, after=0)
    await append_all(log, record(JOB, "e1"))
    await first.wait_seen(1, WITHIN_S)

    await first.stop()
    await first.stop()
    await append_all(log, record(JOB, "e2"))
    await second.wait_seen(2, WITHIN_S)

    assert stopped.seqs == [1]
    assert first.broken.cancelled()
    await second.stop()


async def test_a_reader_that_raises_breaks_its_follower_and_nothing_else(log: Log) -> None:
    handed_on: list[int] = []
    going = Reader()

    def refuse_the_second(stored: Stored) -> None:
        handed_on.append(stored.seq)
        if stored.seq == 2:
            raise ValueError("cannot fold")

    broken = await log.follow(refuse_the_second, after=0)
    whole = await log.follow(going, after=0)
    await append_all(log, *(record(JOB, f"e{n}") for n in range(3)))
    await whole.wait_seen(3, WITHIN_S)

    with pytest.raises(ValueError, match="cannot fold"):
        await asyncio.wait_for(broken.broken, WITHIN_S)
    assert handed_on == [1, 2]
    assert broken.seen == 1
    for follower in (broken, whole):
        await follower.stop()
