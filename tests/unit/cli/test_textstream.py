"""A viewer sees each character once and in order, whatever core NATS loses, repeats or reorders."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.agents.outputs import Chunk
from gpukeeper.cli.textstream import TextStream
from gpukeeper.events.codec import Event
from gpukeeper.events.job import Admitted, Started
from gpukeeper.events.log import Stored

TEXT = "the patient scheduler keeps its queue."
PIECES = [Chunk("j", 1, at, TEXT[at : at + 5]) for at in range(0, len(TEXT), 5)]


class Shown:
    """What was shown, attempt by attempt."""

    def __init__(self) -> None:
        self.attempts: list[str] = [""]
        self.notes: list[str] = []

    def text(self, attempt: int, offset: int, text: str) -> None:
        assert offset == len(self.attempts[-1])
        self.attempts[-1] += text

    def again(self, attempt: int) -> None:
        self.attempts.append("")
        self.notes.append(f"again {attempt}")

    def differs(self) -> None:
        self.attempts.append("")
        self.notes.append("differs")


class Agent:
    """An agent that keeps a text, and can be away."""

    def __init__(self, text: str = TEXT, attempt: int = 1) -> None:
        self.kept = text
        self.attempt = attempt
        self.away = False
        self.asked: list[int] = []

    async def ask(self, host: str, job: str, offset: int) -> Chunk | None:
        self.asked.append(offset)
        return None if self.away else Chunk(job, self.attempt, offset, self.kept[offset : offset + 11])


def admitted(host: str = "box") -> Event:
    fact = Admitted(
        job="j",
        host=host,
        device="d",
        slot=0,
        epoch=1,
        attempt=1,
        route_seq=1,
        runtime="r",
        instance_id="i",
        resident=True,
    )
    return Event(Stored(1, 1, "gpuq.ev.job.j", b""), None, fact)


def started() -> Event:
    return Event(Stored(2, 1, "gpuq.ev.job.j", b""), None, Started(job="j", epoch=1, attempt=1))


async def test_chunks_in_order_are_shown_as_they_come() -> None:
    shown, agent = Shown(), Agent()
    stream = TextStream("j", shown, agent.ask)
    for piece in PIECES:
        await stream.take(piece)
    stream.finish(TEXT)

    assert (shown.attempts, shown.notes, agent.asked) == ([TEXT], [], [])


@given(st.lists(st.sampled_from(PIECES), max_size=20))
async def test_whatever_arrives_the_text_is_whole_in_the_end(pieces: list[Chunk]) -> None:
    shown, agent = Shown(), Agent()
    stream = TextStream("j", shown, agent.ask)
    await stream.on_event(admitted())
    for piece in pieces:
        await stream.take(piece)
        assert TEXT.startswith(shown.attempts[0])
    stream.finish(TEXT)

    assert (shown.attempts, shown.notes) == ([TEXT], [])


async def test_a_hole_is_filled_by_asking_the_agent() -> None:
    shown, agent = Shown(), Agent()
    stream = TextStream("j", shown, agent.ask)
    await stream.on_event(admitted())
    await stream.take(PIECES[0])
    await stream.take(PIECES[3])

    assert shown.attempts == [TEXT]
    assert agent.asked[0] == 5


async def test_a_late_viewer_gets_all_that_was_said_before() -> None:
    shown, agent = Shown(), Agent()
    stream = TextStream("j", shown, agent.ask)
    await stream.on_event(admitted())
    await stream.on_event(started())

    assert shown.attempts == [TEXT]


async def test_without_the_agent_what_follows_a_hole_comes_with_the_result() -> None:
    shown, agent = Shown(), Agent()
    agent.away = True
    stream = TextStream("j", shown, agent.ask)
    await stream.on_event(admitted())
    for piece in (PIECES[0], PIECES[2], PIECES[3]):
        await stream.take(piece)
    so_far = list(shown.attempts)
    stream.finish(TEXT)

    assert (so_far, shown.attempts) == ([TEXT[:5]], [TEXT])
    assert agent.asked == [5]  # not asked again for every chunk


async def test_a_new_attempt_begins_anew_and_old_chunks_change_nothing() -> None:
    shown, agent = Shown(), Agent()
    stream = TextStream("j", shown, agent.ask)
    await stream.take(PIECES[0])
    await stream.take(Chunk("j", 2, 0, "another"))
    await stream.take(PIECES[1])
    stream.finish("another answer")

    assert (shown.attempts, shown.notes) == (["the p", "another answer"], ["again 2"])


async def test_a_new_attempt_that_only_the_agent_tells_of_begins_anew() -> None:
    shown, agent = Shown(), Agent("another answer", attempt=2)
    stream = TextStream("j", shown, agent.ask)
    await stream.on_event(admitted())
    await stream.take(PIECES[0])
    await stream.take(PIECES[2])

    assert shown.attempts == ["the p", "another answer"]


async def test_a_result_that_is_not_what_was_streamed_is_shown_whole() -> None:
    shown, agent = Shown(), Agent()
    stream = TextStream("j", shown, agent.ask)
    await stream.take(PIECES[0])
    stream.finish("something else")

    assert (shown.attempts, shown.notes) == (["the p", "something else"], ["differs"])


@pytest.mark.parametrize("chunk", [Chunk("other", 1, 0, "x"), Chunk("j", 1, 0)])
async def test_chunks_of_other_jobs_and_empty_ones_show_nothing(chunk: Chunk) -> None:
    shown, agent = Shown(), Agent()
    stream = TextStream("j", shown, agent.ask)
    await stream.take(chunk)

    assert shown.attempts == [""]
