"""Shows a job to its end: its text as it comes or its result, and how it ended."""

from __future__ import annotations

from typing import Any

import msgspec

from gpukeeper.agents.outputs import Chunk
from gpukeeper.cli.exitcodes import Exit
from gpukeeper.cli.inbox import Inbox
from gpukeeper.cli.printing import json_text, one_line, print_json, print_json_line, print_text, say, tell, write_text
from gpukeeper.cli.session import Session
from gpukeeper.cli.textstream import TextStream, agent_of
from gpukeeper.cli.waiting import end_document, read_result, text_of, until_ended
from gpukeeper.cli.words import sentence
from gpukeeper.events.codec import Event
from gpukeeper.events.job import Denied, Succeeded
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import JobResult


class View(msgspec.Struct, frozen=True, kw_only=True):
    """How somebody wants to see a job."""

    streams: bool = False
    as_json: bool = False
    timeout_s: float | None = None
    #: Say on stderr why a device did not take the job, once for each reason: it goes on waiting, and nobody knows.
    tells_denials: bool = False


class _Words:
    """Text on stdout for people; notes on stderr."""

    def __init__(self) -> None:
        self._last = "\n"

    def text(self, attempt: int, offset: int, text: str) -> None:
        del attempt, offset
        write_text(text)
        self._last = text[-1]

    def again(self, attempt: int) -> None:
        self.end_line()
        tell(f"[attempt {attempt} begins anew; what stands above is void]")

    def differs(self) -> None:
        self.end_line()
        tell("[the result is not what was streamed; all of it follows]")

    def end_line(self) -> None:
        if self._last != "\n":
            write_text("\n")
            self._last = "\n"


class _Lines:
    """Text as JSON lines."""

    def __init__(self, job: str) -> None:
        self._job = job

    def text(self, attempt: int, offset: int, text: str) -> None:
        print_json_line({"job": self._job, "attempt": attempt, "offset": offset, "text": text})

    def again(self, attempt: int) -> None:
        print_json_line({"job": self._job, "attempt": attempt, "again": True})

    def differs(self) -> None:
        print_json_line({"job": self._job, "differs": True})

    def end_line(self) -> None:
        """Every line has ended."""


async def view_to_end(session: Session, inbox: Inbox, job_id: str, view: View, known: dict[str, Any]) -> Exit:
    """Show the job that ``inbox`` follows until it has ended; ``known`` goes into the document of ``--json``.

    Raises:
        WaitTimedOut: it did not end in time; it goes on.
        NotFound: its result is gone from the object store.
    """
    shown = _Lines(job_id) if view.as_json else _Words()
    stream = TextStream(job_id, shown, agent_of(session.connection))
    told: set[Reason] = set()

    def tell_denial(event: Event) -> None:
        fact = event.data
        if isinstance(fact, Denied) and fact.job == job_id and fact.reason not in told:
            told.add(fact.reason)
            shown.end_line()
            tell(f"{job_id} waits: {one_line(sentence(event), 500)}")

    async def on_item(item: Event | Chunk) -> None:
        if view.tells_denials and isinstance(item, Event):
            tell_denial(item)
        if not view.streams:
            return
        if isinstance(item, Chunk):
            await stream.take(item)
        else:
            await stream.on_event(item)

    try:
        end = await until_ended(inbox, job_id, timeout_s=view.timeout_s, on_item=on_item)
        result = await read_result(session, end.data) if isinstance(end.data, Succeeded) else None
        text = None if result is None else text_of(result)
        if view.streams:
            stream.finish(text)
    finally:
        shown.end_line()
    if view.as_json:
        document = {"id": job_id, **known, **end_document(end, result)}
        (print_json_line if view.streams else print_json)(document)
    elif result is not None and (text is None or not view.streams):
        print_result(result)
    if result is None:
        tell(f"job {job_id} {one_line(sentence(end), 2000)}")
        return Exit.JOB_FAILED
    return Exit.OK


def print_result(result: JobResult) -> None:
    """The text of a result; what is no text as JSON: an output, a message, or one line for each embedding."""
    text = text_of(result)
    if text is not None:
        print_text(text)
    elif result.embeddings is not None:
        for row in result.embeddings:
            say(json_text(row))
    elif result.output is not None:
        print_json(result.output)
    else:
        say(json_text(result.message))
