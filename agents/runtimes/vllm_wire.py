"""What a vLLM server sends and takes, as records. Pure: no connection, no clock."""

from __future__ import annotations

from typing import Any

import msgspec

from gpukeeper.agents.runtimes.port import RuntimeFailure
from gpukeeper.agents.runtimes.prometheus import total
from gpukeeper.events.modelnames import all_names, same_model
from gpukeeper.events.readings import Activity
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import Work

#: Summed over every engine and model of the server: one that is queued counts like one that runs.
_REQUESTS = ("vllm:num_requests_running", "vllm:num_requests_waiting")


class Served(msgspec.Struct):
    id: str
    #: Set for an adapter (LoRA) on top of the server's own model.
    parent: str | None = None


class Models(msgspec.Struct):
    data: list[Served]


class Sleeping(msgspec.Struct):
    is_sleeping: bool


models_decoder = msgspec.json.Decoder(Models)
sleeping_decoder = msgspec.json.Decoder(Sleeping)


def activity(metrics: str | RuntimeFailure) -> Activity:
    """Busy where any request runs or waits; unknown where either figure is absent or no number."""
    if isinstance(metrics, RuntimeFailure):
        return "unknown"
    counts = [total(metrics, name) for name in _REQUESTS]
    if any(count for count in counts):
        return "busy"
    return "unknown" if None in counts else "idle"


def cannot_sleep(failure: RuntimeFailure) -> bool:
    """Whether ``/is_sleeping`` failed because the server was started without sleep mode, so that it never sleeps."""
    return failure.status == 404


def names(models: Models) -> tuple[str, ...]:
    """Every name that a job may ask the server's models by, once each, in order."""
    return tuple(dict.fromkeys(name for served in models.data for name in all_names(served.id)))


def own_names(models: Models) -> list[str]:
    """The names of the server's own model, which its adapters sit on: at least one.

    Raises:
        RuntimeFailure: it lists none.
    """
    own = [served.id for served in models.data if served.parent is None]
    if not own:
        raise RuntimeFailure(Reason.RUNTIME_BAD_REPLY, "/v1/models: no model of its own")
    return own


def served_name(models: Models, model: str) -> str | None:
    """The id under which the server knows ``model``: it takes no other spelling. None where it has no such model."""
    return next((served.id for served in models.data if same_model(served.id, model)), None)


def settings(work: Work) -> dict[str, Any]:
    """``options`` as they are, then the neutral settings that were given.

    Without a limit vLLM ends a completion after 16 tokens; a limit of null is as long as the context allows.
    """
    named = {
        "max_tokens": work.max_tokens,
        "temperature": work.temperature,
        "top_p": work.top_p,
        "top_k": work.top_k,
        "seed": work.seed,
        "stop": work.stop,
    }
    given = {key: value for key, value in named.items() if value is not None}
    return {"max_tokens": None, **(work.options or {}), **given}
