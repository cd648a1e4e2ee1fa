"""A fake llama.cpp router: models with their states, loaded and unloaded by name, with its habits and faults.

It makes room by count, and takes the least recently used model whether that works or not. A model that does not fit
into its memory ends its process. Work for a model that is not loaded loads it, unless it is asked not to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any
from urllib.parse import parse_qs

from support.fake_http import Exchange, FakeServer
from support.llamacpp_fake import FakeLlamaCpp


class Child:
    """One model of the router, and the process that serves it."""

    def __init__(self, name: str, size: int, aliases: tuple[str, ...]) -> None:
        self.name = name
        self.size = size
        self.aliases = aliases
        self.state = "unloaded"
        self.failed = False
        self.exit_code = 0
        self.last_used = 0
        self.server = FakeLlamaCpp(model=name, size=size)

    @property
    def running(self) -> bool:
        return self.state in ("loading", "loaded", "sleeping")

    def row(self) -> dict[str, Any]:
        status: dict[str, Any] = {"value": self.state, "args": ["llama-server", "--alias", self.name]}
        if self.failed:
            status |= {"failed": True, "exit_code": self.exit_code}
        row = {"id": self.name, "aliases": list(self.aliases), "object": "model", "status": status}
        return row | {"meta": {"size": self.size, "n_ctx": 4096}} if self.state in ("loaded", "sleeping") else row


class FakeLlamaRouter(FakeServer):
    """A router over ``models`` (name to bytes)."""

    def __init__(self, models: dict[str, int], *, aliases: dict[str, tuple[str, ...]] | None = None) -> None:
        super().__init__()
        given = aliases or {}
        self.children = {name: Child(name, size, given.get(name, ())) for name, size in models.items()}
        #: ``--models-max``: how many run at once; 0: any number.
        self.models_max = 4
        #: What all that is loaded may take together, in bytes; None: anything.
        self.memory: int | None = None
        #: Called after a load or unload with the bytes that are held.
        self.on_memory: Callable[[int], None] | None = None
        #: Set to hold every load (and every unload) in its state until the event is set.
        self.hold_load: asyncio.Event | None = None
        self.hold_unload: asyncio.Event | None = None
        #: An unload is accepted, and nothing comes of it.
        self.stays = False
        self.loads = 0
        self.unloads = 0
        self.evictions = 0
        self._clock = count(1)

    def answer(self, exchange: Exchange) -> Coroutine[Any, Any, None] | None:
        match exchange.path:
            case "/health":
                exchange.respond(b'{"status":"ok"}')
            case "/props" if "model" not in exchange.query:
                exchange.respond_json({"role": "router", "max_instances": self.models_max, "model_path": "none"})
            case "/models" | "/v1/models":
                exchange.respond_json({"data": [child.row() for child in self.children.values()], "object": "list"})
            case "/models/load":
                self._asked_to_load(exchange)
            case "/models/unload":
                self._asked_to_unload(exchange)
            case _:
                return self._forward(exchange)
        return None

    def child(self, name: str) -> Child | None:
        return next((one for one in self.children.values() if name in (one.name, *one.aliases)), None)

    @property
    def held(self) -> int:
        return sum(child.size for child in self.children.values() if child.state in ("loading", "loaded"))

    def _asked_to_load(self, exchange: Exchange) -> None:
        child = self.child(exchange.json().get("model", ""))
        if child is None:
            _refuse(exchange, 404, "model is not found")
        elif child.running:
            _refuse(exchange, 400, "model is already running")
        elif not self._make_room():
            _refuse(exchange, 500, "model limit reached, try again later")
        else:
            self.spawn(self._load(child))
            exchange.respond_json({"success": True})

    def _asked_to_unload(self, exchange: Exchange) -> None:
        child = self.child(exchange.json().get("model", ""))
        if child is None:
            _refuse(exchange, 400, "model is not found")
        elif not child.running:
            _refuse(exchange, 400, "model is not running")
        else:
            self.unloads += 1
            self.spawn(self._unload(child))
            exchange.respond_json({"success": True})

    def _make_room(self) -> bool:
        running = sorted((one for one in self.children.values() if one.running), key=lambda one: one.last_used)
        if not self.models_max or len(running) < self.models_max:
            return True
        if self.stays:
            return False
        self.evictions += 1
        running[0].state = "unloaded"
        self._tell()
        return True

    async def _load(self, child: Child) -> None:
        self.loads += 1
        child.state, child.failed, child.last_used = "loading", False, next(self._clock)
        self._tell()
        if self.hold_load is not None:
            await self.hold_load.wait()
        if child.state != "loading":
            return
        if self.memory is not None and self.held > self.memory:
            child.state, child.failed, child.exit_code = "unloaded", True, 1
        else:
            child.state = "loaded"
        self._tell()

    async def _unload(self, child: Child) -> None:
        if self.hold_unload is not None:
            await self.hold_unload.wait()
        if not self.stays:
            child.state = "unloaded"
            self._tell()

    def _tell(self) -> None:
        if self.on_memory is not None:
            self.on_memory(self.held)

    async def _forward(self, exchange: Exchange) -> None:
        asked = parse_qs(exchange.query)
        name = exchange.json().get("model", "") if exchange.method == "POST" else asked.get("model", [""])[0]
        child = self.child(name)
        if child is None:
            _refuse(exchange, 400, f"model '{name}' not found" if name else "model name is missing from the request")
            return
        if child.state == "unloaded" and asked.get("autoload") != ["false"]:
            if not self._make_room():
                _refuse(exchange, 500, "model limit reached, try again later")
                return
            await self._load(child)
        if not child.running:
            _refuse(exchange, 400, "model is not loaded")
            return
        if child.state == "sleeping":
            child.state = "loaded"
        if exchange.method == "POST":
            child.last_used = next(self._clock)
        child.server.hold = self.hold
        child.server.pace_s = self.pace_s
        work = child.server.answer(exchange)
        if work is not None:
            await work


def _refuse(exchange: Exchange, status: int, words: str) -> None:
    exchange.respond_json({"error": {"code": status, "message": words, "type": "invalid_request_error"}}, status=status)
