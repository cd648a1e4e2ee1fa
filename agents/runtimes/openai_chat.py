"""The chat protocol of OpenAI as llama.cpp and vLLM speak it: messages out, server-sent events in. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from gpukeeper.agents.runtimes.failures import shown
from gpukeeper.agents.runtimes.http import decode, error_words
from gpukeeper.agents.runtimes.port import RuntimeFailure
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import ChatMessage, JobResult, Work

END = b"[DONE]"

#: How base64 of an image begins, by kind.
_IMAGES = {"iVBOR": "image/png", "/9j/": "image/jpeg", "R0lGOD": "image/gif", "UklGR": "image/webp"}


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
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


def sse_data(line: bytes, path: str) -> bytes | None:
    """The data of one line of an event stream; None for comments and fields that carry none.

    Raises:
        RuntimeFailure: an ``error:`` line of older servers, or a line that is no event stream at all.
    """
    line = line.rstrip(b"\r")
    if line.startswith(b"data:"):
        return line[5:].strip()
    if line.startswith(b"error:"):
        raise RuntimeFailure(Reason.RUNTIME_ERROR, f"{path}: {shown(line[6:])}")
    if line.startswith((b":", b"event:", b"id:", b"retry:")):
        return None
    raise RuntimeFailure(Reason.RUNTIME_BAD_REPLY, f"{path}: not an event stream: {shown(line[:200])}")


def messages(work: Work) -> list[dict[str, Any]]:
    """The messages of a chat in OpenAI's shape, images as parts with data URLs."""
    return [_message(message) for message in work.messages or []]


def _message(message: ChatMessage) -> dict[str, Any]:
    content = message.content
    if message.images:
        parts: list[Any] = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        parts += [{"type": "image_url", "image_url": {"url": _data_url(image)}} for image in message.images]
        content = parts
    given = {"name": message.name, "tool_calls": message.tool_calls, "tool_call_id": message.tool_call_id}
    optional = {key: value for key, value in given.items() if value is not None}
    return {"role": message.role, "content": content, **optional}


def _data_url(image: str) -> str:
    kind = next((kind for begins, kind in _IMAGES.items() if image.startswith(begins)), "image/jpeg")
    return f"data:{kind};base64,{image}"


class Answer:
    """One streamed chat answer as it is put together."""

    def __init__(self) -> None:
        self.model: str | None = None
        self._pieces: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._finish: str | None = None
        self._usage = _Usage()

    def take(self, data: bytes, path: str) -> str | None:
        """Add one record; its text, which is empty while the model thinks, or None where it has none.

        Raises:
            RuntimeFailure: the record is an error, or not one of this protocol.
        """
        chunk = decode(data, _chunk, path)
        if chunk.error is not None or chunk.object == "error":
            raise RuntimeFailure(Reason.RUNTIME_ERROR, f"{path}: {error_words(chunk.error or chunk.message)}")
        self.model = chunk.model or self.model
        self._usage = chunk.usage or self._usage
        text: str | None = None
        for choice in chunk.choices:
            self._finish = choice.finish_reason or self._finish
            delta = choice.delta or _Delta()
            for call in delta.tool_calls or ():
                self._add_call(call)
                text = text or ""
            if delta.reasoning_content:
                text = text or ""
            if delta.content:
                self._pieces.append(delta.content)
                text = (text or "") + delta.content
        return text

    def result(self) -> JobResult:
        """The whole answer."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._pieces)}
        if self._calls:
            message["tool_calls"] = [self._calls[index] for index in sorted(self._calls)]
        return JobResult(
            message=message,
            finish_reason=self._finish,
            prompt_tokens=self._usage.prompt_tokens,
            completion_tokens=self._usage.completion_tokens,
            model=self.model,
        )

    def _add_call(self, call: _Call) -> None:
        """The first record of a call has its id and name; the arguments come in pieces."""
        whole = self._calls.setdefault(
            call.index, {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
        )
        whole["id"] = call.id or whole["id"]
        if call.function is not None:
            whole["function"]["name"] += call.function.name or ""
            whole["function"]["arguments"] += call.function.arguments or ""
