"""Tokens on their way out: published over core NATS, kept for a while, and served again from an offset.

Nothing here is a fact: the result is an event. A viewer that came late or lost its line asks for the rest.
"""

from __future__ import annotations

from collections import deque
from typing import Annotated

import msgspec
import nats.errors
import structlog

from gpukeeper.events import subjects
from gpukeeper.events.connection import Connection

_log = structlog.get_logger("gpukeeper.outputs")

_KEPT_JOBS_MAX = 256
_KEPT_CHARS_MAX = 4_194_304
_SERVED_CHARS_MAX = 200_000


class Chunk(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of a job's text. ``offset`` counts characters from the start."""

    job: str
    attempt: int
    offset: int
    text: str = ""
    done: bool = False


class OutputRequest(msgspec.Struct, frozen=True):
    """Which text somebody wants again."""

    job: str
    offset: Annotated[int, msgspec.Meta(ge=0)] = 0


class _Buffer:
    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self.parts: list[str] = []
        self.chars = 0
        self.done = False
        #: Text beyond the limit is not kept; viewers that listen still get it, and the result has it all.
        self.cut = False


_encode = msgspec.json.Encoder().encode
_decode_request = msgspec.json.Decoder(OutputRequest).decode


class Outputs:
    """The texts of this host's recent jobs."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._buffers: dict[str, _Buffer] = {}
        self._order: deque[str] = deque()

    def begin(self, job: str, attempt: int) -> None:
        """A new attempt starts with no text."""
        if job in self._buffers:
            self._order.remove(job)
        self._buffers[job] = _Buffer(attempt)
        self._order.append(job)
        while len(self._order) > _KEPT_JOBS_MAX:
            del self._buffers[self._order.popleft()]

    async def push(self, job: str, text: str) -> None:
        """Some text was generated."""
        buffer = self._buffers[job]
        chunk = Chunk(job, buffer.attempt, buffer.chars, text)
        buffer.chars += len(text)
        if buffer.chars <= _KEPT_CHARS_MAX:
            buffer.parts.append(text)
        else:
            buffer.cut = True
        await self._publish(chunk)

    async def end(self, job: str) -> None:
        """The attempt is over: viewers stop listening and read the job's end from the log."""
        buffer = self._buffers.get(job)
        if buffer is not None and not buffer.done:
            buffer.done = True
            await self._publish(Chunk(job, buffer.attempt, buffer.chars, done=True))

    def text(self, job: str) -> str:
        """What was generated so far."""
        buffer = self._buffers.get(job)
        return "" if buffer is None else "".join(buffer.parts)

    async def _publish(self, chunk: Chunk) -> None:
        try:
            await self._connection.client.publish(subjects.out(chunk.job), _encode(chunk))
        except (nats.errors.Error, OSError) as error:
            # Viewers ask again from their offset.
            _log.debug("output_not_published", job=chunk.job, error=str(error))

    async def answer(self, request: bytes) -> bytes:
        """Serve text again: a chunk from the offset asked for, or an error that says what is wrong."""
        try:
            wanted = _decode_request(request)
        except msgspec.MsgspecError as error:
            return _encode({"error": f"want {{job, offset}}: {error}"})
        buffer = self._buffers.get(wanted.job)
        if buffer is None:
            return _encode({"error": f"no text of job {wanted.job!r} here"})
        text = "".join(buffer.parts)[wanted.offset : wanted.offset + _SERVED_CHARS_MAX]
        last = buffer.done and wanted.offset + len(text) >= buffer.chars
        return _encode(Chunk(wanted.job, buffer.attempt, wanted.offset, text, done=last))
