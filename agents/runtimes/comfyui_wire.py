"""What ComfyUI sends and takes, as records. Pure: no connection, no clock."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from gpukeeper.agents.runtimes.failures import shown
from gpukeeper.agents.runtimes.port import RuntimeFailure
from gpukeeper.events.readings import Activity
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import JobResult

#: What every workflow may name as its model: a graph names its models itself, deep inside.
MODEL = "comfyui"

Place = Literal["running", "pending", "gone"]


class Queue(msgspec.Struct):
    """Each entry is ``[number, prompt_id, graph, extra_data, outputs]``; only the second and fourth matter here."""

    queue_running: list[list[Any]]
    queue_pending: list[list[Any]]


class Card(msgspec.Struct):
    """A device as its process sees it, in bytes; its index is the process's own."""

    type: str | None = None
    torch_vram_total: Any = None
    torch_vram_free: Any = None


class Stats(msgspec.Struct):
    devices: list[Card]


class Posted(msgspec.Struct):
    prompt_id: str


class _Status(msgspec.Struct):
    status_str: str | None = None
    #: Each is ``[name, {...}]``.
    messages: list[Any] = []


class Entry(msgspec.Struct):
    """What the history says about one prompt that has ended."""

    outputs: dict[str, Any]
    status: _Status | None = None


class _Fault(msgspec.Struct):
    node_id: Any = None
    node_type: str | None = None
    exception_type: str | None = None
    exception_message: str = ""


queue_decoder = msgspec.json.Decoder(Queue)
stats_decoder = msgspec.json.Decoder(Stats)
posted_decoder = msgspec.json.Decoder(Posted)
history_decoder = msgspec.json.Decoder(dict[str, Entry])


def activity(queue: Queue | RuntimeFailure) -> Activity:
    """Busy where anything runs or waits. Open sockets say nothing: a browser's tab holds one while nothing runs."""
    if isinstance(queue, RuntimeFailure):
        return "unknown"
    return "busy" if queue.queue_running or queue.queue_pending else "idle"


def place_of(queue: Queue, prompt_id: str) -> Place:
    """Where the prompt is in the queue."""
    if any(_is(entry, prompt_id) for entry in queue.queue_running):
        return "running"
    return "pending" if any(_is(entry, prompt_id) for entry in queue.queue_pending) else "gone"


def _is(entry: list[Any], prompt_id: str) -> bool:
    return len(entry) > 1 and entry[1] == prompt_id


def prompt_ids_of(queue: Queue, client_id: str) -> list[str]:
    """The prompts that a client has in the queue, for one that never heard what its prompt is called."""
    entries = queue.queue_running + queue.queue_pending
    return [entry[1] for entry in entries if _client_of(entry) == client_id and isinstance(entry[1], str)]


def _client_of(entry: list[Any]) -> object:
    return entry[3].get("client_id") if len(entry) > 3 and isinstance(entry[3], dict) else None  # pyright: ignore


def held_bytes(stats: Stats) -> int:
    """What its models take on its GPUs: allocated by torch, without what torch keeps in reserve.

    Raises:
        RuntimeFailure: it lists no device, or one without plausible figures: what it holds is unknown then.
    """
    if not stats.devices:
        raise RuntimeFailure(Reason.RUNTIME_BAD_REPLY, "/system_stats: no devices")
    return sum(_allocated(card) for card in stats.devices if card.type != "cpu")


def on_gpu(stats: Stats) -> bool:
    """Whether it computes on a GPU: its first device is the one it uses."""
    return bool(stats.devices) and stats.devices[0].type not in (None, "cpu")


def _allocated(card: Card) -> int:
    total, free = card.torch_vram_total, card.torch_vram_free
    if type(total) is not int or type(free) is not int or not 0 <= free <= total < 2**63:
        raise RuntimeFailure(
            Reason.RUNTIME_BAD_REPLY, f"/system_stats: torch_vram_total {total!r}, torch_vram_free {free!r}"
        )
    return total - free


def outcome(entry: Entry, prompt_id: str) -> JobResult:
    """What a prompt that has ended came to: the outputs of its nodes.

    Raises:
        RuntimeFailure: it failed or was interrupted, with ComfyUI's own words.
    """
    status = entry.status or _Status()
    for message in status.messages:
        name, said = _named(message)
        if name == "execution_error":
            raise RuntimeFailure(Reason.RUNTIME_ERROR, f"prompt {prompt_id}: {_fault_words(said)}")
        if name == "execution_interrupted":
            raise RuntimeFailure(Reason.RUNTIME_ERROR, f"prompt {prompt_id} was interrupted at the runtime")
    # Old servers give no status: what has outputs then has ended well.
    if status.status_str == "success" or (entry.status is None and entry.outputs):
        return JobResult(output=entry.outputs, finish_reason="stop", model=MODEL)
    raise RuntimeFailure(Reason.RUNTIME_ERROR, f"prompt {prompt_id} ended with status {status.status_str!r}")


def _named(message: object) -> tuple[str, Any]:
    """The name of one message and what it says; an empty name where it is of another shape."""
    try:
        return msgspec.convert(message, tuple[str, Any])
    except msgspec.ValidationError:
        return "", None


def _fault_words(said: object) -> str:
    try:
        fault = msgspec.convert(said, _Fault)
    except msgspec.ValidationError:
        return "execution_error without words"
    where = f"node {fault.node_id} ({fault.node_type}): " if fault.node_type else ""
    kind = f"{fault.exception_type}: " if fault.exception_type else ""
    return shown(f"{where}{kind}{fault.exception_message.strip()}".encode("utf-8", "replace"))
