"""Tokens on their way out: published over core NATS, kept for a while, and served again from an offset.

Nothing here is a fact: the result is an event. A viewer that came late or lost its line asks for the rest.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Annotated

import msgspec
import nats.errors
import structlog

from gpukeeper.events import subjects

_log = structlog.get_logger("gpukeeper.outputs")

_KEPT_JOBS_MAX = 256
_KEPT_CHARS_MAX = 4_194_304
#: Of all jobs together.
_ALL_CHARS_MAX = 32 * 1024 * 1024
#: A character takes up to six bytes in JSON, and a message holds 2^20.
_SERVED_CHARS_MAX = 150_000

#: Takes a subject and bytes: a plain publish, not stored.
Publish = Callable[[str, bytes], Awaitable[None]]


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
        #: Text beyond the limit is not kept; viewers that listen still get it, and the result has it all.
        self.kept_chars = 0
        self.done = False


_encode = msgspec.json.Encoder().encode
_decode_request = msgspec.json.Decoder(OutputRequest).decode


class Outputs:
    """The texts of this host's recent jobs."""

    def __init__(self, publish: Publish, *, all_chars_max: int = _ALL_CHARS_MAX) -> None:
        self._publish_bytes = publish
        self._all_chars_max = all_chars_max
        self._all_chars = 0
        #: By job, the oldest first.
        self._buffers: dict[str, _Buffer] = {}

    def begin(self, job: str, attempt: int) -> None:
        """A new attempt starts with no text. The oldest texts of jobs that are over are forgotten beyond a limit."""
        self._forget(job)
        spare = max(0, len(self._buffers) + 1 - _KEPT_JOBS_MAX)
        over = (known for known, buffer in self._buffers.items() if buffer.done)
        for old in tuple(islice(over, spare)):
            self._forget(old)
        self._buffers[job] = _Buffer(attempt)

    async def push(self, job: str, text: str) -> None:
        """Some text was generated."""
        buffer = self._buffers[job]
        chunk = Chunk(job, buffer.attempt, buffer.chars, text)
        # Once something was left out, what follows is too: a text with a gap would be read as whole.
        whole = buffer.kept_chars == buffer.chars
        buffer.chars += len(text)
        if whole and buffer.chars <= _KEPT_CHARS_MAX and self._make_room(len(text)):
            buffer.parts.append(text)
            buffer.kept_chars = buffer.chars
            self._all_chars += len(text)
        await self._publish(chunk)

    def _make_room(self, chars: int) -> bool:
        """Forget texts of jobs that are over, the oldest first, until so much more fits; whether it does."""
        while self._all_chars + chars > self._all_chars_max:
            over = next((known for known, buffer in self._buffers.items() if buffer.done), None)
            if over is None:
                return False
            self._forget(over)
        return True

    def _forget(self, job: str) -> None:
        gone = self._buffers.pop(job, None)
        if gone is not None:
            self._all_chars -= gone.kept_chars

    async def end(self, job: str, attempt: int) -> None:
        """The attempt is over: viewers stop listening and read the job's end from the log."""
        buffer = self._buffers.get(job)
        if buffer is not None and buffer.attempt == attempt and not buffer.done:
            buffer.done = True
            await self._publish(Chunk(job, buffer.attempt, buffer.chars, done=True))

    def text(self, job: str, attempt: int) -> str:
        """What this attempt generated so far."""
        buffer = self._buffers.get(job)
        return "" if buffer is None or buffer.attempt != attempt else "".join(buffer.parts)

    async def _publish(self, chunk: Chunk) -> None:
        try:
            await self._publish_bytes(subjects.out(chunk.job), _encode(chunk))
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
        # Beyond what was kept there is nothing to wait for either: the job's result has it all.
        last = buffer.done and wanted.offset + len(text) >= buffer.kept_chars
        return _encode(Chunk(wanted.job, buffer.attempt, wanted.offset, text, done=last))
