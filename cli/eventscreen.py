"""`gpuq events`: the log as a table with the time between events, or as CloudEvents."""

from __future__ import annotations

import asyncio
import base64
from collections import deque
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any, cast

import msgspec

from gpukeeper.cli.exitcodes import Exit
from gpukeeper.cli.inbox import Inbox
from gpukeeper.cli.logrange import Filter, parse_moment, seq_before
from gpukeeper.cli.onejob import no_such_job
from gpukeeper.cli.options import Where
from gpukeeper.cli.printing import one_line, print_json_line, say
from gpukeeper.cli.quantities import clock_time, moment
from gpukeeper.cli.session import CATCH_UP_S, Session, open_session
from gpukeeper.cli.words import about, sentence, type_name
from gpukeeper.events import subjects
from gpukeeper.events.clock import now
from gpukeeper.events.codec import Event, Submitted
from gpukeeper.events.envelope import Envelope
from gpukeeper.events.errors import WaitTimedOut
from gpukeeper.events.job import Accepted, Rejected

#: How many events are shown where nothing narrows them.
_LIMIT = 100
_SENTENCE_CHARS_MAX = 400
_HEADER = f"{'seq':>7}  {'time':<12}  {'after':>8}  {'type':<26}  about"


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody wants to see of the log. ``since`` and ``until`` as they were typed."""

    filter: Filter
    since: str | None = None
    until: str | None = None
    limit: int | None = None
    follows: bool = False


class EventLines:
    """Events as lines of a table, each with the time since the one before."""

    def __init__(self, *, with_about: bool = True) -> None:
        self._before_ns: int | None = None
        self._with_about = with_about

    def header(self) -> str:
        return _HEADER if self._with_about else _HEADER.rpartition("  ")[0]

    def line(self, event: Event) -> str:
        stored_ns = event.stored.stored_ns
        after = "" if self._before_ns is None else _after(stored_ns - self._before_ns)
        self._before_ns = stored_ns
        what = one_line(sentence(event), _SENTENCE_CHARS_MAX)
        whom = f"{one_line(about(event), 80)}: " if self._with_about else ""
        kind = one_line(type_name(event), 60)
        return f"{event.seq:>7}  {clock_time(stored_ns):<12}  {after:>8}  {kind:<26}  {whom}{what}"


def _after(ns: int) -> str:
    seconds = ns / 1e9
    if seconds < 1:
        return f"+{seconds * 1000:.1f} ms"
    return f"+{seconds:.2f} s" if seconds < 1000 else f"+{seconds:.0f} s"


async def show_events(where: Where, wanted: Wanted, *, as_json: bool) -> Exit:
    """Print them.

    Raises:
        WrongUsage: since or until say nothing.
        NotFound: there is no such job.
        LogUnavailable, WaitTimedOut: the log did not answer (in time).
    """
    lines = EventLines()

    def show(event: Event) -> None:
        if as_json:
            print_json_line(cloud_event(event))
        else:
            say(lines.line(event))

    async with open_session(where, follows=wanted.follows) as session, Inbox(session) as inbox:
        wanted, after, until = await _range(session, wanted)
        patterns = wanted.filter.patterns() or (">",)
        if not as_json:
            say(lines.header())
        await inbox.follow(*patterns, after=after)
        kept: deque[Event] = deque(maxlen=wanted.limit or None)
        async for event in _past(session, inbox, patterns, after, until):
            if not wanted.filter.matches(event):
                continue
            if wanted.limit:
                kept.append(event)
            else:
                show(event)
        for event in kept:
            show(event)
        while wanted.follows:
            event = await inbox.next_event()
            if until is not None and event.seq > until:
                break
            if wanted.filter.matches(event):
                show(event)
    return Exit.OK


async def _past(
    session: Session, inbox: Inbox, patterns: tuple[str, ...], after: int, until: int | None
) -> AsyncIterator[Event]:
    """What the log holds now under ``patterns`` above ``after``, up to ``until``."""
    newest = [stored.seq for pattern in patterns if (stored := await session.log.last(pattern)) is not None]
    last = max(newest, default=0)
    while last > after:
        try:
            async with asyncio.timeout(CATCH_UP_S):
                event = await inbox.next_event()
        except TimeoutError:
            raise WaitTimedOut(f"nothing more of the log came within {CATCH_UP_S:g} s") from None
        if until is None or event.seq <= until:
            yield event
        if event.seq >= last or (until is not None and event.seq >= until):
            return


async def _range(session: Session, wanted: Wanted) -> tuple[Wanted, int, int | None]:
    """The filter with what it must know of the log, and the sequences after and up to which it holds."""
    at = now()
    since = await _seq(session, wanted.since, "--since", at)
    until = await _seq(session, wanted.until, "--until", at)
    if wanted.until is not None and wanted.until.isdigit():
        until = int(wanted.until)
    after = since or 0
    found = wanted.filter
    if found.job is not None:
        submission_seq = await submission_of(session, found.job)
        found = msgspec.structs.replace(found, submission_seq=submission_seq)
        after = max(after, submission_seq - 1)
    limit = wanted.limit
    if limit is None:
        bare = found == Filter() and wanted.since is None and wanted.until is None
        limit = _LIMIT if bare else 0
    if limit and found == Filter() and until is None:
        after = max(after, await session.log.last_seq() - limit)
    return msgspec.structs.replace(wanted, filter=found, limit=limit), after, until


async def _seq(session: Session, text: str | None, option: str, at: datetime) -> int | None:
    """The sequence before which what is asked for begins."""
    if text is None:
        return None
    parsed = parse_moment(text, option, at)
    return parsed - 1 if isinstance(parsed, int) else await seq_before(session.log, parsed)


async def submission_of(session: Session, job_id: str) -> int:
    """The sequence of the submission that became the job: nothing of it stands before.

    Raises:
        NotFound: there is no such job.
    """
    for event in await session.history(subjects.job(job_id)):
        if isinstance(event.data, Accepted | Rejected):
            return event.data.submission_seq
    raise no_such_job(job_id)


def cloud_event(event: Event) -> dict[str, Any]:
    """The whole event, with ``seq``, ``storedat`` and ``natssubject`` as extensions of its envelope.

    What is no CloudEvent (a bare submission, or bytes that nobody could read) gets an envelope, its contents in
    ``data`` where they are JSON, else in ``data_base64``.
    """
    stored = event.stored
    place = {"seq": event.seq, "storedat": moment(stored.stored_ns), "natssubject": stored.subject}
    try:
        contents: Any = msgspec.json.decode(stored.body)
        msgspec.json.decode(stored.body, type=Envelope)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return {
            "specversion": "1.0",
            "id": str(event.seq),
            "source": stored.subject,
            "type": "gpuq.job.submitted.v1" if isinstance(event.data, Submitted) else "gpuq.unreadable",
            "subject": about(event),
            "time": moment(stored.stored_ns),
            **_contents(stored.body),
            **place,
        }
    return {**cast("dict[str, Any]", contents), **place}


def _contents(body: bytes) -> dict[str, Any]:
    try:
        return {"data": msgspec.json.decode(body)}
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return {"data_base64": base64.b64encode(body).decode()}
