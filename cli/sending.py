"""Puts one submission into the log and reads the scheduler's answer from it."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress

import msgspec

from gpukeeper.cli.errors import Refused
from gpukeeper.cli.inbox import Inbox, following
from gpukeeper.cli.quantities import size
from gpukeeper.cli.session import SETTLE_S, Session
from gpukeeper.cli.submission import Packed, enveloped
from gpukeeper.events import subjects
from gpukeeper.events.clock import new_id, now_rfc3339
from gpukeeper.events.codec import Event
from gpukeeper.events.errors import LogUnavailable, PayloadTooLarge
from gpukeeper.events.ids import is_token, job_id_at
from gpukeeper.events.job import Accepted, Rejected, Resubmitted
from gpukeeper.events.log import Appended, Outcome, Record
from gpukeeper.events.objects import put_body
from gpukeeper.events.spec import Submission, parse_submission

#: An answer comes within milliseconds where a scheduler runs; after this it is asked whether one does.
_LOOK_S = 1.0


class Sent(msgspec.Struct, frozen=True):
    """A submission that is in the log. ``asked`` is the id it asked for, ``derived`` the one from its place there."""

    seq: int
    asked: str | None
    derived: str

    @property
    def id(self) -> str:
        return self.asked or self.derived


class Answer(msgspec.Struct, frozen=True):
    """What the scheduler made of a submission."""

    event: Event
    fact: Accepted | Rejected | Resubmitted


def new_job_id() -> str:
    """A fresh id: the second and 32 random bits."""
    return f"{int(time.time())}-{os.urandom(4).hex()}"


async def send_packed(session: Session, producer: str, packed: Packed) -> Sent:
    """Store the body, where it stands apart, and then the submission.

    Raises:
        Refused, PayloadTooLarge, LogUnavailable: see :func:`send_raw`.
    """
    if packed.body is not None:
        await put_body(session.payloads, packed.body)
    event_id = new_id()
    event = enveloped(packed.spec, event_id=event_id, source=session.source, time=now_rfc3339())
    return await _send(session, producer, event, event_id=event_id, asked=packed.spec.id)


async def send_raw(session: Session, producer: str, raw: bytes) -> Sent:
    """Store ``raw`` as a submission, whatever it is.

    Raises:
        Refused: these credentials may not submit.
        PayloadTooLarge: it is larger than the server takes in one message.
        LogUnavailable: it is not stored, or nobody said whether it is; the message says which.
    """
    parsed = parse_submission(raw)
    asked = parsed.spec.id if isinstance(parsed, Submission) else None
    return await _send(session, producer, raw, event_id=new_id(), asked=asked if asked and is_token(asked) else None)


async def _send(session: Session, producer: str, body: bytes, *, event_id: str, asked: str | None) -> Sent:
    subject = subjects.submit(producer)
    await session.log.last_seq()  # says at once where there is no log
    outcome = await session.recorder.settle(Record(subject=subject, body=body, event_id=event_id))
    if not isinstance(outcome, Appended):
        raise _not_stored(outcome, len(body), asked)
    stored = await session.log.get(outcome.seq)
    if stored is None:
        raise LogUnavailable(f"sequence {outcome.seq} was stored and is not there any more")
    return Sent(outcome.seq, asked, job_id_at(stored.seq, stored.stored_ns))


def _not_stored(outcome: Outcome, count: int, asked: str | None) -> Exception:
    detail = getattr(outcome, "detail", "")
    code = getattr(outcome, "code", "unanswered")
    if code == "too_large":
        return PayloadTooLarge(
            f"not submitted: {size(count)} in one message, and the server takes fewer ({detail}); "
            "without --no-check, large bodies go through the object store",
        )
    if code == "denied":
        return Refused(f"not submitted: {detail}")
    if code == "unanswered":
        again = f"submit again with --id {asked}: it is one job then" if asked else "look with `gpuq events`"
        return LogUnavailable(f"nobody said within {SETTLE_S:g} s whether the submission is stored; {again}")
    return LogUnavailable(f"not submitted: {detail or code}")


async def answer(
    session: Session, sent: Sent, *, timeout_s: float | None, without_scheduler: bool = False
) -> Answer | None:
    """The scheduler's answer, or None where it does not come in time.

    Where no scheduler runs it is not waited for, unless ``without_scheduler``. A rejection stands on the derived
    subject, whatever id was asked for.
    """
    places = {subjects.job(sent.id), subjects.job(sent.derived)}
    async with following(session, *sorted(places), after=sent.seq) as inbox:
        try:
            async with asyncio.timeout(timeout_s):
                if not without_scheduler:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_LOOK_S):
                            return await _answer_in(inbox, sent)
                    if not await session.scheduler_answers():
                        return None
                return await _answer_in(inbox, sent)
        except TimeoutError:
            return None


async def _answer_in(inbox: Inbox, sent: Sent) -> Answer:
    while True:
        item = await inbox.next()
        fact = item.data if isinstance(item, Event) else None
        if isinstance(fact, Accepted | Rejected | Resubmitted) and fact.submission_seq == sent.seq:
            assert isinstance(item, Event)
            return Answer(item, fact)
