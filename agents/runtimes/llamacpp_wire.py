"""What a llama.cpp server sends and takes, as records. Pure: no connection, no clock."""

from __future__ import annotations

from typing import Any

import msgspec

from gpukeeper.agents.runtimes.port import RuntimeFailure
from gpukeeper.events.modelnames import all_names, canonical
from gpukeeper.events.readings import Activity, ResidentModel
from gpukeeper.events.work import Work


class Health(msgspec.Struct):
    status: str


class Slot(msgspec.Struct):
    is_processing: bool


class Meta(msgspec.Struct):
    size: Any = None
    n_ctx: Any = None


class Served(msgspec.Struct):
    id: str
    aliases: list[str] | None = None
    meta: Meta | None = None
    #: What a router says of the model; a plain server says nothing.
    status: Any = None


class Models(msgspec.Struct):
    data: list[Served]


class Accepted(msgspec.Struct):
    """A router's answer to a wish."""

    success: bool


class Props(msgspec.Struct):
    model_path: str | None = None


class Completion(msgspec.Struct):
    content: str = ""
    stop: bool = False
    stop_type: str | None = None
    stopped_limit: bool = False
    stopped_eos: bool = False
    stopped_word: bool = False
    model: str | None = None
    tokens_predicted: int | None = None
    tokens_evaluated: int | None = None
    error: Any = None


health_decoder = msgspec.json.Decoder(Health)
slots_decoder = msgspec.json.Decoder(list[Slot])
models_decoder = msgspec.json.Decoder(Models)
accepted_decoder = msgspec.json.Decoder(Accepted)
props_decoder = msgspec.json.Decoder(Props)
completion_decoder = msgspec.json.Decoder(Completion)

#: ``stop_type`` of a completion, in the words of OpenAI's ``finish_reason``.
_FINISH = {"eos": "stop", "word": "stop", "limit": "length"}


def activity(slots: list[Slot] | RuntimeFailure) -> Activity:
    """Busy where any slot works; unknown where the server was started without ``/slots``."""
    if isinstance(slots, RuntimeFailure) or not slots:
        return "unknown"
    return "busy" if any(slot.is_processing for slot in slots) else "idle"


class _Status(msgspec.Struct):
    value: str = ""
    failed: bool = False
    exit_code: int | None = None


def _status(served: Served) -> _Status:
    try:
        return msgspec.convert(served.status, _Status)
    except msgspec.ValidationError:
        return _Status()


def is_router(models: Models) -> bool:
    """Whether this is a router's list: it says of each model how that stands."""
    return any(_status(served).value for served in models.data)


def state(served: Served) -> str:
    """How a router's model stands: ``unloaded``, ``loading``, ``loaded``, ``sleeping``, or a newer word."""
    return _status(served).value


def state_words(served: Served) -> str:
    """The same, for people."""
    status = _status(served)
    if status.failed:
        return f"its process ended with {status.exit_code}"
    return f"it is {status.value} again" if status.value == "unloaded" else f"it is {status.value or 'in no state'}"


def routed(models: Models) -> tuple[ResidentModel, ...]:
    """What a router holds. A model that sleeps has given its memory up."""
    rows = ((served, state(served)) for served in models.data)
    return tuple(
        msgspec.structs.replace(
            resident(served), pinned=False, loading=state == "loading", stopping=state not in ("loading", "loaded")
        )
        for served, state in rows
        if state not in ("unloaded", "sleeping", "downloading", "downloaded")
    )


def resident(served: Served) -> ResidentModel:
    meta = served.meta or Meta()
    return ResidentModel(
        model=canonical(served.id),
        size_bytes=_count(meta.size),
        context_length=_count(meta.n_ctx),
        pinned=True,
    )


def _count(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


def ids(models: Models) -> tuple[str, ...]:
    """The ids that the server goes by."""
    return tuple(served.id for served in models.data)


def names(models: Models, path: str | None) -> tuple[str, ...]:
    """Every name that a job may ask the server's models by, once each, in order."""
    names: dict[str, None] = {}
    for served in models.data:
        for name in (served.id, *(served.aliases or ())):
            names.update(dict.fromkeys(all_names(name)))
    if path and len(models.data) == 1:
        names.update(dict.fromkeys(all_names(path)))
    return tuple(names)


def finish(record: Completion) -> str | None:
    if record.stop_type is not None:
        return _FINISH.get(record.stop_type, record.stop_type)
    if record.stopped_limit:
        return "length"
    return "stop" if record.stopped_eos or record.stopped_word else None


def settings(work: Work) -> dict[str, Any]:
    """``options`` as they are, then the neutral settings that were given."""
    named = {
        "n_predict": work.max_tokens,
        "temperature": work.temperature,
        "top_p": work.top_p,
        "top_k": work.top_k,
        "seed": work.seed,
        "stop": work.stop,
    }
    return {**(work.options or {}), **{key: value for key, value in named.items() if value is not None}}
