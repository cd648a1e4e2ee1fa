"""`gpuq cancel`: a command in the log, and the answer to it."""

from __future__ import annotations

import asyncio

import msgspec

from gpukeeper.cli.errors import NotFound, Refused
from gpukeeper.cli.exitcodes import Exit
from gpukeeper.cli.inbox import Inbox, following
from gpukeeper.cli.options import Where
from gpukeeper.cli.printing import one_line, print_json, say
from gpukeeper.cli.reasonwords import in_words
from gpukeeper.cli.session import SETTLE_S, Session, open_session
from gpukeeper.cli.waiting import is_end
from gpukeeper.cli.words import sentence
from gpukeeper.events import subjects
from gpukeeper.events.codec import Event
from gpukeeper.events.errors import LogUnavailable, WaitTimedOut
from gpukeeper.events.ids import require_token
from gpukeeper.events.job import Cancelled, CancelRequested
from gpukeeper.events.log import Appended
from gpukeeper.events.operator import Cancel
from gpukeeper.events.proposal import Proposal
from gpukeeper.events.reasons import Reason
from gpukeeper.events.site import CommandRefused


class _Outcome(msgspec.Struct):
    """What was heard so far: that the job shall end, and its end."""

    requested: Event | None = None
    ended: Event | None = None


async def cancel_job(where: Where, job_id: str, *, reason: str, timeout_s: float, as_json: bool) -> Exit:
    """Ask for the job's end and wait for what comes of it.

    Raises:
        NotFound: there is no such job.
        Refused: it has ended already, or ended otherwise meanwhile.
        WaitTimedOut: nobody answered the command; it stands in the log.
        LogUnavailable: the command is not stored, or nobody can say.
    """
    require_token(job_id, "ID")
    async with open_session(where) as session:
        seq = await _command(session, job_id, reason)
        outcome = _Outcome()
        async with following(session, subjects.job(job_id), subjects.SITE, after=seq) as inbox:
            try:
                async with asyncio.timeout(timeout_s):
                    await _hear(inbox, outcome, job_id, seq)
            except TimeoutError:
                if outcome.requested is None:
                    raise await _unanswered(session, job_id, timeout_s) from None
    return _tell(outcome, job_id, timeout_s, as_json=as_json)


async def _command(session: Session, job_id: str, reason: str) -> int:
    await session.log.last_seq()  # says at once where there is no log
    outcome = await session.recorder.record(
        Proposal(
            subject=subjects.command(session.user),
            fact=Cancel(job=job_id, reason=reason),
            expected=None,
            aggregate=job_id,
            correlationid=job_id,
            actor=session.user,
        )
    )
    if isinstance(outcome, Appended):
        return outcome.seq
    what = "not sent" if not hasattr(outcome, "code") else "refused"
    raise LogUnavailable(f"the cancel of {job_id} is {what}: {outcome.detail or f'no answer within {SETTLE_S:g} s'}")


async def _hear(inbox: Inbox, outcome: _Outcome, job_id: str, seq: int) -> None:
    """Listen until the command is refused or the job has ended."""
    while outcome.ended is None:
        item = await inbox.next()
        fact = item.data if isinstance(item, Event) else None
        if isinstance(fact, CommandRefused) and fact.command_seq == seq:
            words = f"job {job_id} is not cancelled, {in_words(fact.reason, fact.detail)}"
            if fact.reason is Reason.UNKNOWN_JOB:
                raise NotFound(words, job=job_id, reason=str(fact.reason))
            raise Refused(words, job=job_id, reason=str(fact.reason))
        assert isinstance(item, Event)
        if isinstance(fact, CancelRequested) and fact.command_seq == seq:
            outcome.requested = item
        elif is_end(item, job_id):
            outcome.ended = item


async def _unanswered(session: Session, job_id: str, timeout_s: float) -> WaitTimedOut:
    runs = await session.scheduler_answers()
    why = "" if runs else ": no scheduler is running"
    return WaitTimedOut(f"the cancel of {job_id} is stored and not answered within {timeout_s:g} s{why}", job=job_id)


def _tell(outcome: _Outcome, job_id: str, timeout_s: float, *, as_json: bool) -> Exit:
    if outcome.ended is None:
        state = "cancel_requested"
        words = f"cancel requested; it has not ended within {timeout_s:g} s: see `gpuq status {job_id}`"
    elif isinstance(outcome.ended.data, Cancelled):
        state, words = "cancelled", one_line(sentence(outcome.ended))
    else:
        message = f"job {job_id} ended before the cancel took effect: {sentence(outcome.ended)}"
        raise Refused(message, job=job_id, reason="already_ended")
    if as_json:
        print_json({"id": job_id, "state": state, "detail": words})
    else:
        say(f"{job_id} {words}")
    return Exit.OK
