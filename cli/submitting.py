"""The whole of `gpuq submit`: check, send, read the answer, and see the job to its end where asked to."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from gpukeeper.cli.errors import Refused, WrongUsage
from gpukeeper.cli.exitcodes import Exit
from gpukeeper.cli.inbox import Inbox
from gpukeeper.cli.options import Where
from gpukeeper.cli.printing import one_line, print_json, say, tell
from gpukeeper.cli.reasonwords import in_words
from gpukeeper.cli.sending import Answer, Sent, answer, new_job_id, send_packed, send_raw
from gpukeeper.cli.session import ANSWER_S, Session, open_session
from gpukeeper.cli.submission import BODY_BYTES_MAX, Asked, Packed, checked, fields_of, pack, too_large, unchecked
from gpukeeper.cli.viewing import View, view_to_end
from gpukeeper.cli.waiting import how_to_return
from gpukeeper.cli.words import problems_in_words
from gpukeeper.events import subjects
from gpukeeper.events.errors import WaitTimedOut
from gpukeeper.events.ids import require_token
from gpukeeper.events.job import Accepted, Rejected


class Manner(msgspec.Struct, frozen=True, kw_only=True):
    """How somebody wants to submit."""

    waits: bool = False
    streams: bool = False
    #: From the submission on; None waits for ever for the end, and a few seconds for the answer.
    timeout_s: float | None = None
    as_json: bool = False
    quiet: bool = False


class SubmitRun:
    """One `gpuq submit`."""

    def __init__(self, where: Where, producer: str | None, manner: Manner) -> None:
        self._where = where
        self._producer = None if producer is None else require_token(producer, "--producer")
        self._manner = manner
        self._sent: Sent | None = None
        self._give_up_at: float | None = None

    async def run(self, asked: Asked, file: Path | None, *, check: bool) -> Exit:
        """Do it; return the exit status.

        Raises:
            Refused, PayloadTooLarge, WrongUsage: it was not submitted, or the scheduler rejected it.
            LogUnavailable: it is not stored, or nobody can say.
            WaitTimedOut: it did not end in time, and goes on.
        """
        given = fields_of(asked)
        raw = None if file is None else read_file(file)
        new_id = new_job_id()
        what = pack(checked(raw, given, new_id=new_id)) if check else unchecked(raw, given, new_id=new_id)
        async with open_session(self._where, follows=self._manner.waits) as session, Inbox(session) as inbox:
            self._sent = sent = await self._send(session, inbox, what)
            return await self._go_on(session, inbox, sent)

    def interrupted(self) -> None:
        """Ctrl-C: say what became of the job."""
        if self._sent is not None:
            tell(f"job {self._sent.id} goes on: {how_to_return(self._sent.id)}")

    async def _send(self, session: Session, inbox: Inbox, what: Packed | bytes) -> Sent:
        producer = self._producer or session.user
        if isinstance(what, Packed):
            assert what.spec.id is not None
            if self._manner.streams:
                await inbox.hear_output(what.spec.id)  # before anything can be said
            sent = await send_packed(session, producer, what)
        else:
            sent = await send_raw(session, producer, what)
            if self._manner.streams:
                await inbox.hear_output(sent.id)
        if self._manner.timeout_s is not None:
            self._give_up_at = asyncio.get_running_loop().time() + self._manner.timeout_s
        return sent

    async def _go_on(self, session: Session, inbox: Inbox, sent: Sent) -> Exit:
        manner = self._manner
        found = await answer(session, sent, timeout_s=self._left_s(ANSWER_S))
        if found is None:
            await self._tell_unanswered(session, sent)
            if not manner.waits:
                return Exit.OK
            found = await self._wait_for_answer(session, sent)
        self._tell_answer(sent, found)
        if not manner.waits:
            return Exit.OK
        await inbox.follow(subjects.job(sent.id), after=0)
        view = View(
            streams=manner.streams,
            as_json=manner.as_json,
            timeout_s=self._left_s(None),
            tells_denials=not (manner.as_json or manner.quiet),
        )
        return await view_to_end(session, inbox, sent.id, view, {"seq": sent.seq})

    async def _wait_for_answer(self, session: Session, sent: Sent) -> Answer:
        limit_s = self._left_s(None)
        found = await answer(session, sent, timeout_s=limit_s, without_scheduler=True)
        if found is None:
            message = f"submission {sent.id} has no answer within {self._manner.timeout_s:g} s; it stays stored"
            raise WaitTimedOut(message, job=sent.id)
        return found

    def _left_s(self, at_most_s: float | None) -> float | None:
        if self._give_up_at is None:
            return at_most_s
        left_s = max(self._give_up_at - asyncio.get_running_loop().time(), 0.0)
        return left_s if at_most_s is None else min(left_s, at_most_s)

    async def _tell_unanswered(self, session: Session, sent: Sent) -> None:
        why = "not answered yet" if await session.scheduler_answers() else "no scheduler is running"
        self._print(sent, "stored", f"stored, not yet accepted: {why}")

    def _tell_answer(self, sent: Sent, found: Answer) -> None:
        """Say what the scheduler said.

        Raises:
            Refused: it rejected the submission.
        """
        fact = found.fact
        if isinstance(fact, Rejected):
            raise Refused(
                f"{sent.id} rejected, {fact.reason}: {problems_in_words(fact.problems)}{_kept_as(sent.id, fact.job)}",
                id=fact.job,
                requested_id=fact.requested_id or sent.asked or "",
                reason=str(fact.reason),
                problems=[msgspec.to_builtins(problem) for problem in fact.problems],
            )
        if isinstance(fact, Accepted):
            waits = f"; waits, {in_words(fact.waiting, fact.detail)}" if fact.waiting else ""
            self._print(sent, "accepted", f"accepted{waits}")
        else:
            self._print(sent, "resubmitted", "submitted before with the same body: still one job")

    def _print(self, sent: Sent, state: str, words: str) -> None:
        """The id and what became of it: on stdout where it is the result of the command, else on stderr."""
        manner = self._manner
        if manner.waits:
            if not (manner.as_json or manner.quiet):
                tell(f"{sent.id} {one_line(words)}")
        elif manner.as_json:
            print_json({"id": sent.id, "state": state, "seq": sent.seq, "detail": words})
        else:
            say(sent.id if manner.quiet else f"{sent.id} {one_line(words)}")


def read_prompt(argument: str | None, option: str | None) -> str | None:
    """The prompt, from stdin where it is ``-``.

    Raises:
        WrongUsage: it was given twice.
    """
    if argument is not None and option is not None:
        raise WrongUsage("give the prompt once: as PROMPT or with --prompt")
    prompt = argument if argument is not None else option
    return prompt if prompt != "-" else read_file(Path("-")).decode("utf-8", "surrogateescape")


def read_file(file: Path) -> bytes:
    """A file, or stdin for ``-``, up to the largest body and its surroundings.

    Raises:
        WrongUsage: it cannot be read.
        Refused: it is larger.
    """
    try:
        if str(file) == "-":
            content = sys.stdin.buffer.read(BODY_BYTES_MAX + 1)
        else:
            with file.open("rb") as opened:
                content = opened.read(BODY_BYTES_MAX + 1)
    except OSError as error:
        raise WrongUsage(f"{file}: {error.strerror}") from error
    if len(content) > BODY_BYTES_MAX:
        raise too_large(None)
    return content


def _kept_as(asked: str, handle: str) -> str:
    """Where the refusal stands: an id that was asked for may belong to another job."""
    return "" if asked == handle else f" (see: gpuq status {handle})"
