"""A scripted server that speaks llama.cpp's protocol, for faults and for benchmarks of everything else.

What a real server does is tested with a real one (``support.llamacpp_server``). This one answers
``/completion`` at once with a few streamed tokens. Also ``python -m support.llamacpp_fake --port-file F``.
"""

from __future__ import annotations

import json
from collections.abc import Coroutine
from typing import Any

from support.fake_http import Exchange, FakeServer, prompt_of, run_as_process

WORDS = ("the", " patient", " scheduler", " keeps", " its", " queue", ".")


class FakeLlamaCpp(FakeServer):
    """One model, any number of requests at once."""

    def __init__(self, *, model: str = "fake", size: int = 1_000_000, words: tuple[str, ...] = WORDS) -> None:
        super().__init__()
        self.model = model
        self.size = size
        self.words = words
        self.completions = 0
        self.in_flight = 0
        self.max_overlap = 0
        self.aborted = 0
        #: An ``error`` event in mid-stream instead of the second token.
        self.stream_error: str | None = None
        self._ready: dict[tuple[str, int], bytes] = {}

    def counters(self) -> dict[str, Any]:
        own = {"completions": self.completions, "max_overlap": self.max_overlap, "aborted": self.aborted}
        return {**super().counters(), **own}

    def answer(self, exchange: Exchange) -> Coroutine[Any, Any, None] | None:
        match exchange.path:
            case "/health":
                exchange.respond(b'{"status":"ok"}')
            case "/slots":
                exchange.respond_json([{"id": 0, "is_processing": self.in_flight > 0}])
            case "/v1/models":
                row = {"id": self.model, "object": "model", "meta": {"size": self.size, "n_ctx": 4096}}
                exchange.respond_json({"object": "list", "data": [row]})
            case "/props":
                exchange.respond_json({"model_path": f"/models/{self.model}.gguf", "total_slots": 1})
            case "/completion" | "/v1/chat/completions":
                return self._complete(exchange)
            case "/v1/embeddings":
                self._embed(exchange)
            case _:
                exchange.respond(b'{"error":{"code":404,"message":"File Not Found"}}', status=404)
        return None

    def _complete(self, exchange: Exchange) -> Coroutine[Any, Any, None] | None:
        if self.max_in_flight is not None and self.in_flight >= self.max_in_flight:
            body = {"error": {"code": 503, "message": "no slot available", "type": "unavailable_error"}}
            exchange.respond_json(body, status=503)
            return None
        self.completions += 1
        self.max_overlap = max(self.max_overlap, self.in_flight + 1)
        slow = self.hold is not None or self.stream_error is not None or self.pace_s > 0 or self.echo
        if not slow and not exchange.cut_stream and not exchange.truncate:
            exchange.write(self._at_once(exchange))
            return None
        return self._slowly(exchange)

    def _at_once(self, exchange: Exchange) -> bytes:
        """The whole streamed answer, made once and sent in one piece."""
        count = self._count(exchange) if self.record_bodies else len(self.words)
        key = (exchange.path, count)
        if key not in self._ready:
            events = b"".join(self._events(exchange.path, self.words[:count]))
            head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            self._ready[key] = head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(events), events)
        return self._ready[key]

    async def _slowly(self, exchange: Exchange) -> None:
        self.in_flight += 1
        try:
            asked = exchange.json()
            spoken = (prompt_of(asked) or "",) if self.echo else self.words[: self._count(exchange)]
            events = self._events(exchange.path, spoken)
            exchange.begin("text/event-stream")
            # A chat begins with an event that has no text.
            after_first_token = 1 if exchange.path == "/completion" else 2
            for number, event in enumerate(events):
                if exchange.gone.is_set():
                    self.aborted += 1
                    return
                if number == after_first_token:
                    if exchange.cut_stream:
                        exchange.chunk(event[: len(event) // 2])
                        exchange.drop()
                        return
                    if exchange.truncate:
                        break
                    if self.stream_error is not None:
                        exchange.chunk(_event({"error": {"code": 500, "message": self.stream_error}}))
                        break
                    if await self.linger(exchange):
                        self.aborted += 1
                        return
                exchange.chunk(event)
            exchange.end()
        finally:
            self.in_flight -= 1

    def _count(self, exchange: Exchange) -> int:
        asked = exchange.json()
        limit = asked.get("n_predict", asked.get("max_tokens"))
        return len(self.words) if limit is None else min(int(limit), len(self.words))

    def _events(self, path: str, words: tuple[str, ...]) -> list[bytes]:
        count = len(words)
        finish = "limit" if not self.echo and count < len(self.words) else "eos"
        if path == "/completion":
            records: list[dict[str, Any]] = [
                {
                    "index": 0,
                    "content": word,
                    "stop": False,
                    "tokens_predicted": number,
                    "tokens_evaluated": 3,
                }
                for number, word in enumerate(words, 1)
            ]
            records.append(
                {
                    "index": 0,
                    "content": "",
                    "stop": True,
                    "stop_type": finish,
                    "model": self.model,
                    "tokens_predicted": count,
                    "tokens_evaluated": 3,
                }
            )
            return [_event(record) for record in records]
        head: dict[str, Any] = {"object": "chat.completion.chunk", "model": self.model}
        first = {"index": 0, "finish_reason": None, "delta": {"role": "assistant", "content": None}}
        records = [{**head, "choices": [first]}]
        for word in words:
            records.append({**head, "choices": [{"index": 0, "finish_reason": None, "delta": {"content": word}}]})
        said = "length" if finish == "limit" else "stop"
        records.append({**head, "choices": [{"index": 0, "finish_reason": said, "delta": {}}]})
        usage = {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": 3 + count}
        records.append({**head, "choices": [], "usage": usage})
        return [*(_event(record) for record in records), b"data: [DONE]\n\n"]

    def _embed(self, exchange: Exchange) -> None:
        given = exchange.json()["input"]
        inputs: list[str] = [given] if isinstance(given, str) else given
        rows = [
            {"object": "embedding", "index": at, "embedding": [float(len(text)), 1.0]} for at, text in enumerate(inputs)
        ]
        exchange.respond_json({"model": self.model, "data": rows, "usage": {"prompt_tokens": len(inputs)}})


def _event(record: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(record).encode() + b"\n\n"


if __name__ == "__main__":
    run_as_process(FakeLlamaCpp, "llamacpp_fake")
