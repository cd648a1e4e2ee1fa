"""Runs over the HTTP interface of OpenAI, for every server that offers it: chats, completions, embeddings."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec

from gpukeeper.agents.runtimes import openai_chat
from gpukeeper.agents.runtimes.http import RuntimeHttp
from gpukeeper.agents.runtimes.openai_completion import Completed
from gpukeeper.agents.runtimes.port import Done, RuntimeFailure, Token
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import JobResult, Work

#: Raises where the model that answered is not the one that was asked.
CheckAnswered = Callable[[str | None], Awaitable[None]]


class _Embedding(msgspec.Struct):
    embedding: list[float]
    index: int


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None


class _Embeddings(msgspec.Struct):
    data: list[_Embedding]
    model: str | None = None
    usage: _Usage | None = None


_embeddings = msgspec.json.Decoder(_Embeddings)


def chat(
    http: RuntimeHttp, model: str, settings: dict[str, Any], work: Work, check: CheckAnswered, *, query: str = ""
) -> AsyncGenerator[Token | Done]:
    """A streamed chat. ``settings`` are in OpenAI's names; raises as ``port.Provider.run`` does.

    ``query`` goes behind the path.
    """
    body = {**settings, "model": model, "messages": openai_chat.messages(work)}
    return _stream(http, f"/v1/chat/completions{query}", body, openai_chat.Answer(), check)


def complete(
    http: RuntimeHttp, model: str, settings: dict[str, Any], work: Work, check: CheckAnswered
) -> AsyncGenerator[Token | Done]:
    """A streamed completion of a prompt, as :func:`chat`."""
    body = {**settings, "model": model, "prompt": work.prompt}
    return _stream(http, "/v1/completions", body, Completed(), check)


async def _stream(
    http: RuntimeHttp, path: str, body: dict[str, Any], answer: openai_chat.Answer | Completed, check: CheckAnswered
) -> AsyncGenerator[Token | Done]:
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with http.stream(path, asked) as lines:
        async for line in lines:
            data = openai_chat.sse_data(line, path)
            if data is None:
                continue
            if data == openai_chat.END:
                await lines.finish()
                await check(answer.model)
                yield Done(answer.result())
                return
            text = answer.take(data, path)
            if text is not None:
                yield Token(text)
    raise RuntimeFailure(Reason.RUNTIME_CUT, f"{path}: the stream ended without its last record")


async def embed(
    http: RuntimeHttp, model: str, work: Work, check: CheckAnswered, *, query: str = ""
) -> AsyncGenerator[Token | Done]:
    """Embeddings, one row for each input, in their order."""
    path = f"/v1/embeddings{query}"
    wanted = [work.input] if isinstance(work.input, str) else work.input or []
    asked = {**(work.options or {}), "model": model, "input": wanted, "encoding_format": "float"}
    answer = await http.post(path, asked, _embeddings)
    rows = sorted(answer.data, key=lambda row: row.index)
    if [row.index for row in rows] != list(range(len(wanted))):
        raise RuntimeFailure(Reason.RUNTIME_BAD_REPLY, f"{path}: {len(rows)} embeddings for {len(wanted)} inputs")
    await check(answer.model)
    yield Done(
        JobResult(
            embeddings=[row.embedding for row in rows],
            prompt_tokens=answer.usage.prompt_tokens if answer.usage else None,
            model=answer.model,
        )
    )
