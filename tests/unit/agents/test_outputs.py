from __future__ import annotations

import msgspec
import nats.errors

from gpukeeper.agents.outputs import Chunk, Outputs
from support.virtual_time import in_virtual_time


class Wire:
    """Takes what is published, or does not."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Chunk]] = []
        self.broken = False

    async def publish(self, subject: str, body: bytes) -> None:
        if self.broken:
            raise nats.errors.ConnectionClosedError
        self.sent.append((subject, msgspec.json.decode(body, type=Chunk)))


def made() -> tuple[Wire, Outputs]:
    wire = Wire()
    return wire, Outputs(wire.publish)


async def served(outputs: Outputs, job: str = "a", offset: int = 0) -> Chunk:
    answer = await outputs.answer(msgspec.json.encode({"job": job, "offset": offset}))
    return msgspec.json.decode(answer, type=Chunk)


async def problem(outputs: Outputs, request: bytes) -> str:
    return str(msgspec.json.decode(await outputs.answer(request))["error"])


async def spoken(outputs: Outputs, job: str, *texts: str, attempt: int = 1, end: bool = True) -> None:
    outputs.begin(job, attempt)
    for text in texts:
        await outputs.push(job, text)
    if end:
        await outputs.end(job, attempt)


@in_virtual_time
async def test_text_goes_out_on_the_jobs_own_subject_with_its_place() -> None:
    wire, outputs = made()
    await spoken(outputs, "a", "once ", "üpon", "a time", attempt=3)

    assert wire.sent == [
        ("gpuq.out.a", Chunk("a", 3, 0, "once ")),
        ("gpuq.out.a", Chunk("a", 3, 5, "üpon")),
        ("gpuq.out.a", Chunk("a", 3, 9, "a time")),
        ("gpuq.out.a", Chunk("a", 3, 15, done=True)),
    ]


@in_virtual_time
async def test_who_comes_late_is_served_from_the_offset_that_it_has() -> None:
    _, outputs = made()
    await spoken(outputs, "a", "once ", "upon", end=False)

    assert await served(outputs) == Chunk("a", 1, 0, "once upon")
    assert await served(outputs, offset=7) == Chunk("a", 1, 7, "on")
    assert await served(outputs, offset=9) == Chunk("a", 1, 9)
    await outputs.end("a", 1)
    assert await served(outputs, offset=7) == Chunk("a", 1, 7, "on", done=True)
    assert await served(outputs, offset=99) == Chunk("a", 1, 99, done=True)


@in_virtual_time
async def test_a_long_text_is_served_in_parts_of_which_only_the_last_says_so() -> None:
    _, outputs = made()
    text = "\x01€" * 100_000
    await spoken(outputs, "a", text)

    found, parts = "", 0
    while True:
        answer = await outputs.answer(msgspec.json.encode({"job": "a", "offset": len(found)}))
        assert len(answer) < 1_048_576, "it must fit into a message"
        chunk = msgspec.json.decode(answer, type=Chunk)
        found += chunk.text
        parts += 1
        if chunk.done:
            break

    assert found == text
    assert parts == 2


@in_virtual_time
async def test_a_viewer_is_not_kept_waiting_for_text_beyond_what_is_kept() -> None:
    wire, outputs = made()
    piece = "x" * 1_000_000
    await spoken(outputs, "a", *[piece] * 6, end=False)
    kept = len(outputs.text("a", 1))
    assert kept == 4_000_000
    assert not (await served(outputs, offset=kept)).done
    await outputs.end("a", 1)

    assert (await served(outputs, offset=kept)).done
    assert [chunk.offset for _, chunk in wire.sent] == [n * 1_000_000 for n in range(7)]


@in_virtual_time
async def test_a_new_attempt_begins_with_no_text_and_an_old_one_cannot_end_it() -> None:
    wire, outputs = made()
    await spoken(outputs, "a", "first", end=False)
    outputs.begin("a", 2)
    assert (outputs.text("a", 1), outputs.text("a", 2)) == ("", "")
    await outputs.push("a", "second")
    await outputs.end("a", 1)

    assert outputs.text("a", 2) == "second"
    assert not (await served(outputs)).done
    assert not any(chunk.done for _, chunk in wire.sent)


@in_virtual_time
async def test_an_end_is_told_once_and_only_of_what_had_begun() -> None:
    wire, outputs = made()
    await outputs.end("never", 1)
    await spoken(outputs, "a")
    await outputs.end("a", 1)

    assert [chunk.done for _, chunk in wire.sent] == [True]


@in_virtual_time
async def test_what_cannot_be_published_is_kept_all_the_same() -> None:
    wire, outputs = made()
    wire.broken = True
    await spoken(outputs, "a", "once ", "upon")

    assert await served(outputs) == Chunk("a", 1, 0, "once upon", done=True)


@in_virtual_time
async def test_the_oldest_texts_of_jobs_that_are_over_are_forgotten() -> None:
    _, outputs = made()
    for number in range(300):
        await spoken(outputs, f"j{number}", "x")

    assert "no text of job 'j43'" in await problem(outputs, b'{"job":"j43"}')
    assert (await served(outputs, "j44")).text == "x"


@in_virtual_time
async def test_a_job_that_still_runs_keeps_its_text_however_many_come_and_go() -> None:
    _, outputs = made()
    await spoken(outputs, "long", "once ", end=False)
    for number in range(300):
        await spoken(outputs, f"j{number}", "x")
    await outputs.push("long", "upon")

    assert outputs.text("long", 1) == "once upon"


@in_virtual_time
async def test_a_job_that_runs_again_is_not_the_oldest_any_more() -> None:
    _, outputs = made()
    for number in range(256):
        await spoken(outputs, f"j{number}", "x")
    await spoken(outputs, "j0", "again", attempt=2)
    await spoken(outputs, "more", "x")

    assert (await served(outputs, "j0")).text == "again"
    assert "no text" in await problem(outputs, b'{"job":"j1"}')


@in_virtual_time
async def test_a_request_that_is_none_is_told_what_would_be_right() -> None:
    _, outputs = made()

    for request in (b"", b"{}", b'{"job":5}', b'{"job":"a","offset":-1}', b"\xff"):
        assert "want {job, offset}" in await problem(outputs, request)
    assert await problem(outputs, b'{"job":"a"}') == "no text of job 'a' here"
