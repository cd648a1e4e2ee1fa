"""A completion in llama.cpp's own protocol, streamed to its last record."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from gpukeeper.agents.runtimes import llamacpp_wire as wire
from gpukeeper.agents.runtimes import openai_chat
from gpukeeper.agents.runtimes.http import RuntimeHttp, decode, error_words
from gpukeeper.agents.runtimes.openai_run import CheckAnswered
from gpukeeper.agents.runtimes.port import Done, RuntimeFailure, Token
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import JobResult, Work


async def generate(
    http: RuntimeHttp, model: str, work: Work, check: CheckAnswered, *, query: str = ""
) -> AsyncGenerator[Token | Done]:
    """Complete the prompt of ``work``; ``query`` goes behind the path. Raises as ``port.Provider.run`` does."""
    path = f"/completion{query}"
    body = {**wire.settings(work), "model": model, "prompt": work.prompt, "stream": True}
    pieces: list[str] = []
    async with http.stream(path, body) as lines:
        async for line in lines:
            data = openai_chat.sse_data(line, path)
            if data is None:
                continue
            record = decode(data, wire.completion_decoder, path)
            if record.error is not None:
                raise RuntimeFailure(Reason.RUNTIME_ERROR, f"{path}: {error_words(record.error)}")
            if record.content:
                pieces.append(record.content)
                yield Token(record.content)
            if record.stop:
                await lines.finish()
                await check(record.model)
                yield Done(
                    JobResult(
                        text="".join(pieces),
                        finish_reason=wire.finish(record),
                        prompt_tokens=record.tokens_evaluated,
                        completion_tokens=record.tokens_predicted,
                        model=record.model,
                    )
                )
                return
    raise RuntimeFailure(Reason.RUNTIME_CUT, f"{path}: the stream ended without its last record")
