from __future__ import annotations

import msgspec

from gpukeeper.agents.outputs import Chunk, Outputs


class Viewer:
    """Outputs of which no more than 100 characters are kept, and what was published of them."""

    def __init__(self) -> None:
        self.published: list[Chunk] = []
        self.outputs = Outputs(self._publish, all_chars_max=100)

    async def _publish(self, subject: str, body: bytes) -> None:
        self.published.append(msgspec.json.decode(body, type=Chunk))

    async def finished(self, job: str, text: str) -> None:
        self.outputs.begin(job, 1)
        await self.outputs.push(job, text)
        await self.outputs.end(job, 1)

    async def asked(self, job: str, offset: int = 0) -> Chunk | None:
        answer = await self.outputs.answer(msgspec.json.encode({"job": job, "offset": offset}))
        return None if b'"error"' in answer else msgspec.json.decode(answer, type=Chunk)


async def test_what_was_generated_is_served_again_from_an_offset() -> None:
    viewer = Viewer()
    await viewer.finished("a", "hello world")

    assert await viewer.asked("a", 6) == Chunk("a", 1, 6, "world", done=True)
    assert viewer.published == [Chunk("a", 1, 0, "hello world"), Chunk("a", 1, 11, done=True)]


async def test_the_oldest_texts_of_jobs_that_are_over_go_first_when_all_together_are_too_much() -> None:
    viewer = Viewer()
    viewer.outputs.begin("running", 1)
    await viewer.outputs.push("running", "r" * 30)
    for job in ("a", "b"):
        await viewer.finished(job, job * 30)
    await viewer.finished("c", "c" * 30)

    assert await viewer.asked("a") is None
    for job in ("running", "b", "c"):
        kept = await viewer.asked(job)
        assert kept is not None
        assert kept.text == job[0] * 30


async def test_of_jobs_that_run_no_more_is_kept_than_all_may_have_and_never_with_a_gap() -> None:
    viewer = Viewer()
    for job in ("a", "b"):
        viewer.outputs.begin(job, 1)
    await viewer.outputs.push("a", "a" * 90)
    await viewer.outputs.push("b", "b" * 20)
    await viewer.outputs.push("b", "!")

    assert viewer.outputs.text("a", 1) == "a" * 90
    assert viewer.outputs.text("b", 1) == ""
    assert [chunk.text for chunk in viewer.published] == ["a" * 90, "b" * 20, "!"]


async def test_a_new_attempt_gives_the_room_of_the_old_text_back() -> None:
    viewer = Viewer()
    for attempt in range(1, 5):
        viewer.outputs.begin("a", attempt)
        await viewer.outputs.push("a", "a" * 90)

    assert viewer.outputs.text("a", 4) == "a" * 90
