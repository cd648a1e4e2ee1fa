"""A fake Hugging Face style server: ``/generate``, ``/generate_stream``, ``/health``, ``/info``, ``/discharge``.

A request brings its model back where it was discharged. Also a process:
``python -m support.huggingface_fake --port-file F``.
"""

from __future__ import annotations

import json
from collections.abc import Coroutine
from typing import Any

from support.fake_http import Exchange, FakeServer, prompt_of, run_as_process

WORDS = ("the", " patient", " scheduler", " keeps", " its", " queue", ".")


class FakeHuggingFace(FakeServer):
    """One model."""

    def __init__(self, *, model: str = "org/tiny", words: tuple[str, ...] = WORDS) -> None:
        super().__init__()
        self.model = model
        self.words = words
        self.device_type = "cuda"
        self.loaded = True
        #: Whether ``/info`` says that it is loaded: many servers do not.
        self.tells_loaded = False
        #: False: it has ``/generate`` only.
        self.streams = True
        #: The answer of ``/generate`` in a list of one, as some servers give it.
        self.in_list = False
        self.load_error: str | None = None
        self.stream_error: str | None = None
        self.loads = 0
        self.discharges = 0
        self.generations = 0
        self.in_flight = 0
        self.max_overlap = 0
        self.aborted = 0

    def counters(self) -> dict[str, Any]:
        own = ("loads", "discharges", "generations", "max_overlap", "aborted")
        return {**super().counters(), **{name: getattr(self, name) for name in own}}

    def answer(self, exchange: Exchange) -> Coroutine[Any, Any, None] | None:
        match exchange.path:
            case "/health":
                exchange.respond(b"")
            case "/info":
                said = {"loaded": self.loaded} if self.tells_loaded else {}
                exchange.respond_json({"model_id": self.model, "model_device_type": self.device_type, **said})
            case "/discharge":
                self.discharges += 1
                self.loaded = False
                exchange.respond_json({"status": "discharged"})
            case "/generate":
                return self._generate(exchange)
            case "/generate_stream" if self.streams:
                return self._generate(exchange)
            case _:
                exchange.respond(b"", status=404)
        return None

    async def _generate(self, exchange: Exchange) -> None:
        if not self.loaded:
            if self.load_error is not None:
                exchange.respond_json({"error": self.load_error, "error_type": "load"}, status=500)
                return
            self.loads += 1
            self.loaded = True
        self.generations += 1
        self.in_flight += 1
        self.max_overlap = max(self.max_overlap, self.in_flight)
        try:
            if exchange.path == "/generate":
                await self._whole(exchange)
            else:
                await self._stream(exchange)
        finally:
            self.in_flight -= 1

    def _said(self, exchange: Exchange) -> tuple[tuple[str, ...], dict[str, Any]]:
        asked = exchange.json()
        limit = asked.get("parameters", {}).get("max_new_tokens")
        spoken = (prompt_of(asked) or "",) if self.echo else self.words
        words = spoken if limit is None else spoken[:limit]
        finish = "length" if len(words) < len(spoken) else "eos_token"
        details = {"finish_reason": finish, "generated_tokens": len(words), "input_length": 3}
        return words, details

    async def _whole(self, exchange: Exchange) -> None:
        words, details = self._said(exchange)
        if await self.linger(exchange):
            self.aborted += 1
            return
        answer = {"generated_text": "".join(words), "details": details}
        exchange.respond_json([answer] if self.in_list else answer)

    async def _stream(self, exchange: Exchange) -> None:
        words, details = self._said(exchange)
        exchange.begin("text/event-stream")
        for number, word in enumerate(words):
            record: dict[str, Any] = {"token": {"id": number, "text": word, "logprob": -1.0, "special": False}}
            if number == len(words) - 1:
                record |= {"generated_text": "".join(words), "details": details}
            else:
                record |= {"generated_text": None, "details": None}
            event = b"data:" + json.dumps(record).encode() + b"\n\n"
            if exchange.gone.is_set():
                self.aborted += 1
                return
            if number == 1:
                if exchange.cut_stream:
                    exchange.chunk(event[: len(event) // 2])
                    exchange.drop()
                    return
                if exchange.truncate:
                    break
                if self.stream_error is not None:
                    said = {"error": self.stream_error, "error_type": "generation"}
                    exchange.chunk(b"data:" + json.dumps(said).encode() + b"\n\n")
                    break
                if await self.linger(exchange):
                    self.aborted += 1
                    return
            exchange.chunk(event)
        exchange.end()


if __name__ == "__main__":
    run_as_process(FakeHuggingFace, "huggingface_fake")
