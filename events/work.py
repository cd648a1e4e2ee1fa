"""What a job asks of a runtime, and what came back."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import msgspec

from gpukeeper.events.fact import Record

Task = Literal["generate", "chat", "embed", "workflow", "analysis"]
Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = get_args(Role)


class Strict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The base of what people send: an unknown field is an error that names it."""


class ChatMessage(Strict, frozen=True, kw_only=True):
    """One message of a chat. ``images`` are base64; ``content`` may be a list of parts as OpenAI clients send."""

    role: Role
    content: str | list[Any] = ""
    name: str | None = None
    images: list[str] | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None


class Work(Strict, frozen=True, kw_only=True):
    """The body of a job: exactly one of ``prompt`` (generate), ``messages`` (chat), ``input`` (embed), ``workflow`` and
    ``analysis``, and settings."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    input: str | list[str] | None = None
    #: A graph of nodes in the API format of ComfyUI, passed on as it is.
    workflow: dict[str, Any] | None = None
    #: A query of an analysis engine (KataGo), passed on as it is but for its ``id``.
    analysis: dict[str, Any] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=10)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: list[str] | None = None
    #: Passed to the runtime as it is (Ollama: ``options``; llama.cpp: top-level fields).
    options: dict[str, Any] | None = None


class ObjectRef(Record, frozen=True, kw_only=True):
    """A body kept in the object store instead of the log."""

    object: str
    size: int
    #: SHA-256 of the bytes, in hex.
    digest: str


class JobResult(Record, frozen=True, kw_only=True):
    """What the runtime answered. Exactly one of ``text``, ``message``, ``embeddings`` and ``output`` is
    set."""

    text: str | None = None
    message: dict[str, Any] | None = None
    embeddings: list[list[float]] | None = None
    #: What a workflow or an analysis gave, as the runtime said it.
    output: Any = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    model: str | None = None


def task_of(work: Work) -> Task | None:
    """Which task ``work`` is, or None where it names no body or more than one."""
    given: list[Task] = []
    if work.prompt is not None:
        given.append("generate")
    if work.messages is not None:
        given.append("chat")
    if work.input is not None:
        given.append("embed")
    if work.workflow is not None:
        given.append("workflow")
    if work.analysis is not None:
        given.append("analysis")
    return given[0] if len(given) == 1 else None
