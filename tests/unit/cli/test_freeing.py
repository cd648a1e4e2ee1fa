"""What the agent says to a wish, up to its last word, on hand-made events."""

from __future__ import annotations

import msgspec
import pytest

from gpukeeper.cli.answering import Answers
from gpukeeper.cli.exitcodes import Exit
from gpukeeper.cli.freeing import Freeing
from gpukeeper.events import device, runtime
from gpukeeper.events.codec import Event, decode, encode
from gpukeeper.events.device import Considered
from gpukeeper.events.fact import Fact
from gpukeeper.events.log import Stored
from gpukeeper.events.reasons import Reason

WISH = 7


def event(fact: Fact, seq: int = 9) -> Event:
    body = encode(fact, event_id=str(seq), source="/tests", subject="box/g0", time="2025-10-19T14:00:00Z")
    return decode(Stored(seq, 1, "gpuq.ev.device.box.g0", body))


def requested(*going: str, level_mb: int | None = None, wish: int = WISH) -> Event:
    considered = tuple(Considered(runtime=name, held_mb=100) for name in going)
    stays = Considered(runtime="pinned-one", held_mb=50, kept=Reason.PINNED)
    return event(
        device.ReclaimRequested(
            host="box",
            device="g0",
            runtime=going[0],
            need_mb=level_mb,
            wanted_seq=wish,
            considered=(*considered, stays),
        )
    )


def measured(mb: int, *, free_mb: int = 0, more: bool = False, wish: int = WISH) -> Event:
    fact = device.Reclaimed(
        host="box",
        device="g0",
        generation=1,
        runtime="a",
        measured_mb=mb,
        free_mb=free_mb,
        settle_s=1.0,
        wanted_seq=wish,
        more=more,
    )
    return event(fact)


def refused(reason: Reason = Reason.INSUFFICIENT) -> Event:
    kept = Considered(runtime="a", held_mb=10, kept=Reason.IN_GRACE, detail="idle 1 s of 300 s")
    fact = device.ReclaimRefused(
        host="box", device="g0", reason=reason, detail="no", wanted_seq=WISH, considered=(kept,)
    )
    return event(fact)


FAILED = event(
    device.ReclaimFailed(
        host="box",
        device="g0",
        generation=1,
        runtime="a",
        reason=Reason.HANDOFF_TIMEOUT,
        detail="still there",
        wanted_seq=WISH,
    )
)


@pytest.mark.parametrize(
    ("wanted_mb", "events", "ended", "state", "exit_code"),
    [
        (None, [], False, None, Exit.TIMED_OUT),
        (None, [requested("a", "b"), measured(100, more=True)], False, "freed", Exit.OK),
        (
            *(None, [requested("a", "b"), measured(100, more=True), requested("b"), measured(90)]),
            *(True, "freed", Exit.OK),
        ),
        (None, [requested("a", "b"), measured(100, more=True), refused(Reason.NOT_NEEDED)], True, "freed", Exit.OK),
        (500, [refused(Reason.NOT_NEEDED)], True, "freed", Exit.OK),
        (500, [requested("a", level_mb=600), measured(100, free_mb=600)], True, "freed", Exit.OK),
        (500, [requested("a", level_mb=600), measured(100, free_mb=599)], False, "refused", Exit.REFUSED),
        (500, [requested("a", level_mb=600), measured(100, free_mb=599), refused()], True, "refused", Exit.REFUSED),
        (None, [refused()], True, "refused", Exit.REFUSED),
        (None, [requested("a"), FAILED], True, "failed", Exit.JOB_FAILED),
        (None, [requested("a", wish=1), measured(9, wish=1)], False, None, Exit.TIMED_OUT),
    ],
)
def test_the_last_word_is_known_and_only_what_was_measured_counts(
    wanted_mb: int | None, events: list[Event], ended: bool, state: str | None, exit_code: Exit
) -> None:
    freeing = Freeing(WISH, wanted_mb)
    for each in events:
        assert not freeing.ended, "nothing comes after the last word"
        freeing.take(each)

    assert (freeing.ended, freeing.state, freeing.exit) == (ended, state, exit_code)
    assert freeing.freed_mb == sum(
        each.data.measured_mb
        for each in events
        if isinstance(each.data, device.Reclaimed) and each.data.wanted_seq == WISH
    )


def test_the_document_says_who_stays_and_why() -> None:
    freeing = Freeing(WISH)
    freeing.take(refused())

    assert freeing.document()["stays"] == [
        Considered(runtime="a", held_mb=10, kept=Reason.IN_GRACE, detail="idle 1 s of 300 s")
    ]
    assert (freeing.document()["reason"], freeing.document()["freed_mb"]) == (Reason.INSUFFICIENT, 0)


@pytest.mark.parametrize(
    ("done", "reason", "state", "exit_code"),
    [
        (True, None, "done", Exit.OK),
        (False, Reason.CRASH_LOOPING, "refused", Exit.REFUSED),
        (False, Reason.CONTAINER_ENGINE, "failed", Exit.JOB_FAILED),
    ],
)
def test_an_act_ends_with_the_answer_to_this_wish_and_no_other(
    done: bool, reason: Reason | None, state: str, exit_code: Exit
) -> None:
    answers = Answers(3)
    wanted = runtime.ActWanted(host="box", runtime="comfyui", act="restart", command_seq=3, actor="ann")
    other = msgspec.structs.replace(wanted, command_seq=2)
    acted = runtime.Acted(host="box", runtime="comfyui", act="restart", wanted_seq=6, done=True)
    answer = msgspec.structs.replace(acted, wanted_seq=WISH, done=done, reason=reason)

    assert not answers.take(event(other, seq=6))
    assert answers.take(event(wanted, seq=WISH))
    assert not answers.take(event(acted))
    assert not answers.ended
    assert answers.take(event(answer))
    assert (answers.ended, answers.document()["state"], answers.exit) == (True, state, exit_code)


def test_a_drain_ends_with_the_word_of_the_scheduler() -> None:
    answers = Answers(3)
    answers.take(event(device.Drained(host="box", device="g0", command_seq=3, actor="ann")))

    assert (answers.ended, answers.document(), answers.exit) == (True, {"state": "drained"}, Exit.OK)
