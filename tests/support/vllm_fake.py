"""A fake vLLM: OpenAI's interface, metrics for each engine, sleep and wake, and faults on demand.

It signs every answer with the first of its names, ends a completion after 16 words where no limit is named, and
answers from memory that holds nothing where it was woken from a sleep of level 2 without reading its weights again.
Also a process: ``python -m support.vllm_fake --port-file F``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import parse_qs

from support.fake_http import Exchange, FakeServer, prompt_of, run_as_process

WORDS = ("the", " patient", " scheduler", " keeps", " its", " queue", ".") * 3
DEFAULT_MAX_TOKENS = 16
GARBAGE = "!!!!"


class FakeVllm(FakeServer):
    """One model under several names."""

    def __init__(self, *, names: tuple[str, ...] = ("tiny", "tiny-alias"), words: tuple[str, ...] = WORDS) -> None:
        super().__init__()
        self.names = names
        self.adapters: tuple[str, ...] = ()
        self.words = words
        #: False: started without sleep mode, so that its paths do not exist.
        self.can_sleep = True
        #: 0: awake. 1 and 2: asleep at that level.
        self.sleep_level = 0
        #: Called with whether it is awake when that changes, so that a fake device can follow.
        self.on_awake: Callable[[bool], None] | None = None
        self.has_weights = True
        self.sleeps: list[int] = []
        self.wakes: list[str] = []
        #: Series of ``/metrics`` instead of the truth: ``running`` and ``waiting`` for each engine.
        self.engines: list[list[float]] | None = None
        self.metrics_text: str | None = None
        #: It takes requests, is healthy, and never gives a token (vllm#39863).
        self.stuck = False
        self.stream_error: str | None = None
        self.embeds = True
        self.in_flight = 0
        self.max_overlap = 0
        self.aborted = 0
        self.completions = 0

    def counters(self) -> dict[str, Any]:
        own = ("completions", "max_overlap", "aborted", "sleeps", "wakes", "sleep_level")
        return {**super().counters(), **{name: getattr(self, name) for name in own}}

    def answer(self, exchange: Exchange) -> Coroutine[Any, Any, None] | None:
        match exchange.path:
            case "/health":
                exchange.respond(b"")
            case "/v1/models":
                exchange.respond_json({"object": "list", "data": self._models()})
            case "/metrics":
                exchange.respond(self._metrics().encode(), kind="text/plain; version=0.0.4")
            case "/is_sleeping" | "/sleep" | "/wake_up" | "/collective_rpc" if self.can_sleep:
                self._sleep(exchange)
            case "/v1/completions" | "/v1/chat/completions" | "/v1/embeddings":
                return self._work(exchange)
            case _:
                exchange.respond(b'{"detail":"Not Found"}', status=404)
        return None

    def _models(self) -> list[dict[str, Any]]:
        own = [{"id": name, "object": "model", "root": f"org/{self.names[0]}", "parent": None} for name in self.names]
        return own + [{"id": name, "object": "model", "parent": self.names[0]} for name in self.adapters]

    def _metrics(self) -> str:
        if self.metrics_text is not None:
            return self.metrics_text
        engines = self.engines if self.engines is not None else [[float(self.in_flight), 0.0]]
        lines: list[str] = []
        for place, name in enumerate(("vllm:num_requests_running", "vllm:num_requests_waiting")):
            lines += [f"# HELP {name} Number of requests.", f"# TYPE {name} gauge"]
            for number, counts in enumerate(engines):
                lines.append(f'{name}{{engine="{number}",model_name="{self.names[0]}"}} {counts[place]}')
        lines.append(f'vllm:kv_cache_usage_perc{{engine="0",model_name="{self.names[0]}"}} 0.0')
        return "\n".join(lines) + "\n"

    def _sleep(self, exchange: Exchange) -> None:
        asked = parse_qs(exchange.query)
        match exchange.path:
            case "/is_sleeping":
                exchange.respond_json({"is_sleeping": self.sleep_level > 0})
                return
            case "/sleep":
                self.sleep_level = int(asked.get("level", ["1"])[0])
                self.has_weights = self.sleep_level < 2
                self.sleeps.append(self.sleep_level)
                self._tell_awake()
            case "/wake_up":
                tags = ",".join(asked.get("tags", []))
                self.wakes.append(tags)
                if tags != "weights":
                    self.sleep_level = 0
                self._tell_awake()
            case _:
                self.has_weights = exchange.json()["method"] == "reload_weights"
        exchange.respond(b"")

    def _tell_awake(self) -> None:
        if self.on_awake is not None:
            self.on_awake(self.sleep_level == 0)

    def _work(self, exchange: Exchange) -> Coroutine[Any, Any, None] | None:
        asked = exchange.json()
        if asked["model"] not in (*self.names, *self.adapters):
            error = {"message": f"The model `{asked['model']}` does not exist.", "type": "NotFoundError", "code": 404}
            exchange.respond_json({"error": error}, status=404)
        elif exchange.path == "/v1/embeddings":
            self._embed(exchange, asked)
        else:
            return self._stream(exchange, asked)
        return None

    def _embed(self, exchange: Exchange, asked: dict[str, Any]) -> None:
        if not self.embeds:
            error = {"message": "The model does not support Embeddings API", "code": 400}
            exchange.respond_json({"error": error}, status=400)
            return
        rows = [
            {"object": "embedding", "index": at, "embedding": [float(len(text)), 1.0]}
            for at, text in enumerate(asked["input"])
        ]
        answer = {"model": self.names[0], "data": rows, "usage": {"prompt_tokens": len(rows)}}
        exchange.respond_json(answer)

    async def _stream(self, exchange: Exchange, asked: dict[str, Any]) -> None:
        self.completions += 1
        self.in_flight += 1
        self.max_overlap = max(self.max_overlap, self.in_flight)
        try:
            exchange.begin("text/event-stream")
            if self.stuck or self.sleep_level:
                await exchange.gone.wait()
                self.aborted += 1
                return
            for number, event in enumerate(self._events(exchange.path, asked)):
                if exchange.gone.is_set():
                    self.aborted += 1
                    return
                if number == (2 if "chat" in exchange.path else 1):
                    if exchange.cut_stream:
                        exchange.chunk(event[: len(event) // 2])
                        exchange.drop()
                        return
                    if exchange.truncate:
                        break
                    if self.stream_error is not None:
                        exchange.chunk(_event({"object": "error", "message": self.stream_error, "code": 500}))
                        exchange.chunk(b"data: [DONE]\n\n")
                        break
                    if await self.linger(exchange):
                        self.aborted += 1
                        return
                exchange.chunk(event)
            exchange.end()
        finally:
            self.in_flight -= 1

    def _events(self, path: str, asked: dict[str, Any]) -> list[bytes]:
        chat = "chat" in path
        limit = asked.get("max_tokens", None if chat else DEFAULT_MAX_TOKENS)
        spoken = (prompt_of(asked) or "",) if self.echo else self.words
        words = spoken if limit is None else spoken[:limit]
        if not self.has_weights:
            words = (GARBAGE,) * len(words)
        head = {"object": "chat.completion.chunk" if chat else "text_completion", "model": asked["model"]}
        if head["model"] in self.names:
            head["model"] = self.names[0]
        records: list[dict[str, Any]] = []
        if chat:
            records.append({**head, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        finish = "length" if len(words) < len(spoken) else "stop"
        for number, word in enumerate(words, 1):
            said = {"delta": {"content": word}} if chat else {"text": word}
            ends = finish if number == len(words) else None
            records.append({**head, "choices": [{"index": 0, **said, "finish_reason": ends}]})
        usage = {"prompt_tokens": 3, "completion_tokens": len(words), "total_tokens": 3 + len(words)}
        records.append({**head, "choices": [], "usage": usage})
        return [*(_event(record) for record in records), b"data: [DONE]\n\n"]


def _event(record: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(record).encode() + b"\n\n"


if __name__ == "__main__":
    run_as_process(FakeVllm, "vllm_fake")
