"""What is wrong, odd or large, through the command line and through a raw publish: one clear answer each, no crash."""

from __future__ import annotations

import json
from typing import Any

import nats.errors
import pytest

from gpukeeper.cli.exitcodes import Exit
from support.clisite import FAKE, FAKE_DEVICE_MB, REAL, CliSite

pytestmark = pytest.mark.processes


def job(**fields: Any) -> bytes:
    return json.dumps({"model": REAL, "prompt": "Hello", "max_tokens": 2} | fields).encode()


DEEP = b'{"model": "tiny", "prompt": "x", "options": {"a": ' + b"[" * 5000 + b"]" * 5000 + b"}}"

#: Name, the submission, and what its answer must name.
MALFORMED: list[tuple[str, bytes, str]] = [
    ("not_json", b"Hello", "not JSON"),
    ("nothing", b"", "not JSON"),
    ("no_object", b"[1, 2]", ""),
    ("wrong_type", job(max_tokens="many"), "max_tokens"),
    ("wrong_nested_type", job(need={"vram_mb": "lots"}), "need.vram_mb"),
    ("unknown_field", job(max_token=3), "did you mean 'max_tokens'?"),
    ("unknown_nested_field", job(deadlines={"run": 3}), "deadlines.run"),
    ("no_model", b'{"prompt": "x"}', "model"),
    ("two_bodies", job(input="x"), "exactly one of prompt, messages, input"),
    ("no_body", b'{"model": "tiny"}', "exactly one of prompt, messages, input"),
    ("dotted_id", job(id="a.b"), "1 to 64 of A-Z a-z 0-9 _ -"),
    ("wildcard_id", job(id="*"), "1 to 64 of A-Z a-z 0-9 _ -"),
    ("id_with_space", job(id="a b"), "1 to 64 of A-Z a-z 0-9 _ -"),
    ("id_of_300", job(id="x" * 300), "1 to 64 of A-Z a-z 0-9 _ -"),
    ("not_a_number", b'{"model": "tiny", "prompt": "x", "temperature": NaN}', "not JSON"),
    ("deep", DEEP, "nest"),
    ("no_utf8", b'{"model": "tiny", "prompt": "\xff\xfe"}', "UTF-8"),
]


@pytest.mark.parametrize(("submission", "named"), [(b, n) for _, b, n in MALFORMED], ids=[n for n, _, _ in MALFORMED])
def test_what_is_malformed_is_refused_before_it_is_sent(site: CliSite, submission: bytes, named: str) -> None:
    before = site.gpuq("queue", "--json").document["seq"]
    ran = site.gpuq("submit", "-f", "-", "--json", stdin=submission)

    assert ran.code == Exit.REFUSED
    assert ran.err.startswith("gpuq: not submitted: ")
    assert ran.err.count("\n") == 1
    assert named in ran.document["error"]["message"]
    assert ran.document["error"]["fields"]["problems"]
    assert site.gpuq("queue", "--json").document["seq"] == before


@pytest.mark.parametrize(("submission", "named"), [(b, n) for _, b, n in MALFORMED], ids=[n for n, _, _ in MALFORMED])
def test_what_is_malformed_is_answered_by_the_scheduler_where_it_is_sent(
    site: CliSite, submission: bytes, named: str
) -> None:
    ran = site.gpuq("submit", "-f", "-", "--no-check", "--json", stdin=submission)
    seq = site.publish(submission)
    answer = site.job_of(seq)

    assert ran.code == Exit.REFUSED
    assert "rejected, invalid: " in ran.err
    assert named in ran.document["error"]["message"]
    assert answer["type"] == "gpuq.job.rejected.v1"
    assert named in json.dumps(answer["data"]["problems"])
    # The log can be shown whatever is in it.
    shown = site.gpuq("events", "--since", str(seq), "--until", str(seq), "--json").documents
    assert [event["seq"] for event in shown] == [seq]
    assert site.gpuq("events", "--since", str(seq), "--until", str(seq)).code == Exit.OK


@pytest.mark.parametrize(
    ("options", "reason", "named"),
    [
        (("--model", "no-such-model"), "unknown_model", "no-such-model"),
        (("--model", REAL, "--runtime", "nobody"), "unknown_runtime", "nobody"),
        (("--model", REAL, "--host", "nowhere"), "unknown_host", "nowhere"),
        (("--model", REAL, "--kind", "odd"), "unknown_kind", "odd"),
        (("--model", FAKE, "--vram-mb", str(FAKE_DEVICE_MB + 1)), "need_exceeds_devices", "need.vram_mb"),
    ],
)
def test_what_no_part_of_the_site_can_do_is_rejected_with_the_reason(
    site: CliSite, options: tuple[str, ...], reason: str, named: str
) -> None:
    ran = site.gpuq("submit", "Hello", "--json", *options)
    error = ran.document["error"]

    assert ran.code == Exit.REFUSED
    assert error["fields"]["reason"] == reason
    assert named in error["message"]
    status = site.gpuq("status", error["fields"]["id"])
    assert (status.code, "rejected" in status.out) == (Exit.OK, True)


def test_two_megabytes_in_one_message_are_refused_by_the_client(site: CliSite) -> None:
    large = job(prompt="x" * 2_000_000)
    ran = site.gpuq("submit", "-f", "-", "--no-check", stdin=large)

    assert ran.code == Exit.REFUSED
    assert "not submitted: 1.9 MiB in one message" in ran.err
    with pytest.raises(nats.errors.MaxPayloadError):
        site.publish(large)


def test_a_body_above_64_mib_is_refused_with_the_limit(site: CliSite) -> None:
    ran = site.gpuq("submit", "-f", "-", stdin=job(prompt="x" * (64 * 1_048_576)))

    assert ran.code == Exit.REFUSED
    assert "a job may have 64.0 MiB at most" in ran.err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--temperature", "nan"), "temperature = 'nan': must be a finite number"),
        (("--deadline", "run=inf"), "deadlines.run_s = 'inf': must be a finite number"),
        (("--max-tokens", "0"), "max_tokens = '0'"),
        (("--priority", "5000"), "priority = '5000'"),
        (("--host", "a.b"), "host = 'a.b': must be 1 to 64 of A-Z a-z 0-9 _ -"),
        (("--device", "gpu0"), "device = 'gpu0': name its host too"),
        (("--message", "robot:Hello"), "messages[0].role"),
        (("--embed", "and embed"), "exactly one of prompt, messages, input"),
    ],
)
def test_options_with_wrong_values_are_refused_with_field_value_and_remedy(
    site: CliSite, options: tuple[str, ...], named: str
) -> None:
    ran = site.gpuq("submit", "--model", REAL, "Hello", *options)

    assert ran.code == Exit.REFUSED
    assert named in ran.err


@pytest.mark.parametrize(
    "options",
    [
        ("--message", "no colon"),
        ("--deadline", "forever"),
        ("--deadline", "lunch=60"),
        ("--deadline", "run=soon"),
        ("--label", "novalue"),
        ("--prompt", "and an argument"),
        ("--producer", "a.b"),
        ("--file", "/no/such/file"),
        ("--workflow", "/no/such/file"),
        ("--analysis", "/dev/null"),
        ("--max-tokens", "three"),
        ("--place", "moon"),
        ("--no-such-option",),
        ("--nats", "http://example.org"),
        ("--nats", "nats://me:hunter2@127.0.0.1"),
    ],
)
def test_options_of_the_wrong_form_are_exit_code_2_in_one_sentence(site: CliSite, options: tuple[str, ...]) -> None:
    ran = site.gpuq("submit", "--model", REAL, "Hello", "--json", *options)

    assert ran.code == Exit.USAGE
    assert ran.err.startswith("gpuq: ")
    assert ran.err.count("\n") == 1
    assert "hunter2" not in ran.err + ran.out
    assert ran.document["error"]["code"] in ("usage", "invalid_id")


def test_unusual_characters_come_back_as_they_were(site: CliSite) -> None:
    prompt = "line\u2028paragraph\u2029nel\x85 tab\t bell\x07 escape\x1b[31m emoji \U0001f600 zero\x00 rtl\u202e end"
    body = json.dumps({"model": FAKE, "prompt": prompt}).encode()
    with site.llama.repeating():
        text = site.gpuq("submit", "-f", "-", "--wait", stdin=body)
        document = site.gpuq("submit", "-f", "-", "--wait", "--json", stdin=body)
        streamed = site.gpuq("submit", "-f", "-", "--stream", "--json", stdin=body)
        raw = site.job_of(site.publish(body))
        site.gpuq("result", "--wait", raw["subject"])

    assert site.llama.until_asked(prompt)["prompt"] == prompt
    assert text.out == prompt + "\n"
    assert document.document["result"]["text"] == prompt
    assert streamed.documents[-1]["result"]["text"] == prompt
    # Each line of the stream is one line for any reader of lines.
    assert len(streamed.out.splitlines()) == len(streamed.documents)
    assert site.gpuq("result", raw["subject"]).out == prompt + "\n"


def test_what_others_wrote_cannot_act_on_the_terminal(site: CliSite) -> None:
    forged = "[red]x[/red]\x1b]0;title\x07\n9999 forged line"
    with site.llama.holding():
        running = site.submit("--model", FAKE, "holds the slot")
        site.until_phase(running, "running")
        waiting = site.submit("--model", FAKE, "waits")
        cancelled = site.gpuq("cancel", waiting, "--reason", forged)
        shown = [
            cancelled,
            site.gpuq("status", waiting),
            site.gpuq("events", "--job", waiting),
            site.gpuq("watch", waiting),
            site.gpuq("queue"),
        ]
    rejected = site.gpuq("submit", "-f", "-", "--no-check", stdin=job(model="m" + forged.replace("\n", "")))

    for ran in (*shown, rejected):
        assert "\x1b" not in ran.out + ran.err
        assert "\x07" not in ran.out + ran.err
        assert not any(line.startswith("9999") for line in ran.out.splitlines())
    assert "[red]x[/red]\\x1b]0;title\\x07\\n9999 forged line" in cancelled.out


def test_a_submission_in_an_envelope_is_taken_with_its_own_fields(site: CliSite) -> None:
    event = {
        "specversion": "1.0",
        "id": "e-1",
        "source": "/tests",
        "type": "gpuq.job.submitted.v1",
        "data": {"model": REAL, "prompt": "Hello", "max_tokens": 2, "id": "enveloped"},
    }
    ran = site.gpuq("submit", "-f", "-", "--wait", "--json", stdin=json.dumps(event).encode())
    again = site.publish(json.dumps(event).encode(), headers={"Nats-Msg-Id": "e-1"})

    assert (ran.code, ran.document["id"]) == (Exit.OK, "enveloped")
    assert site.job_of(again)["type"] == "gpuq.job.resubmitted.v1"
