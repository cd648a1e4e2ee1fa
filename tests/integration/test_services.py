"""Endpoints on a real server: who is answered, and who is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from gpukeeper.events.connection import Connection
from gpukeeper.events.services import Reply, serve

pytestmark = pytest.mark.processes


class Waiting:
    """Questions that wait until a test answers them."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[tuple[bytes, Reply]] = asyncio.Queue()

    async def on_question(self, raw: bytes, reply: Reply) -> None:
        self.asked.put_nowait((raw, reply))


@pytest.fixture
async def waiting(connection: Connection) -> AsyncIterator[Waiting]:
    found = Waiting()

    async def answer(raw: bytes) -> bytes:
        return raw.upper()

    services = await serve(
        connection,
        name="tests",
        description="tests",
        endpoints={"loud": ("gpuq.tests.loud", answer)},
        questions={"ask": ("gpuq.tests.ask", found.on_question)},
    )
    await connection.client.flush()
    yield found
    await services.stop()


async def test_a_question_that_waits_does_not_hold_up_the_next(connection: Connection, waiting: Waiting) -> None:
    first = asyncio.create_task(connection.client.request("gpuq.tests.ask", b"1", timeout=20))
    raw, reply_to_first = await waiting.asked.get()
    second = asyncio.create_task(connection.client.request("gpuq.tests.ask", b"2", timeout=20))
    _, reply_to_second = await waiting.asked.get()
    await reply_to_second(b"two")
    assert (await second).data == b"two"
    assert not first.done()

    await reply_to_first(b"one")
    assert (raw, (await first).data) == (b"1", b"one")


@pytest.mark.parametrize("reply", ["gpuq.ev.job.a", "$JS.API.STREAM.PURGE.GPUQ_LOG", ""])
@pytest.mark.parametrize("endpoint", ["gpuq.tests.ask", "gpuq.tests.loud"])
async def test_no_answer_goes_to_a_subject_that_is_no_inbox(
    connection: Connection, waiting: Waiting, endpoint: str, reply: str
) -> None:
    heard = await connection.client.subscribe(reply or "unused")
    await connection.client.publish(endpoint, b"x", reply=reply)

    # What comes after it is answered, and by then the first would have been.
    after = asyncio.create_task(connection.client.request(endpoint, b"next", timeout=20))
    if endpoint.endswith("ask"):
        raw, answer = await waiting.asked.get()
        assert raw == b"next"
        await answer(b"NEXT")
    assert (await after).data == b"NEXT"
    assert heard.pending_msgs == 0


async def test_an_answer_after_the_connection_is_closed_is_dropped(connection: Connection, waiting: Waiting) -> None:
    asked = asyncio.create_task(connection.client.request("gpuq.tests.ask", b"1", timeout=20))
    _, reply = await waiting.asked.get()
    asked.cancel()
    await connection.close()

    await reply(b"too late")
