"""A fake Ollama with the shapes, the habits and, on demand, the faults of the real one.

It loads a model for the first request that needs it, loads again when the runner's options differ, leaves
``size_vram`` out at 0 as old servers do, and counts what it was asked. Also a process:
``python -m support.ollama --port-file F``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any

from support.fake_http import Exchange, FakeServer, first_of, prompt_of, run_as_process

WORDS = ("the", " patient", " scheduler", " keeps", " its", " queue", ".")
OUT_OF_VRAM = "llama runner process has terminated: cudaMalloc failed: out of memory"
DISK_FULL = "write /root/.ollama/models/blobs/sha256-abc-partial: no space left on device"
BUSY = "server busy, please try again.  maximum pending requests exceeded"
FOR_EVER = timedelta(days=365 * 292)
DETAILS = {
    "format": "gguf",
    "family": "llama",
    "families": ["llama"],
    "parameter_size": "8B",
    "quantization_level": "Q4_K_M",
}


class Loaded:
    """A model that the fake holds."""

    def __init__(self, name: str, size: int, vram: int, options: dict[str, Any]) -> None:
        self.name = name
        self.size = size
        self.vram = vram
        self.options = options
        self.keep = timedelta(seconds=300)
        self.requests: set[Exchange] = set()
        #: None until a first request has ended.
        self.ends_at: datetime | None = None

    @property
    def expires_at(self) -> datetime:
        """What ps shows; before a first request has ended it is made up at each look."""
        return datetime.now(UTC) + self.keep if self.ends_at is None else self.ends_at


class FakeOllama(FakeServer):
    """An Ollama with ``installed`` models (name to bytes)."""

    def __init__(self, installed: dict[str, int] | None = None, *, words: tuple[str, ...] = WORDS) -> None:
        super().__init__()
        self.installed = {"m:8b": 5_137_025_024, "qwen3:latest": 2_000_000_000} if installed is None else installed
        self.words = words
        self.loaded: dict[str, Loaded] = {}
        #: The share of a model that goes to VRAM when it is not told to stay on the CPU.
        self.vram_share = 1.0
        #: Rows that ``/api/ps`` answers with instead of the truth.
        self.ps_rows: list[Any] | None = None
        #: How many of the next ``/api/ps`` leave out every row, as busy servers do (BASTION 0.4.1).
        self.ps_missing = 0
        #: Called after a load or unload with the bytes now in VRAM, so that a fake device can follow.
        self.on_vram: Callable[[int], None] | None = None
        #: Set to hold every load until the event is set. A load is given up when its client leaves.
        self.hold_load: asyncio.Event | None = None
        #: Set to hold every generate and chat before its first token until the event is set: the prompt is being read.
        #: The server hears of a client that leaves meanwhile, and its runner does not (ollama#11889).
        self.hold_prompt: asyncio.Event | None = None
        #: Set to let neither hear of a client that leaves after the first token, until the event is set.
        self.deaf: asyncio.Event | None = None
        self.load_error: str | None = None
        #: What its cards have room for, in bytes; None: anything. What does not fit spills, and a load that asks for
        #: every layer in VRAM is refused.
        self.vram_room: int | None = None
        #: Set to hold every unload, and its answer, until the event is set: it lands though its client has left.
        self.hold_unload: asyncio.Event | None = None
        #: What an unload answers with, status 500, instead of doing anything.
        self.unload_error: str | None = None
        #: An unloaded model keeps its row for ever, with an end in the past (ollama#14364).
        self.stays = False
        #: The share of a model's VRAM that an unload gives back.
        self.release_share = 1.0
        #: VRAM that no row speaks of any more.
        self.leaked = 0
        #: What can be fetched, name to bytes.
        self.library: dict[str, int] = {"small:1b": 1_000_000}
        #: An ``error`` record after half of a fetch.
        self.pull_error: str | None = None
        #: Set to hold every fetch at its half until the event is set. It is given up when its client leaves.
        self.hold_pull: asyncio.Event | None = None
        self.pulls = 0
        self.pulls_aborted = 0
        self.unloads = 0
        #: An ``error`` record in mid-stream instead of the second token.
        self.stream_error: str | None = None
        self.load_calls = 0
        self.payload_calls = 0
        self.loads = 0
        self.in_flight = 0
        self.max_overlap = 0
        self.aborted = 0
        #: Requests that were answered 503, as there were too many.
        self.refused = 0

    def counters(self) -> dict[str, Any]:
        own = ("load_calls", "payload_calls", "loads", "max_overlap", "aborted", "refused", "unloads", "pulls")
        return {**super().counters(), **{name: getattr(self, name) for name in own}}

    def answer(self, exchange: Exchange) -> Coroutine[Any, Any, None] | None:
        match exchange.path:
            case "/api/version":
                exchange.respond_json({"version": "0.12.0"})
            case "/api/ps":
                exchange.respond_json({"models": self._ps()})
            case "/api/tags":
                exchange.respond_json({"models": [self._tag(name) for name in self.installed]})
            case "/api/pull":
                return self._pull(exchange)
            case "/api/generate" | "/api/chat" | "/api/embed":
                return self._work(exchange)
            case _:
                exchange.respond(b"404 page not found", status=404, kind="text/plain")
        return None

    def installed_name(self, model: str) -> str | None:
        return next((name for name in (model, f"{model}:latest") if name in self.installed), None)

    def _ps(self) -> list[Any]:
        if self.ps_rows is not None:
            return self.ps_rows
        if self.ps_missing > 0:
            self.ps_missing -= 1
            return []
        held = sorted(self.loaded.values(), key=lambda one: one.expires_at, reverse=True)
        return [_ps_row(one) for one in held]

    def _tag(self, name: str) -> dict[str, Any]:
        modified = "2026-10-01T08:00:00.123456789+02:00"
        size = self.installed[name]
        return {
            "name": name,
            "model": name,
            "modified_at": modified,
            "size": size,
            "digest": "abc",
            "details": DETAILS,
        }

    async def _work(self, exchange: Exchange) -> None:
        asked = exchange.json()
        name = self.installed_name(asked.get("model", ""))
        if name is None:
            exchange.respond_json({"error": f"model '{asked.get('model')}' not found"}, status=404)
            return
        if self.max_in_flight is not None and self.in_flight >= self.max_in_flight:
            self.refused += 1
            exchange.respond_json({"error": BUSY}, status=503)
            return
        self.in_flight += 1
        self.max_overlap = max(self.max_overlap, self.in_flight)
        try:
            await self._in_flight(exchange, name, asked)
        finally:
            self.in_flight -= 1

    async def _in_flight(self, exchange: Exchange, name: str, asked: dict[str, Any]) -> None:
        only_load = exchange.path == "/api/generate" and not asked.get("prompt")
        self.load_calls += only_load
        self.payload_calls += not only_load
        keep_alive = asked.get("keep_alive", 300)
        if only_load and keep_alive == 0:
            await self._unload(exchange, name, asked)
            return
        if not await self._ensure(exchange, name, asked):
            return
        held = self.loaded[name]
        held.keep = FOR_EVER if keep_alive < 0 else timedelta(seconds=keep_alive)
        held.requests.add(exchange)
        try:
            await self._answer(exchange, held, asked, only_load=only_load)
        finally:
            self._request_ended(held, exchange)

    async def _unload(self, exchange: Exchange, name: str, asked: dict[str, Any]) -> None:
        self.unloads += 1
        if self.unload_error is not None:
            exchange.respond_json({"error": self.unload_error}, status=500)
            return
        if self.hold_unload is not None:
            await self.hold_unload.wait()
        held = self.loaded.get(name)
        if held is not None and self.stays:
            held.ends_at = datetime.now(UTC) - timedelta(seconds=1)
        elif held is not None:
            del self.loaded[name]
            self.leaked += held.vram - int(held.vram * self.release_share)
            self._tell_vram()
        exchange.respond_json({**_head(asked), "response": "", "done": True, "done_reason": "unload"})

    async def _pull(self, exchange: Exchange) -> None:
        name = exchange.json().get("model", "")
        self.pulls += 1
        size = self.library.get(name)
        exchange.begin("application/x-ndjson")
        exchange.chunk(_line({"status": "pulling manifest"}))
        if size is None:
            exchange.chunk(_line({"error": "pull model manifest: file does not exist"}))
            exchange.end()
            return
        layer: dict[str, Any] = {"status": "pulling abc", "digest": "sha256:abc", "total": size}
        exchange.chunk(_line(layer))
        exchange.chunk(_line({**layer, "completed": size // 2}))
        if exchange.cut_stream:
            exchange.drop()
            return
        if self.hold_pull is not None and await first_of(self.hold_pull, exchange.gone) is exchange.gone:
            self.pulls_aborted += 1
            return
        if self.pull_error is not None:
            exchange.chunk(_line({"error": self.pull_error}))
            exchange.end()
            return
        exchange.chunk(_line({**layer, "completed": size}))
        for status in ("verifying sha256 digest", "writing manifest", "success"):
            exchange.chunk(_line({"status": status}))
        self.installed[name] = size
        exchange.end()

    def _request_ended(self, held: Loaded, exchange: Exchange) -> None:
        """The last one to end moves on the time at which the model goes."""
        if exchange not in held.requests:
            return
        held.requests.remove(exchange)
        if held.requests:
            return
        held.ends_at = datetime.now(UTC) + held.keep
        if not held.keep and self.loaded.get(held.name) is held:
            del self.loaded[held.name]
            self._tell_vram()

    async def _answer(self, exchange: Exchange, held: Loaded, asked: dict[str, Any], *, only_load: bool) -> None:
        if only_load:
            exchange.respond_json({**_head(asked), "response": "", "done": True, "done_reason": "load"})
        elif exchange.path == "/api/embed":
            given = asked["input"]
            inputs: list[str] = [given] if isinstance(given, str) else given
            rows = [[float(len(text)), 1.0] for text in inputs]
            exchange.respond_json({"model": asked["model"], "embeddings": rows, "prompt_eval_count": len(inputs)})
        else:
            await self._stream(exchange, held, asked)

    async def _ensure(self, exchange: Exchange, name: str, asked: dict[str, Any]) -> bool:
        """Load where the model is not there, or was loaded with other options of the runner."""
        given: dict[str, Any] = asked.get("options") or {}
        options = {key: given[key] for key in ("num_gpu", "num_ctx") if key in given}
        if name in self.loaded and not _differ(self.loaded[name].options, options):
            return True
        if self.load_error is not None:
            exchange.respond_json({"error": self.load_error}, status=500)
            return False
        if self.hold_load is not None and await first_of(self.hold_load, exchange.gone) is exchange.gone:
            self.aborted += 1
            return False
        size = self.installed[name]
        vram = 0 if options.get("num_gpu") == 0 else int(size * self.vram_share)
        if self.vram_room is not None and vram > self.vram_room:
            if options.get("num_gpu", 0) >= 999:
                exchange.respond_json({"error": OUT_OF_VRAM}, status=500)
                return False
            vram = self.vram_room
        self.loads += 1
        self.loaded[name] = Loaded(name, size, vram, options)
        self._tell_vram()
        return True

    def _tell_vram(self) -> None:
        if self.on_vram is not None:
            self.on_vram(self.leaked + sum(one.vram for one in self.loaded.values()))

    async def _stream(self, exchange: Exchange, held: Loaded, asked: dict[str, Any]) -> None:
        lines = self._lines(exchange.path, asked)
        if self.hold_prompt is not None and await first_of(self.hold_prompt, exchange.gone) is exchange.gone:
            self._request_ended(held, exchange)
            await self.hold_prompt.wait()
            self.aborted += 1
            return
        if exchange.truncate:
            exchange.respond(b"".join(lines), kind="application/x-ndjson")
            return
        exchange.begin("application/x-ndjson")
        for number, line in enumerate(lines):
            if exchange.gone.is_set():
                self.aborted += 1
                return
            if number == 1:
                if exchange.cut_stream:
                    exchange.chunk(line[: len(line) // 2])
                    exchange.drop()
                    return
                if self.stream_error is not None:
                    exchange.chunk(json.dumps({"error": self.stream_error}).encode() + b"\n")
                    exchange.end()
                    return
                if await self.linger(exchange):
                    if self.deaf is not None:
                        await self.deaf.wait()
                    self.aborted += 1
                    return
            exchange.chunk(line)
        exchange.end()

    def _lines(self, path: str, asked: dict[str, Any]) -> list[bytes]:
        options: dict[str, Any] = asked.get("options") or {}
        limit = options.get("num_predict")
        spoken = (prompt_of(asked) or "",) if self.echo else self.words
        words = spoken if limit is None else spoken[:limit]
        head = _head(asked)
        records: list[dict[str, Any]] = []
        for text in (*words, ""):
            said = (
                {"response": text} if path == "/api/generate" else {"message": {"role": "assistant", "content": text}}
            )
            records.append({**head, **said, "done": False})
        records[-1] |= {
            "done": True,
            "done_reason": "length" if len(words) < len(spoken) else "stop",
            "total_duration": 1_000_000,
            "prompt_eval_count": 3,
            "eval_count": len(words),
        }
        return [json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records]


def _differ(held: dict[str, Any], asked: dict[str, Any]) -> bool:
    """Whether the model must be loaded anew. A request without ``num_gpu`` takes it as it is."""
    return ("num_gpu" in asked and asked["num_gpu"] != held.get("num_gpu")) or (
        asked.get("num_ctx") != held.get("num_ctx")
    )


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"


def _head(asked: dict[str, Any]) -> dict[str, Any]:
    return {"model": asked["model"], "created_at": "2026-11-29T12:00:00.123456789Z"}


def _ps_row(one: Loaded) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": one.name,
        "model": one.name,
        "size": one.size,
        "digest": "abc",
        "details": DETAILS,
        "expires_at": one.expires_at.isoformat(),
    }
    if one.vram:
        row["size_vram"] = one.vram
    return row


if __name__ == "__main__":
    run_as_process(FakeOllama, "ollama")
