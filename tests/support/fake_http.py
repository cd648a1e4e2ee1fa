"""A small HTTP/1.1 server for fakes: raw asyncio, faults on demand, counters of what it was asked.

It can do what a well-behaved library refuses to: answer nothing, cut a body, close in mid-stream.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Literal, Self

FaultKind = Literal["status", "html", "truncated", "empty", "stall", "drop", "cut"]

HTML = b"<html><head><title>502 Bad Gateway</title></head><body>nginx</body></html>"
_PHRASES = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    429: "Too Many Requests",
    500: "Internal Server Error",
}


class Fault:
    """What goes wrong at one path, for the next ``times`` requests (None: until it is taken away).

    - ``status``: that status with ``body``; ``html``: a 200 of HTML; ``empty``: a 200 without a body
    - ``truncated``: the first half of the right answer, with a matching length
    - ``stall``: nothing until :attr:`released` is set, then the right answer
    - ``drop``: the connection closes without an answer
    - ``cut``: the connection closes in the middle of a streamed answer
    """

    def __init__(
        self, kind: FaultKind, *, status: int = 500, body: str = '{"error":"boom"}', times: int | None = None
    ) -> None:
        self.kind: FaultKind = kind
        self.status = status
        self.body = body
        self.times = times
        self.released = asyncio.Event()


class Exchange:
    """One request, and the means to answer it."""

    def __init__(self, connection: _Connection, method: str, path: str, query: str, body: bytes) -> None:
        self._connection = connection
        self.method = method
        self.path = path
        #: What follows the question mark, as it was sent.
        self.query = query
        self.body = body
        self.cut_stream = False
        self.truncate = False
        self.done = False

    def json(self) -> dict[str, Any]:
        return json.loads(self.body or b"{}")

    @property
    def gone(self) -> asyncio.Event:
        """Set when the client has closed the connection."""
        return self._connection.gone

    def write(self, data: bytes) -> None:
        """Send ready bytes, head and all. The answer is complete with them."""
        self._connection.send(data)
        self._finish()

    def respond(self, body: bytes, *, status: int = 200, kind: str = "application/json") -> None:
        if self.truncate:
            body = body[: len(body) // 2]
        self.write(whole(body, status=status, kind=kind))

    def respond_json(self, value: object, *, status: int = 200) -> None:
        self.respond(json.dumps(value).encode(), status=status)

    def begin(self, kind: str) -> None:
        """Begin a streamed answer."""
        self._connection.send(
            b"HTTP/1.1 200 OK\r\nContent-Type: " + kind.encode() + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
        )

    def switch(self, protocol: str) -> None:
        """Take the connection over to another protocol. No request follows on it."""
        self._connection.send(
            f"HTTP/1.1 101 Switching Protocols\r\nUpgrade: {protocol}\r\nConnection: Upgrade\r\n\r\n".encode()
        )

    def chunk(self, data: bytes) -> None:
        self._connection.send(b"%x\r\n%s\r\n" % (len(data), data))

    def end(self) -> None:
        self._connection.send(b"0\r\n\r\n")
        self._finish()

    def drop(self) -> None:
        """Close the connection where it stands; what was sent before still arrives."""
        self._connection.close()
        self._finish()

    def _finish(self) -> None:
        if not self.done:
            self.done = True
            self._connection.answered()


def whole(body: bytes, *, status: int = 200, kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status} {_PHRASES.get(status, 'Error')}\r\nContent-Type: {kind}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class FakeServer:
    """The base of the fakes: subclasses answer in :meth:`answer`, at once or with a coroutine."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.faults: dict[str, Fault] = {}
        self.record_bodies = True
        #: How often each prompt (or last message, or input) was sent as work, where ``count_prompts`` is on.
        self.prompts: Counter[str] = Counter()
        self.count_prompts = False
        #: How long each generate and chat takes between its first token and the others.
        self.pace_s = 0.0
        #: Answer with the prompt itself instead of the usual words.
        self.echo = False
        #: Set to hold every generate and chat after its first token until the event is set.
        self.hold: asyncio.Event | None = None
        self.max_in_flight: int | None = None
        self.connections = 0
        self.url = ""
        #: 0: any that is free.
        self.wanted_port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._awaited: list[tuple[str, int, asyncio.Event]] = []
        self.live: set[_Connection] = set()

    def answer(self, exchange: Exchange) -> Coroutine[Any, Any, None] | None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", self.wanted_port)
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for connection in list(self.live):
            connection.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def port(self) -> int:
        assert self._server is not None
        return self._server.sockets[0].getsockname()[1]

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error

    def dispatch(self, exchange: Exchange) -> None:
        self.requests[exchange.path] += 1
        if self.record_bodies and exchange.method == "POST" and not exchange.path.startswith("/_fake/"):
            self.bodies.append((exchange.path, exchange.json()))
        if self.count_prompts and exchange.method == "POST" and not exchange.path.startswith("/_fake/"):
            self._count_prompt(exchange.json())
        fault = self.faults.get(exchange.path)
        if fault is not None and fault.times != 0:
            if fault.times is not None:
                fault.times -= 1
            work = self._fail(exchange, fault)
        elif exchange.path == "/_fake/faults":
            work = self._set_fault(exchange)
        elif exchange.path == "/_fake/counters":
            work = exchange.respond_json(self.counters())
        elif exchange.path == "/_fake/set":
            work = self._set(exchange)
        elif exchange.path == "/_fake/until":
            work = self._until(exchange)
        else:
            work = self.answer(exchange)
        if work is not None:
            self.spawn(work)

    def counters(self) -> dict[str, Any]:
        """What was asked, for tests that run the fake in another process."""
        return {"requests": dict(self.requests), "connections": self.connections, "prompts": dict(self.prompts)}

    def _count_prompt(self, asked: dict[str, Any]) -> None:
        text = prompt_of(asked)
        if text is None:
            return
        self.prompts[text] += 1
        for prompt, times, event in self._awaited:
            if self.prompts[prompt] >= times:
                event.set()

    def _set(self, exchange: Exchange) -> None:
        """``{"pace_s": 0.1, "hold": true, ...}`` sets attributes; a hold that ends lets everything go on."""
        for name, value in exchange.json().items():
            if name in ("hold", "hold_load", "hold_unload", "hold_pull", "hold_prompt", "deaf"):
                held: asyncio.Event | None = getattr(self, name)
                if held is not None:
                    held.set()
                setattr(self, name, asyncio.Event() if value else None)
            else:
                assert hasattr(self, name), name
                setattr(self, name, value)
        exchange.respond(b"{}")

    async def _until(self, exchange: Exchange) -> None:
        """``{"prompt", "times"}`` is answered once the prompt was sent that often."""
        asked = exchange.json()
        prompt, times = asked["prompt"], asked.get("times", 1)
        event = asyncio.Event()
        if self.prompts[prompt] >= times:
            event.set()
        self._awaited.append((prompt, times, event))
        await first_of(event, exchange.gone)
        self._awaited.remove((prompt, times, event))
        exchange.respond(b"{}")

    async def linger(self, exchange: Exchange) -> bool:
        """What a generate or chat waits for after its first token; whether its client left meanwhile."""
        if self.hold is not None and await first_of(self.hold, exchange.gone) is exchange.gone:
            return True
        if self.pace_s:
            try:
                async with asyncio.timeout(self.pace_s):
                    await exchange.gone.wait()
            except TimeoutError:
                return False
            return True
        return False

    def _set_fault(self, exchange: Exchange) -> None:
        """``{"path", "kind", "status", "body", "times"}`` sets a fault, ``{"path"}`` alone takes it away."""
        asked = exchange.json()
        path = asked.pop("path")
        old = self.faults.pop(path, None)
        if old is not None:
            old.released.set()
        if "kind" in asked:
            self.faults[path] = Fault(**asked)
        exchange.respond(b"{}")

    def _fail(self, exchange: Exchange, fault: Fault) -> Coroutine[Any, Any, None] | None:
        match fault.kind:
            case "status":
                exchange.respond(fault.body.encode(), status=fault.status)
            case "html":
                exchange.respond(HTML, kind="text/html")
            case "empty":
                exchange.respond(b"")
            case "drop":
                exchange.drop()
            case "truncated":
                exchange.truncate = True
                return self.answer(exchange)
            case "cut":
                exchange.cut_stream = True
                return self.answer(exchange)
            case "stall":
                return self._stall(exchange, fault)
        return None

    async def _stall(self, exchange: Exchange, fault: Fault) -> None:
        if await first_of(fault.released, exchange.gone) is fault.released:
            work = self.answer(exchange)
            if work is not None:
                await work


def prompt_of(asked: dict[str, Any]) -> str | None:
    """The text that a request brings: its prompt, its last message, or its input; None where it brings none.

    A graph of nodes goes by the texts in it, see :func:`graph_text`.
    """
    if isinstance(asked.get("prompt"), dict):
        return graph_text(asked["prompt"])
    if asked.get("prompt"):
        return asked["prompt"]
    if "inputs" in asked:
        return asked["inputs"]
    if asked.get("messages"):
        return asked["messages"][-1]["content"]
    return str(asked["input"]) if "input" in asked else None


def graph_text(graph: dict[str, Any]) -> str:
    """The texts that a graph's nodes were given, joined: what tells one job's graph from another's."""
    inputs = [value for node in graph.values() for value in node.get("inputs", {}).values()]
    return " ".join(value for value in inputs if isinstance(value, str))


async def first_of(*events: asyncio.Event) -> asyncio.Event:
    """Wait until one of ``events`` is set, and return it."""
    waits = {asyncio.create_task(event.wait()): event for event in events}
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        return waits[next(iter(done))]
    finally:
        for wait in waits:
            wait.cancel()


class _Connection(asyncio.Protocol):
    """Requests one after another on one connection, as HTTP/1.1 clients send them."""

    def __init__(self, server: FakeServer) -> None:
        self._fake = server
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._busy = False
        self.gone = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._fake.connections += 1
        self._fake.live.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()
        self._fake.live.discard(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._next()

    def send(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def answered(self) -> None:
        self._busy = False
        if self._buffer:
            self._next()

    def _next(self) -> None:
        if self._busy:
            return
        head, separator, rest = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        lines = head.split(b"\r\n")
        length = 0
        for line in lines[1:]:
            if line[:15].lower() == b"content-length:":
                length = int(line[15:])
        if len(rest) < length:
            return
        method, target, _ = lines[0].decode().split(" ", 2)
        self._buffer = rest[length:]
        self._busy = True
        path, _, query = target.partition("?")
        self._fake.dispatch(Exchange(self, method, path, query, rest[:length]))


def run_as_process(make: Callable[[], FakeServer], name: str) -> None:
    """Serve until SIGTERM; the port is written to ``--port-file`` once it listens."""
    parser = argparse.ArgumentParser(prog=name)
    parser.add_argument("--port-file", type=Path, required=True)
    parser.add_argument("--count-prompts", action="store_true", help="slower: reads each request")
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    port_file: Path = arguments.port_file

    async def serve() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        made = make()
        made.wanted_port = arguments.port
        async with made as server:
            server.record_bodies = False
            server.count_prompts = arguments.count_prompts
            partial = port_file.with_name(port_file.name + ".partial")
            partial.write_text(f"{server.port}\n")
            partial.replace(port_file)
            await stop.wait()

    asyncio.run(serve())
