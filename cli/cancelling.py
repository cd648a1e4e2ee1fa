"""`gpuq cancel`: a command in the log, and the answer to it."""

from __future__ import annotations

import asyncio

import msgspec

from gpukeeper.cli.commanding import raise_if_refused, send, unanswered
from gpukeeper.cli.errors import Refused
from gpukeeper.cli.exitcodes import Exit
from gpukeeper.cli.inbox import Inbox, following
from gpukeeper.cli.options import Where
from gpukeeper.cli.printing import one_line, print_json, say
from gpukeeper.cli.session import open_session
from gpukeeper.cli.waiting import is_end
from gpukeeper.cli.words import sentence
from gpukeeper.events import subjects
from gpukeeper.events.codec import Event
from gpukeeper.events.ids import require_token
from gpukeeper.events.job import Cancelled, CancelRequested
from gpukeeper.events.operator import Cancel


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
        command = Cancel(job=job_id, reason=reason)
        seq = await send(session, command, about=job_id, what=f"the cancel of {job_id}", correlationid=job_id)
        outcome = _Outcome()
        async with following(session, subjects.job(job_id), subjects.SITE, after=seq) as inbox:
            try:
                async with asyncio.timeout(timeout_s):
                    await _hear(inbox, outcome, job_id, seq)
            except TimeoutError:
                if outcome.requested is None:
                    raise await unanswered(session, f"the cancel of {job_id}", timeout_s, job=job_id) from None
    return _tell(outcome, job_id, timeout_s, as_json=as_json)


async def _hear(inbox: Inbox, outcome: _Outcome, job_id: str, seq: int) -> None:
    """Listen until the command is refused or the job has ended."""
    while outcome.ended is None:
        item = await inbox.next()
        raise_if_refused(item, seq, f"job {job_id} is not cancelled", job=job_id)
        assert isinstance(item, Event)
        if isinstance(item.data, CancelRequested) and item.data.command_seq == seq:
            outcome.requested = item
        elif is_end(item, job_id):
            outcome.ended = item


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
