"""Follows one job to its end, and reads what it came to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from gpukeeper.agents.outputs import Chunk
from gpukeeper.cli.errors import NotFound
from gpukeeper.cli.inbox import Inbox
from gpukeeper.cli.session import Session
from gpukeeper.events.codec import Event
from gpukeeper.events.errors import WaitTimedOut
from gpukeeper.events.job import ENDS, Failed, Succeeded
from gpukeeper.events.objects import get_body
from gpukeeper.events.work import JobResult

_decode_result = msgspec.json.Decoder(JobResult).decode


async def until_ended(
    inbox: Inbox,
    job_id: str,
    *,
    timeout_s: float | None = None,
    on_item: Callable[[Event | Chunk], Awaitable[None]] | None = None,
) -> Event:
    """Take from ``inbox`` until the job's end is among it; what is already there is handed on too.

    Raises:
        WaitTimedOut: it did not end within ``timeout_s``. The job goes on.
    """
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                item = await inbox.next()
                if on_item is not None:
                    await on_item(item)
                if is_end(item, job_id):
                    assert isinstance(item, Event)
                    break
    except TimeoutError:
        waited = f"{round(timeout_s or 0, 1):g} s"
        words = f"job {job_id} has not ended within {waited}; it goes on: {how_to_return(job_id)}"
        raise WaitTimedOut(words, job=job_id) from None
    if on_item is not None:
        for rest in inbox.heard_already():
            await on_item(rest)
    return item


def is_end(item: Event | Chunk, job_id: str) -> bool:
    """Whether ``item`` is the fact that ends the job."""
    return isinstance(item, Event) and isinstance(item.data, ENDS) and getattr(item.data, "job", None) == job_id


def how_to_return(job_id: str) -> str:
    """What to type to see the job again, or to end it."""
    return f"come back with `gpuq result --wait {job_id}`, end it with `gpuq cancel {job_id}`"


async def read_result(session: Session, fact: Succeeded) -> JobResult:
    """The result, from the object store where it stands there.

    Raises:
        NotFound: it is gone from the object store.
    """
    if fact.result is not None:
        return fact.result
    raw = None if fact.result_ref is None else await get_body(session.payloads, fact.result_ref)
    if raw is None:
        raise NotFound(f"the result of job {fact.job} is gone from the object store, which keeps bodies for a while")
    return _decode_result(raw)


def text_of(result: JobResult) -> str | None:
    """The text of a result; None where it is something else (embeddings, a message of parts)."""
    if result.text is not None:
        return result.text
    content: Any = None if result.message is None else result.message.get("content")
    return content if isinstance(content, str) and not (result.message or {}).get("tool_calls") else None


def partial_of(event: Event) -> str | None:
    """What had been generated when the job ended otherwise."""
    partial = getattr(event.data, "partial", None)
    return partial if isinstance(partial, str) else None


def end_document(event: Event, result: JobResult | None) -> dict[str, Any]:
    """The end of a job as JSON: ``phase``, ``reason``, ``detail``, ``result``."""
    fact = event.data
    document: dict[str, Any] = {"phase": type(fact).__name__.lower(), "ended_seq": event.seq}
    if isinstance(fact, Succeeded | Failed):
        document["timings"] = fact.timings
    for name in ("reason", "detail", "attempt", "actor", "clock", "limit_s", "elapsed_s", "source", "status"):
        value = getattr(fact, name, None)
        if value not in (None, ""):
            document[name] = value
    if (partial := partial_of(event)) is not None:
        document["partial"] = partial
    if result is not None:
        document["result"] = result
    return document
