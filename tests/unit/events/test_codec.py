from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpukeeper.events import job
from gpukeeper.events.catalog import FACTS
from gpukeeper.events.codec import Event, Submitted, Unknown, Unreadable, decode, encode, event_id_of
from gpukeeper.events.fact import Fact
from gpukeeper.events.ids import is_token
from gpukeeper.events.log import Stored
from gpukeeper.events.reasons import Reason
from gpukeeper.events.upcasters import Step, upcast
from support.facts import facts_of

SUBJECT = "gpuq.ev.job.j1"


def stored(body: bytes, subject: str = SUBJECT) -> Stored:
    return Stored(seq=7, stored_ns=1_000, subject=subject, body=body)


def enveloped(type_: str, data: object, **attributes: object) -> bytes:
    return json.dumps(
        {
            "specversion": "1.0",
            "id": "e1",
            "source": "/s",
            "type": type_,
            "subject": "j1",
            "time": "2025-10-19T14:00:00Z",
            "data": data,
        }
        | attributes
    ).encode()


@pytest.mark.parametrize("kind", FACTS, ids=lambda kind: kind.TYPE)
@settings(max_examples=30)
@given(st.data())
def test_every_fact_comes_back_as_it_was_written(kind: type[Fact], data: st.DataObject) -> None:
    fact = data.draw(facts_of(kind))
    body = encode(fact, event_id="e1", source="/s", subject="a", time="t", correlationid="c", actor="mo", epoch=3)

    event = decode(stored(body))

    assert event.data == fact
    assert event.envelope is not None
    assert (event.envelope.type, event.envelope.id) == (kind.TYPE, "e1")
    assert (event.envelope.correlationid, event.envelope.causationid, event.envelope.epoch) == ("c", None, 3)
    assert event.seq == 7
    assert event_id_of(body) == "e1"


def test_a_fact_of_an_unknown_type_is_carried_with_its_bytes() -> None:
    body = enveloped("gpuq.job.teleported.v9", {"job": "j1", "to": [1, 2]})

    event = decode(stored(body))

    assert isinstance(event.data, Unknown)
    assert event.data.type == "gpuq.job.teleported.v9"
    assert msgspec.json.decode(event.data.data) == {"job": "j1", "to": [1, 2]}
    assert event.stored.body == body


def test_fields_of_a_newer_version_are_kept_in_the_stored_bytes() -> None:
    body = enveloped(job.Started.TYPE, {"job": "j1", "epoch": 3, "attempt": 1, "mood": "good"}, weather="fair")

    event = decode(stored(body))

    assert event.data == job.Started(job="j1", epoch=3, attempt=1)
    assert msgspec.json.decode(event.stored.body)["data"]["mood"] == "good"
    assert msgspec.json.decode(event.stored.body)["weather"] == "fair"


def test_a_reason_of_a_newer_version_is_carried_as_its_code() -> None:
    """An older reader must still see that the job ended."""
    event = decode(stored(enveloped(job.Unroutable.TYPE, {"job": "j1", "reason": "solar_flare"})))

    assert isinstance(event.data, job.Unroutable)
    assert event.data.reason == "solar_flare"
    assert event.data.reason not in list(Reason)
    assert msgspec.json.decode(msgspec.json.encode(event.data))["reason"] == "solar_flare"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"hello",
        b"{}",
        b"[]",
        b"\xff\xfe",
        enveloped(job.Started.TYPE, {"job": "j1"}),
        enveloped(job.Started.TYPE, {"job": "j1", "epoch": "x", "attempt": 1}),
        enveloped(job.Started.TYPE, None),
        enveloped(job.Unroutable.TYPE, {"job": "j1", "reason": 5}),
        b"[" * 100_000,
        enveloped("unknown", None).replace(b"null", b"[" * 100_000 + b"]" * 100_000),
    ],
)
def test_what_is_no_event_is_unreadable_and_kept(body: bytes) -> None:
    event = decode(stored(body))

    assert isinstance(event.data, Unreadable)
    assert event.data.problem
    assert event.envelope is None
    assert event.stored.body == body


@given(st.binary(max_size=100))
def test_any_bytes_are_decoded_to_something(body: bytes) -> None:
    assert isinstance(decode(stored(body)), Event)
    event_id_of(body)


@pytest.mark.parametrize("body", [b"", b"garbage", b'{"model":"m","prompt":"p"}', enveloped("x", {})])
def test_a_submission_is_carried_unjudged(body: bytes) -> None:
    event = decode(stored(body, "gpuq.submit.cli"))

    assert event.data == Submitted("cli", body)
    assert event.envelope is None


@pytest.mark.parametrize("body", [b"", b"hello", b"{}", b'{"id":"x"}', b"\xff", b"[" * 100_000])
def test_bytes_that_are_no_event_have_no_event_id(body: bytes) -> None:
    assert event_id_of(body) is None


# --- facts of older versions


def rename_v1(data: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "tests.started.v2", {"job": data["name"], "epoch": data["epoch"]}


def count_v2(data: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return job.Started.TYPE, data | {"attempt": 1}


STEPS: dict[str, Step] = {"tests.started.v1": rename_v1, "tests.started.v2": count_v2}


def test_an_old_fact_passes_through_every_later_version() -> None:
    body = enveloped("tests.started.v1", {"name": "j1", "epoch": 3})

    event = decode(stored(body), STEPS)

    assert event.data == job.Started(job="j1", epoch=3, attempt=1)
    assert event.envelope is not None
    assert event.envelope.type == "tests.started.v1"


def test_an_old_fact_may_enter_in_the_middle() -> None:
    event = decode(stored(enveloped("tests.started.v2", {"job": "j1", "epoch": 3})), STEPS)

    assert event.data == job.Started(job="j1", epoch=3, attempt=1)


@pytest.mark.parametrize("data", [None, [], "x", {}, {"name": "j1"}, {"name": 5, "epoch": 3}])
def test_an_old_fact_with_contents_that_its_step_does_not_expect_is_unreadable(data: object) -> None:
    event = decode(stored(enveloped("tests.started.v1", data)), STEPS)

    assert isinstance(event.data, Unreadable)


def test_an_old_fact_whose_newest_version_nobody_here_knows_is_carried_as_it_is() -> None:
    def to_the_future(data: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        return "tests.unheard_of.v3", {}

    event = decode(stored(enveloped("tests.started.v1", {"name": "j1"})), {"tests.started.v1": to_the_future})

    assert isinstance(event.data, Unknown)
    assert event.data.type == "tests.started.v1"
    assert msgspec.json.decode(event.data.data) == {"name": "j1"}


def test_steps_that_go_round_in_circles_are_an_error() -> None:
    circle: dict[str, Step] = {"a": lambda data: ("b", data), "b": lambda data: ("a", data)}

    with pytest.raises(ValueError, match="do not end"):
        upcast("a", {}, circle)
    assert isinstance(decode(stored(enveloped("a", {})), circle).data, Unreadable)


@pytest.mark.parametrize("name", ["\ufffd", "\x1b[31mred", "a\x0bb", "*", ">", "x" * 65])
def test_a_producer_with_an_impossible_name_is_marked_and_its_name_is_cleaned(name: str) -> None:
    data = decode(stored(b"{}", subject=f"gpuq.submit.{name}")).data

    assert isinstance(data, Submitted)
    assert data.misnamed
    assert data.raw == b"{}"
    assert is_token(data.producer)
