"""Which events of the log somebody asked for."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from gpukeeper.cli.errors import WrongUsage
from gpukeeper.cli.logrange import Filter, parse_moment, seq_before
from gpukeeper.events.codec import Event, decode, encode
from gpukeeper.events.device import Claimed, Released
from gpukeeper.events.errors import InvalidId
from gpukeeper.events.fact import Fact
from gpukeeper.events.host import Left
from gpukeeper.events.job import Started
from gpukeeper.events.log import Stored
from gpukeeper.events.memory import MemoryLog
from support.records import record

NOW = datetime(2025, 10, 19, 14, 0, 0, tzinfo=UTC)


def event(subject: str, fact: Fact, *, actor: str | None = None, correlationid: str | None = None) -> Event:
    body = encode(
        fact,
        event_id="1",
        source="/tests",
        subject="x",
        time="2025-10-19T14:00:00Z",
        actor=actor,
        correlationid=correlationid,
    )
    return decode(Stored(1, 1, subject, body))


CLAIMED = event(
    "gpuq.ev.device.box.gpu0",
    Claimed(host="box", device="gpu0", slot=0, job="j1", attempt=1, route_seq=1, boot_id="b", instance_id="i"),
)
STARTED = event("gpuq.ev.job.j1", Started(job="j1", epoch=1, attempt=1), actor="ann")
LEFT = event("gpuq.ev.host.box", Left(host="box", instance_id="i"), correlationid="j1")


@pytest.mark.parametrize(
    ("wanted", "seen"),
    [
        (Filter(), (True, True, True)),
        (Filter(job="j1"), (True, True, True)),
        (Filter(job="j2"), (False, False, False)),
        (Filter(device="gpu0"), (True, False, False)),
        (Filter(device="box/gpu0"), (True, False, False)),
        (Filter(device="other/gpu0"), (False, False, False)),
        (Filter(host="box"), (True, False, True)),
        (Filter(producer="ann"), (False, True, False)),
        (Filter(types=("device.*",)), (True, False, False)),
        (Filter(types=("gpuq.host.left.v1", "job.*")), (False, True, True)),
        (Filter(job="j1", host="box", types=("device.claimed",)), (True, False, False)),
    ],
)
def test_all_that_is_asked_for_must_hold(wanted: Filter, seen: tuple[bool, bool, bool]) -> None:
    assert tuple(wanted.matches(each) for each in (CLAIMED, STARTED, LEFT)) == seen


def test_only_its_own_submission_is_of_a_job() -> None:
    submitted = [decode(Stored(seq, 1, "gpuq.submit.lab", b"{}")) for seq in (4, 5)]

    assert [Filter(job="j1", submission_seq=5).matches(each) for each in submitted] == [False, True]
    assert [Filter(producer="lab").matches(each) for each in submitted] == [True, True]


def test_names_that_cannot_stand_in_a_subject_are_refused() -> None:
    for wanted in (Filter(job="a.b"), Filter(device="a b"), Filter(device="*/gpu0"), Filter(host=">")):
        with pytest.raises(InvalidId):
            wanted.patterns()


def test_the_patterns_of_a_filter_do_not_overlap_and_hold_what_it_matches() -> None:
    assert Filter(device="gpu0").patterns() == ("gpuq.ev.device.*.gpu0",)
    assert Filter(device="box/gpu0").patterns() == ("gpuq.ev.device.box.gpu0",)
    assert Filter(types=("job.*",)).patterns() == ()
    released = event("gpuq.ev.device.box.gpu0", Released(host="box", device="gpu0", epoch=1, job="j1"))
    assert Filter(job="j1").matches(released)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("1234", 1234),
        ("10m", datetime(2025, 10, 19, 13, 50, tzinfo=UTC)),
        ("1.5h", datetime(2025, 10, 19, 12, 30, tzinfo=UTC)),
        ("2025-10-19T12:00:00Z", datetime(2025, 10, 19, 12, tzinfo=UTC)),
        ("2025-10-19T14:00:00+02:00", datetime(2025, 10, 19, 12, tzinfo=UTC)),
    ],
)
def test_moments_are_sequences_times_or_times_ago(text: str, parsed: int | datetime) -> None:
    assert parse_moment(text, "--since", NOW) == parsed


@pytest.mark.parametrize("text", ["", "yesterday", "10 m", "-5", "10w"])
def test_other_moments_are_refused_with_examples(text: str) -> None:
    with pytest.raises(WrongUsage, match=r"--since .*: must be a sequence"):
        parse_moment(text, "--since", NOW)


async def test_a_time_is_found_in_the_log_by_halving() -> None:
    times = iter(range(10, 1010, 10))
    log = MemoryLog(now_ns=lambda: next(times) * 1_000_000_000)
    for number in range(100):
        await log.append(record("tests.a", str(number)))

    def at(seconds: float) -> datetime:
        return datetime.fromtimestamp(seconds, UTC)

    found = [await seq_before(log, at(seconds)) for seconds in (0, 10, 10.5, 505, 1000, 5000)]
    assert found == [0, 0, 1, 50, 99, 100]
