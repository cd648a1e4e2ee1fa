"""A streamed completion of a prompt in OpenAI's protocol, put together from its records. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from gpukeeper.agents.runtimes.http import decode, error_words
from gpukeeper.agents.runtimes.port import RuntimeFailure
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import JobResult


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    model: str | None = None
    error: Any = None
    #: ``error`` where the record is one in the manner of older vLLM, with its ``message``.
    object: str | None = None
    message: str | None = None


_chunk = msgspec.json.Decoder(_Chunk)


class Completed:
    """One streamed completion as it is put together."""

    def __init__(self) -> None:
        self.model: str | None = None
        self._pieces: list[str] = []
        self._finish: str | None = None
        self._usage = _Usage()

    def take(self, data: bytes, path: str) -> str | None:
        """Add one record; its text, or None where it has none.

        Raises:
            RuntimeFailure: the record is an error, or not one of this protocol.
        """
        chunk = decode(data, _chunk, path)
        if chunk.error is not None or chunk.object == "error":
            raise RuntimeFailure(Reason.RUNTIME_ERROR, f"{path}: {error_words(chunk.error or chunk.message)}")
        self.model = chunk.model or self.model
        self._usage = chunk.usage or self._usage
        text = "".join(choice.text for choice in chunk.choices)
        for choice in chunk.choices:
            self._finish = choice.finish_reason or self._finish
        if not text:
            return None
        self._pieces.append(text)
        return text

    def result(self) -> JobResult:
        """The whole answer."""
        return JobResult(
            text="".join(self._pieces),
            finish_reason=self._finish,
            prompt_tokens=self._usage.prompt_tokens,
            completion_tokens=self._usage.completion_tokens,
            model=self.model,
        )
