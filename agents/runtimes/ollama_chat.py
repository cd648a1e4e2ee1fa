"""The messages of a chat in Ollama's shape, from those of OpenAI's clients. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from gpukeeper.agents.runtimes.port import RuntimeFailure
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import ChatMessage, Work


def messages(work: Work) -> list[dict[str, Any]]:
    """The messages of a chat in Ollama's shape: text as one string, images beside it.

    Raises:
        RuntimeFailure: a part that Ollama cannot take, with its place.
    """
    return [_message(message, f"messages[{place}]") for place, message in enumerate(work.messages or [])]


def _message(message: ChatMessage, place: str) -> dict[str, Any]:
    images = list(message.images or ())
    content = message.content
    if not isinstance(content, str):
        texts: list[str] = []
        for number, part in enumerate(content):
            _take_part(part, f"{place}.content[{number}]", texts, images)
        content = "\n".join(texts)
    shaped: dict[str, Any] = {"role": message.role, "content": content}
    if images:
        shaped["images"] = images
    if message.tool_calls:
        shaped["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.role == "tool" and message.name:
        shaped["tool_name"] = message.name
    if message.tool_call_id:
        shaped["tool_call_id"] = message.tool_call_id
    return shaped


class _Url(msgspec.Struct):
    url: str


class _Part(msgspec.Struct):
    type: str
    text: str = ""
    image_url: _Url | None = None


def _take_part(part: object, place: str, texts: list[str], images: list[str]) -> None:
    """Sort one part of OpenAI's content into texts and images."""
    try:
        record = msgspec.convert(part, _Part)
    except msgspec.ValidationError as error:
        raise RuntimeFailure(Reason.INVALID, f"{place}: {error}") from error
    if record.type == "text":
        texts.append(record.text)
    elif record.image_url is not None and ";base64," in record.image_url.url[:100]:
        images.append(record.image_url.url.split(";base64,", 1)[1])
    else:
        raise RuntimeFailure(Reason.INVALID, f"{place}: Ollama takes text and images as data URLs only")


class _Function(msgspec.Struct):
    name: str
    arguments: Any = None


class _Call(msgspec.Struct):
    function: _Function


def _call(call: object) -> object:
    """A call of a tool with its arguments as an object; OpenAI has them as a string of JSON."""
    try:
        arguments = msgspec.convert(call, _Call).function.arguments
        if not isinstance(arguments, str):
            return call
        name = msgspec.convert(call, _Call).function.name
        return {"function": {"name": name, "arguments": msgspec.json.decode(arguments)}}
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise RuntimeFailure(Reason.INVALID, f"tool_calls: {error}") from error
