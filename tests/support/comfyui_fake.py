"""A fake ComfyUI: a queue, one prompt at a time, a history, and a torch that keeps what runs brought in.

``queue_running`` and ``queue_pending`` are lists of tuples as the real one has them; a prompt moves from the queue to
the history in one step. Also a process: ``python -m support.comfyui_fake --port-file F``.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from support.fake_http import Exchange, FakeServer, graph_text, run_as_process

CARD_BYTES = 25_756_696_576
#: What torch has in reserve beyond what it has given out.
RESERVE_BYTES = 33_554_432


class _Prompt:
    def __init__(self, number: int, prompt_id: str, graph: dict[str, Any], client_id: str | None) -> None:
        self.prompt_id = prompt_id
        self.graph = graph
        self.interrupted = asyncio.Event()
        self.entry = [number, prompt_id, graph, {} if client_id is None else {"client_id": client_id}, list(graph)]


class FakeComfyUI(FakeServer):
    """A ComfyUI on one card."""

    def __init__(self) -> None:
        super().__init__()
        #: What runs bring in, and keep until ``/free``.
        self.run_bytes = 4_000_000_000
        #: Called with the bytes now held whenever they change, so that a fake device can follow.
        self.on_held: Callable[[int], None] | None = None
        self._held = 0
        #: Websockets that pages of a browser hold open.
        self.sockets = 0
        self.device_type = "cuda"
        #: ``/system_stats`` instead of the truth.
        self.stats: dict[str, Any] | None = None
        #: Runs end with this error of a node.
        self.node_error: str | None = None
        #: Old servers: no ``prompt_id`` from clients, no ``status`` in the history, every interrupt stops what runs.
        self.old = False
        #: Graphs that name a node of this class are refused, as the real one refuses what it does not know.
        self.unknown_class = "NoSuchNode"
        #: So many of the next requests for the queue and the history go wrong with status 500.
        self.failing_looks = 0
        self.failed_looks = 0
        self.executions = 0
        self.interrupts = 0
        self.deleted = 0
        self.frees = 0
        self._number = 0
        self._pending: list[_Prompt] = []
        self._running: _Prompt | None = None
        self._history: dict[str, dict[str, Any]] = {}

    @property
    def held(self) -> int:
        """Bytes that torch has given out."""
        return self._held

    @held.setter
    def held(self, held: int) -> None:
        self._held = held
        if self.on_held is not None:
            self.on_held(held)

    def counters(self) -> dict[str, Any]:
        own = ("executions", "interrupts", "deleted", "frees", "held", "failed_looks")
        return {**super().counters(), **{name: getattr(self, name) for name in own}}

    @property
    def busy(self) -> bool:
        """Whether a prompt runs or waits."""
        return self._running is not None or bool(self._pending)

    def forget(self) -> None:
        """What a restart does: queue and history are gone, and so is what was held."""
        self._pending, self._history, self.held = [], {}, 0
        running, self._running = self._running, None
        if running is not None:
            running.interrupted.set()

    @property
    def forgets(self) -> bool:
        return False

    @forgets.setter
    def forgets(self, wanted: bool) -> None:
        """Set over HTTP by tests whose fake is another process."""
        if wanted:
            self.forget()

    def answer(self, exchange: Exchange) -> Coroutine[Any, Any, None] | None:
        path = exchange.path
        if (path == "/queue" and exchange.method == "GET") or path.startswith("/history/"):
            self._look(exchange)
            return None
        match path:
            case "/prompt":
                self._post(exchange)
            case "/queue":
                self._delete(exchange)
            case "/interrupt":
                self._interrupt(exchange)
            case "/system_stats":
                exchange.respond_json(self._stats())
            case "/ws":
                return self._keep_open(exchange)
            case "/free":
                self.frees += 1
                self.held = 0
                exchange.respond(b"")
            case _:
                exchange.respond(b"404: Not Found", status=404, kind="text/plain")
        return None

    async def _keep_open(self, exchange: Exchange) -> None:
        """A page's websocket: it says nothing, and stays until the page is closed."""
        exchange.switch("websocket")
        self.sockets += 1
        await exchange.gone.wait()
        self.sockets -= 1

    def _look(self, exchange: Exchange) -> None:
        if self.failing_looks > 0:
            self.failing_looks -= 1
            self.failed_looks += 1
            exchange.respond(b"500 Internal Server Error", status=500, kind="text/plain")
        elif exchange.path == "/queue":
            running = [] if self._running is None else [self._running.entry]
            exchange.respond_json({"queue_running": running, "queue_pending": [one.entry for one in self._pending]})
        else:
            prompt_id = exchange.path.rpartition("/")[2]
            entry = self._history.get(prompt_id)
            exchange.respond_json({} if entry is None else {prompt_id: entry})

    def _stats(self) -> dict[str, Any]:
        if self.stats is not None:
            return self.stats
        total = self.held + RESERVE_BYTES
        card = {
            "name": "cuda:0 NVIDIA GeForce RTX 4090 : cudaMallocAsync",
            "type": self.device_type,
            "index": 0,
            "vram_total": CARD_BYTES,
            "vram_free": CARD_BYTES - total,
            "torch_vram_total": total,
            "torch_vram_free": RESERVE_BYTES,
        }
        return {"system": {"os": "posix", "comfyui_version": "0.3.60", "argv": ["main.py"]}, "devices": [card]}

    def _post(self, exchange: Exchange) -> None:
        asked = exchange.json()
        graph: dict[str, Any] = asked["prompt"]
        unknown = [node for node, said in graph.items() if said.get("class_type") == self.unknown_class]
        if unknown or not graph:
            error: dict[str, Any] = {
                "type": "invalid_prompt",
                "message": "Cannot execute because node NoSuchNode does not exist." if graph else "No prompt provided",
                "details": f"Node ID '#{unknown[0]}'" if unknown else "",
                "extra_info": {},
            }
            exchange.respond_json({"error": error, "node_errors": {}}, status=400)
            return
        own = None if self.old else asked.get("prompt_id")
        prompt = self._enqueue(graph, own, asked.get("client_id"))
        exchange.respond_json({"prompt_id": prompt.prompt_id, "number": prompt.entry[0], "node_errors": {}})
        if self._running is None:
            self._next()

    def queue_prompt(self, graph: dict[str, Any]) -> None:
        """Queue a graph as somebody does who is not the one under test."""
        self._enqueue(graph)
        if self._running is None:
            self._next()

    def _enqueue(self, graph: dict[str, Any], prompt_id: str | None = None, client_id: str | None = None) -> _Prompt:
        prompt = _Prompt(self._number, prompt_id or str(uuid.uuid4()), graph, client_id)
        self._number += 1
        self._pending.append(prompt)
        return prompt

    def _next(self) -> None:
        if self._pending:
            self._running = self._pending.pop(0)
            self.spawn(self._execute(self._running))

    async def _execute(self, prompt: _Prompt) -> None:
        self.executions += 1
        self.held = max(self.held, self.run_bytes)
        waits: list[asyncio.Task[Any]] = [asyncio.create_task(prompt.interrupted.wait())]
        if self.hold is not None:
            waits.append(asyncio.create_task(self.hold.wait()))
        else:
            waits.append(asyncio.create_task(asyncio.sleep(self.pace_s)))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self._running is not prompt:
            return  # forgotten
        self._running = None
        self._history[prompt.prompt_id] = self._entry(prompt)
        self._next()

    def _entry(self, prompt: _Prompt) -> dict[str, Any]:
        last = list(prompt.graph)[-1]
        messages: list[Any] = [["execution_start", {"prompt_id": prompt.prompt_id, "timestamp": 1_760_883_302_000}]]
        outputs: dict[str, Any] = {}
        ended_well = not prompt.interrupted.is_set() and self.node_error is None
        if prompt.interrupted.is_set():
            messages.append(["execution_interrupted", {"prompt_id": prompt.prompt_id, "node_id": last}])
        elif self.node_error is not None:
            said = {"node_id": last, "node_type": "KSampler", "exception_type": "OutOfMemoryError"}
            messages.append(["execution_error", {**said, "exception_message": self.node_error}])
        else:
            messages.append(["execution_success", {"prompt_id": prompt.prompt_id}])
            outputs = {last: {"images": [{"filename": f"{graph_text(prompt.graph)}.png", "type": "output"}]}}
        entry: dict[str, Any] = {"prompt": prompt.entry, "outputs": outputs, "meta": {}}
        if not self.old:
            state = "success" if ended_well else "error"
            entry["status"] = {"status_str": state, "completed": ended_well, "messages": messages}
        return entry

    def _delete(self, exchange: Exchange) -> None:
        wanted = exchange.json().get("delete", [])
        left = [one for one in self._pending if one.prompt_id not in wanted]
        self.deleted += len(self._pending) - len(left)
        self._pending = left
        exchange.respond(b"")

    def _interrupt(self, exchange: Exchange) -> None:
        self.interrupts += 1
        wanted = None if self.old else exchange.json().get("prompt_id")
        if self._running is not None and wanted in (None, self._running.prompt_id):
            self._running.interrupted.set()
        exchange.respond(b"")


if __name__ == "__main__":
    run_as_process(FakeComfyUI, "comfyui_fake")
