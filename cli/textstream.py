"""The text of a running job as a viewer sees it: in order, without holes, and anew for a new attempt.

Chunks arrive over core NATS, which promises nothing. A chunk that begins after what was shown means that some were
missed (or that the viewer came late): the agent, which keeps the text, is asked for the rest. What even the agent
does not have any more comes with the result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec
import nats.errors

from gpukeeper.agents.outputs import Chunk, OutputRequest
from gpukeeper.events import subjects
from gpukeeper.events.codec import Event
from gpukeeper.events.connection import Connection
from gpukeeper.events.job import Admitted, Started

_ASK_S = 2.0
_ASK_AGAIN_S = 1.0
_encode = msgspec.json.Encoder().encode
_decode_chunk = msgspec.json.Decoder(Chunk).decode

#: Takes host, job and offset; None where the agent does not answer or has no such text.
Ask = Callable[[str, str, int], Awaitable[Chunk | None]]


class Shown(Protocol):
    """Where the text goes."""

    def text(self, attempt: int, offset: int, text: str) -> None:
        """The next piece."""
        ...

    def again(self, attempt: int) -> None:
        """What was shown is void: another attempt begins."""
        ...

    def differs(self) -> None:
        """The result is not what was streamed; all of it follows."""
        ...


class TextStream:
    """The text of one job. Feed it chunks and the job's events."""

    def __init__(self, job: str, shown: Shown, ask: Ask) -> None:
        self._job = job
        self._shown = shown
        self._ask = ask
        self._attempt = 0
        self._parts: list[str] = []
        self._chars = 0
        self._host: str | None = None
        self._ask_again_at = 0.0

    @property
    def empty(self) -> bool:
        """Nothing was shown of the present attempt."""
        return self._chars == 0

    async def on_event(self, event: Event) -> None:
        """A fact of the job's own subject: it tells where it runs."""
        fact = event.data
        if isinstance(fact, Admitted):
            self._host = fact.host
        elif isinstance(fact, Started):
            await self._fill()

    async def take(self, chunk: Chunk) -> None:
        """Show what is new in ``chunk``, after asking for what is missing before it."""
        if chunk.job != self._job or chunk.attempt < self._attempt:
            return
        if chunk.attempt > self._attempt:
            self._begin(chunk.attempt)
        if chunk.offset > self._chars:
            await self._fill()
        self._show(chunk)

    def finish(self, text: str | None) -> None:
        """Show what is left of ``text``, the whole of the result."""
        if text is None:
            return
        so_far = "".join(self._parts)
        if not text.startswith(so_far):
            self._shown.differs()
            self._parts.clear()
            self._chars = 0
            so_far = ""
        if len(text) > len(so_far):
            self._shown.text(self._attempt, len(so_far), text[len(so_far) :])

    def _begin(self, attempt: int) -> None:
        if self._chars:
            self._shown.again(attempt)
        self._attempt = attempt
        self._parts.clear()
        self._chars = 0

    def _show(self, chunk: Chunk) -> None:
        if chunk.attempt != self._attempt or chunk.offset > self._chars:
            return  # a hole that could not be filled: what is after it waits for the result
        new = chunk.text[self._chars - chunk.offset :]
        if new:
            self._shown.text(self._attempt, self._chars, new)
            self._parts.append(new)
            self._chars += len(new)

    async def _fill(self) -> None:
        """Ask the agent for everything after what was shown."""
        loop = asyncio.get_running_loop()
        if self._host is None or loop.time() < self._ask_again_at:
            return
        while True:
            before = self._chars
            chunk = await self._ask(self._host, self._job, self._chars)
            if chunk is None or chunk.attempt < self._attempt:
                self._ask_again_at = loop.time() + _ASK_AGAIN_S
                return
            if chunk.attempt > self._attempt:
                offset = chunk.offset
                self._begin(chunk.attempt)
                if offset:
                    continue  # it was cut for the text of the earlier attempt
            self._show(chunk)
            if self._chars == before:
                return


def agent_of(connection: Connection) -> Ask:
    """Asks agents over ``connection``."""

    async def ask(host: str, job: str, offset: int) -> Chunk | None:
        request = _encode(OutputRequest(job=job, offset=offset))
        try:
            answer = await connection.client.request(subjects.agent_output(host), request, timeout=_ASK_S)
            return _decode_chunk(answer.data)
        except (TimeoutError, nats.errors.Error, msgspec.MsgspecError):
            # No agent there, or it says that it has no such text: the result will have it.
            return None

    return ask
