"""Every fact and every reason has words; what is unknown is still shown."""

from __future__ import annotations

import msgspec
import pytest

from gpukeeper.cli import reasonwords, words
from gpukeeper.events import device, job, runtime
from gpukeeper.events.catalog import FACTS
from gpukeeper.events.codec import Event, Submitted, Unknown, Unreadable, decode, encode
from gpukeeper.events.fact import Fact
from gpukeeper.events.log import Stored
from gpukeeper.events.reasons import Reason
from gpukeeper.events.spec import Problem


def event(fact: Fact, subject: str = "gpuq.ev.job.j1") -> Event:
    body = encode(fact, event_id="1", source="/tests", subject="j1", time="2025-10-19T14:00:00Z")
    return decode(Stored(1, 1, subject, body))


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.TYPE)
def test_every_fact_has_words_of_its_own(fact: type[Fact]) -> None:
    assert fact in words._WORDS  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("fact", words.IMPORTANT, ids=lambda fact: fact.TYPE)
def test_what_is_important_is_a_known_fact(fact: type[Fact]) -> None:
    assert fact in FACTS


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_words(reason: Reason) -> None:
    assert reasonwords.WORDS[reason]
    assert reasonwords.in_words(reason, "why") == f"{reason}: {reasonwords.WORDS[reason]} (why)"


def test_a_reason_of_a_newer_version_is_shown_as_it_is() -> None:
    assert reasonwords.in_words("moon_phase", "full") == "moon_phase (full)"
    assert reasonwords.in_words("", "full") == "full"


def test_a_rejection_names_field_value_and_remedy() -> None:
    problem = Problem(path="need.vram_mb", message="more than any device has", value="9")
    fact = job.Rejected(
        job="j1",
        submission_seq=1,
        producer="p",
        reason=Reason.NEED_EXCEEDS_DEVICES,
        problems=(problem,),
        requested_id="mine",
    )

    assert words.sentence(event(fact)) == (
        "rejected (asked for id mine), need_exceeds_devices: need.vram_mb = '9': more than any device has"
    )


def test_an_expiry_names_the_clock_its_limit_and_where_that_was_set() -> None:
    fact = job.Expired(job="j1", clock="run", limit_s=60, source="job deadlines.run_s", elapsed_s=60.2)

    assert words.sentence(event(fact)) == "expired: run clock, 1 min 00 s of 1 min, set by job deadlines.run_s"


def test_a_refused_reclaim_says_of_each_owner_what_it_holds_and_why_it_stays() -> None:
    fact = device.ReclaimRefused(
        host="box",
        device="gpu0",
        reason=Reason.INSUFFICIENT,
        detail="0 MB of 20104 MB may be released",
        job="j1",
        need_mb=22_000,
        considered=(
            device.Considered(
                runtime="comfyui", held_mb=21_700, kept=Reason.IN_GRACE, detail="idle 100 s of 300 s before it may go"
            ),
            device.Considered(runtime="ollama", model="qwen3:8b", held_mb=None, kept=Reason.PINNED),
        ),
    )

    said = words.sentence(event(fact, "gpuq.ev.device.box.gpu0"))

    assert said.startswith("nothing is freed for j1, needs 21.5 GB, insufficient: ")
    assert "comfyui (21.2 GB) stays, in_grace: idle 100 s of 300 s before it may go" in said
    assert said.endswith("ollama/qwen3:8b (?) stays, pinned")


def test_what_was_freed_is_what_was_measured_beside_what_was_promised() -> None:
    fact = device.Reclaimed(
        host="box",
        device="gpu0",
        generation=9,
        runtime="ollama",
        model="qwen3:8b",
        promised_mb=5000,
        measured_mb=3000,
        free_mb=4900,
        settle_s=2.5,
    )

    assert words.sentence(event(fact, "gpuq.ev.device.box.gpu0")) == (
        "ollama/qwen3:8b let go of 3000 MB as measured (promised 5000 MB) within 2.50 s; free now: 4900 MB"
    )


def test_an_act_that_was_not_done_names_its_reason_and_one_without_a_reason_says_so_too() -> None:
    fact = runtime.Acted(
        host="box", runtime="comfyui", act="begin", wanted_seq=3, done=False, reason=Reason.CRASH_LOOPING, detail="4 x"
    )
    bare = runtime.Acted(host="box", runtime="comfyui", act="stop", wanted_seq=3, done=False)

    subject = "gpuq.ev.runtime.box.comfyui"
    assert words.sentence(event(fact, subject)) == (
        "begin is not done, crash_looping: its container keeps restarting (4 x)"
    )
    assert words.sentence(event(bare, subject)) == "stop is not done"


def test_what_is_no_fact_is_shown_too() -> None:
    stored = Stored(7, 1, "gpuq.ev.job.j1", b"x")
    unknown = Event(stored, None, Unknown("gpuq.job.teleported.v3", msgspec.Raw(b"{}")))
    unreadable = Event(stored, None, Unreadable("not JSON"))
    submitted = Event(Stored(8, 1, "gpuq.submit.lab", b"xx"), None, Submitted("lab", b"xx"))

    assert [words.type_name(each) for each in (unknown, unreadable, submitted)] == [
        *("job.teleported", "unreadable", "submitted")
    ]
    assert words.sentence(unknown) == "gpuq.job.teleported.v3, of a newer version"
    assert words.sentence(submitted) == "submitted by lab, 2 bytes"


@pytest.mark.parametrize(
    ("subject", "about"),
    [
        ("gpuq.ev.job.j1", "j1"),
        ("gpuq.ev.route.box.j1", "j1"),
        ("gpuq.ev.device.box.gpu0", "box/gpu0"),
        ("gpuq.ev.host.box", "box"),
        ("gpuq.ev.site", "site"),
        ("gpuq.submit.lab", "lab"),
        ("gpuq.cmd.ann", "ann"),
    ],
)
def test_an_event_is_about_its_aggregate(subject: str, about: str) -> None:
    assert words.about(Event(Stored(1, 1, subject, b""), None, Unreadable(""))) == about


@pytest.mark.parametrize(
    ("tag", "short"), [("gpuq.job.accepted.v1", "job.accepted"), ("tests.note.v12", "tests.note"), ("a.vb", "a.vb")]
)
def test_types_are_shown_without_their_version(tag: str, short: str) -> None:
    assert words.short_type(tag) == short
