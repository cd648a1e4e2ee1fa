"""Whatever anybody publishes is answered with words, and a good job after it runs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.events.job import Accepted, Cancelled, Expired, Failed, Rejected, Started, Succeeded
from gpukeeper.events.reasons import Reason
from gpukeeper.events.site import CommandRefused
from support.nats import NatsServer
from support.site import DEVICE, HOST, Site, site_in

pytestmark = pytest.mark.processes

GOOD = {"model": "fake", "prompt": "good"}
SEPARATORS = "a\u2028b\u2029c\u0085d\u0000e\r\nf"


def with_(**fields: Any) -> bytes:
    return json.dumps({**GOOD, **fields}).encode()


def nested(depth: int) -> bytes:
    return b'{"model":"fake","prompt":"x","options":{"a":' + b"[" * depth + b"]" * depth + b"}}"


#: What is wrong -> (bytes, path of the problem, reason).
BAD: dict[str, tuple[bytes, str, Reason]] = {
    "not JSON": (b"hello", "", Reason.INVALID),
    "nothing": (b"", "", Reason.INVALID),
    "not UTF-8": (b'{"model":"fake","prompt":"\xff\xfe"}', "", Reason.INVALID),
    "a surrogate": (b'{"model":"fake","prompt":"\\ud800"}', "", Reason.INVALID),
    "a list": (b"[1]", "", Reason.INVALID),
    "NaN": (b'{"model":"fake","prompt":"x","temperature":NaN}', "", Reason.INVALID),
    "no model": (b'{"prompt":"x"}', "model", Reason.INVALID),
    "no body": (b'{"model":"fake"}', "", Reason.INVALID),
    "a wrong type": (with_(prompt=5), "prompt", Reason.INVALID),
    "a wrong type in depth": (with_(need={"vram_mb": "much"}), "need.vram_mb", Reason.INVALID),
    "a number beyond all": (
        with_().replace(b'"good"', b'"good","options":{"a":1e999}'),
        "options[...]",
        Reason.INVALID,
    ),
    "an unknown field": (with_(modle="x"), "modle", Reason.INVALID),
    "an unknown field in depth": (with_(need={"vram": 1}), "need.vram", Reason.INVALID),
    "an endless field": (with_(**{"k" * 1_047_900: 1}), "k" * 79 + "…", Reason.INVALID),
    "an id with a dot": (with_(id="a.b"), "id", Reason.INVALID),
    "an id that is a wildcard": (with_(id="*"), "id", Reason.INVALID),
    "an id that is all": (with_(id=">"), "id", Reason.INVALID),
    "an id with a space": (with_(id="a b"), "id", Reason.INVALID),
    "an id with a line feed": (with_(id="a\n"), "id", Reason.INVALID),
    "an endless id": (with_(id="a" * 300), "id", Reason.INVALID),
    "deep nesting": (nested(5_000), "", Reason.INVALID),
    "a need beyond all devices": (with_(need={"vram_mb": 25_000}), "need.vram_mb", Reason.NEED_EXCEEDS_DEVICES),
    "an unknown runtime": (with_(runtime="vllm"), "runtime", Reason.UNKNOWN_RUNTIME),
    "an unknown model": (with_(model="fack"), "model", Reason.UNKNOWN_MODEL),
    "an unknown host": (with_(host="nowhere"), "host", Reason.UNKNOWN_HOST),
    "an unknown kind": (with_(kind="poetry"), "kind", Reason.UNKNOWN_KIND),
    "an event of another type": (
        json.dumps({"specversion": "1.0", "type": "x", "id": "1", "data": GOOD}).encode(),
        "type",
        Reason.INVALID,
    ),
    "an endless id of an event": (
        json.dumps(
            {"specversion": "1.0", "type": "gpuq.job.submitted.v1", "id": "i" * 1_000_000, "data": GOOD}
        ).encode(),
        "id",
        Reason.INVALID,
    ),
    "a wrong field in an event": (
        json.dumps(
            {"specversion": "1.0", "type": "gpuq.job.submitted.v1", "id": "1", "data": {**GOOD, "seed": "x"}}
        ).encode(),
        "data.seed",
        Reason.INVALID,
    ),
}


@pytest.fixture
async def site(tmp_path: Path, nats_server: NatsServer) -> AsyncIterator[Site]:
    async with site_in(tmp_path, nats_server.settings()) as site:
        site.devices = [{"id": DEVICE, "source": "static", "kind": "cpu", "total_mb": 24_000}]
        await site.llama()
        site.scheduler()
        site.agent()
        await site.ready()
        yield site


async def test_each_bad_submission_is_refused_with_its_path_and_a_good_one_runs_after_them(site: Site) -> None:
    sent = {what: await site.send(body) for what, (body, _, _) in BAD.items()}
    good = await site.send(GOOD)

    told: dict[str, tuple[str, str]] = {}
    for what, seq in sent.items():
        answer = await site.watch.answer(seq)
        told[what] = (answer.problems[0].path, answer.reason) if isinstance(answer, Rejected) else ("accepted", "")
    assert told == {what: (path, reason) for what, (_, path, reason) in BAD.items()}
    accepted = await site.watch.answer(good)
    assert isinstance(accepted, Accepted)
    assert isinstance(await site.watch.end(accepted.job), Succeeded)
    await site.check()
    assert await site.fakes[0].prompts() == {"good": 1}


async def test_deep_but_lawful_nesting_in_options_reaches_the_runtime(site: Site) -> None:
    answer = await site.watch.answer(await site.send(nested(90)))

    assert isinstance(answer, Accepted)
    assert isinstance(await site.watch.end(answer.job), Succeeded)


async def test_garbage_where_facts_and_commands_stand_stops_nobody(site: Site) -> None:
    """A job waits behind a running one while its own subject, its route's and its device's are written over."""
    fake = site.fakes[0]
    await fake.set(hold=True)
    runs = await site.submit({"model": "fake", "prompt": "runs"})
    await fake.until_asked("runs")
    waits = await site.submit(GOOD)
    forged = json.dumps(
        {
            "specversion": "1.0",
            "id": "f",
            "source": "/tests",
            "type": "gpuq.job.lost.v1",
            "subject": waits,
            "time": "2025-10-19T14:00:00Z",
            "data": {"job": waits, "epoch": 1, "host": "x", "device": "y", "reason": "internal", "detail": ""},
        }
    ).encode()
    newer = forged.replace(b"gpuq.job.lost.v1", b"gpuq.job.praised.v9")
    impossible = forged.replace(b'"epoch": 1', b'"epoch": "one"')
    before = site.watch.site.unreadable
    for garbage in (b"", b"hello", b"{}", b"\xff", newer, impossible):
        for subject in (
            "gpuq.ev.job.x",
            f"gpuq.ev.job.{waits}",
            f"gpuq.ev.job.{runs}",
            f"gpuq.ev.route.{HOST}.{waits}",
            f"gpuq.ev.device.{HOST}.{DEVICE}",
            f"gpuq.ev.runtime.{HOST}.llama",
            f"gpuq.ev.host.{HOST}",
            "gpuq.ev.site",
            "gpuq.ev.nothing.of.the.kind",
            "gpuq.cmd.y",
        ):
            assert await site.publish(subject, garbage) is not None
    # A fact on a subject that is not its own is believed by nobody: whoever may give commands cannot end jobs.
    assert await site.publish("gpuq.cmd.mallory", forged) is not None
    assert await site.publish("gpuq.ev.job.x", forged) is not None
    await fake.set(hold=False)

    assert isinstance(await site.watch.end(waits), Succeeded)
    assert len(await site.watch.until(lambda: site.watch.ends(runs), "the end of the first")) == 1
    refused = await site.watch.until(
        lambda: found if len(found := site.watch.all(CommandRefused)) >= 7 else None, "every command is refused"
    )
    assert {fact.reason for fact in refused} == {Reason.INVALID_COMMAND}
    assert isinstance(await site.run({"model": "fake", "prompt": "after"}), Succeeded)
    assert site.watch.site.unreadable > before
    await site.check()


async def test_names_and_headers_that_no_client_would_send_are_answered_and_leave_the_site_as_it_was(
    site: Site,
) -> None:
    """The log cannot be rid of them: who breaks on one breaks on it for ever."""
    await site.publish_raw(b"gpuq.submit.\xff", with_())
    await site.publish_raw(b"gpuq.submit.\x1b[31mred", with_())
    await site.publish_raw(b"gpuq.submit.a\x0b1", with_())
    await site.publish_raw(b"gpuq.cmd.\xff\x1b[2J", b"{}")
    await site.publish_raw(b"gpuq.ev.job.\xff", b"{}", headers=b"X")
    await site.publish_raw(b"gpuq.hb.\xff", b"{}", headers=b"X")
    good = await site.watch.answer(await site.send(GOOD))

    assert isinstance(good, Accepted)
    assert isinstance(await site.watch.end(good.job), Succeeded)
    rejected = site.watch.all(Rejected)
    assert [(fact.producer, fact.problems[0].path) for fact in rejected] == [
        ("_", "producer"),
        ("__31mred", "producer"),
        ("a_1", "producer"),
    ]
    refused = await site.watch.until(lambda: site.watch.all(CommandRefused), "the command is refused")
    assert [(fact.actor, fact.reason) for fact in refused] == [("___2J", Reason.INVALID_COMMAND)]
    await site.check()


async def test_commands_that_fill_a_message_are_answered_and_obeyed(site: Site) -> None:
    """Their answer repeats what they say, and must fit into a message itself."""
    endless = "x" * 1_040_000
    await site.fakes[0].set(hold=True)
    runs = await site.submit({"model": "fake", "prompt": "runs"})
    waits = await site.submit(GOOD)
    unknown = await site.command("cancel", endless)
    await site.command("cancel", waits, reason=endless)
    await site.command("cancel", runs, reason=endless)
    odd = await site.command("cancel", "nobody", command_id=endless)

    refused = await site.watch.until(
        lambda: {fact.command_seq: fact.reason for fact in site.watch.all(CommandRefused)}.keys() >= {unknown, odd},
        "both commands for unknown jobs are refused",
    )
    assert refused
    for job in (waits, runs):
        end = await site.watch.end(job)
        assert isinstance(end, Cancelled)
        assert end.reason == "x" * 4_095 + "…"
    await site.fakes[0].set(hold=False)
    await site.check()


async def test_line_separators_of_unicode_come_back_as_they_were_sent(site: Site) -> None:
    await site.fakes[0].set(echo=True)
    end = await site.run({"model": "fake", "prompt": SEPARATORS})

    assert isinstance(end, Succeeded)
    assert end.result is not None
    assert end.result.text == SEPARATORS
    assert await site.fakes[0].prompts() == {SEPARATORS: 1}


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("status", {"status": 500, "body": '{"error":{"message":"boom"}}'}, Reason.RUNTIME_ERROR),
        ("status", {"status": 503, "body": '{"error":{"message":"no slot available"}}'}, Reason.RUNTIME_BUSY),
        ("html", {}, Reason.RUNTIME_BAD_REPLY),
        ("truncated", {}, Reason.RUNTIME_CUT),
        ("empty", {}, Reason.RUNTIME_EMPTY_REPLY),
        ("drop", {}, Reason.RUNTIME_CUT),
        ("cut", {}, Reason.RUNTIME_CUT),
    ],
)
async def test_what_a_runtime_answers_instead_of_work_is_said_and_not_tried_again(
    site: Site, kind: str, settings: dict[str, Any], reason: Reason
) -> None:
    fake = site.fakes[0]
    await fake.fault("/completion", kind, **settings)
    end = await site.run({"model": "fake", "prompt": "bad luck"})

    assert isinstance(end, Failed)
    assert end.reason == reason
    await fake.fault("/completion", None)
    assert isinstance(await site.run(GOOD), Succeeded)
    await site.check()
    assert await fake.prompts() == {"bad luck": 1, "good": 1}


async def test_a_runtime_that_never_answers_lets_the_first_byte_clock_expire(site: Site) -> None:
    fake = site.fakes[0]
    await fake.fault("/completion", "stall")
    job = await site.submit({"model": "fake", "prompt": "silence", "deadlines": {"first_byte_s": 1.5}})
    end = await site.watch.end(job)

    assert isinstance(end, Expired)
    assert (end.clock, end.limit_s, end.source) == ("first_byte", 1.5, "job deadlines.first_byte_s")
    assert len(site.watch.of_job(job, Started)) == 1
    await fake.fault("/completion", None)
    assert isinstance(await site.run(GOOD), Succeeded)
    assert await fake.prompts() == {"silence": 1, "good": 1}
