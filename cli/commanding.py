"""Commands of operators: each is a fact in the log, and what is heard of it."""

from __future__ import annotations

from gpukeeper.agents.outputs import Chunk
from gpukeeper.cli.errors import NotFound, Refused
from gpukeeper.cli.reasonwords import in_words
from gpukeeper.cli.session import SETTLE_S, Session
from gpukeeper.events import subjects
from gpukeeper.events.codec import Event
from gpukeeper.events.errors import LogUnavailable, WaitTimedOut
from gpukeeper.events.fact import Fact
from gpukeeper.events.log import Appended
from gpukeeper.events.proposal import Proposal
from gpukeeper.events.reasons import Reason
from gpukeeper.events.site import CommandRefused

_NOT_THERE = (Reason.UNKNOWN_JOB, Reason.UNKNOWN_HOST, Reason.UNKNOWN_DEVICE, Reason.UNKNOWN_RUNTIME)


async def send(session: Session, fact: Fact, *, about: str, what: str, correlationid: str | None = None) -> int:
    """Store the command; return its sequence, by which its answers name it.

    Args:
        about: what it acts on: a job, ``host/device`` or ``host/runtime``.
        what: the command in words, such as ``the cancel of j1``.

    Raises:
        LogUnavailable: it is not stored, or nobody can say.
    """
    await session.log.last_seq()  # says at once where there is no log
    outcome = await session.recorder.record(
        Proposal(
            subject=subjects.command(session.user),
            fact=fact,
            expected=None,
            aggregate=about,
            correlationid=correlationid,
            actor=session.user,
        )
    )
    if isinstance(outcome, Appended):
        return outcome.seq
    verdict = "not sent" if not hasattr(outcome, "code") else "refused"
    raise LogUnavailable(f"{what} is {verdict}: {outcome.detail or f'no answer within {SETTLE_S:g} s'}")


def raise_if_refused(item: Event | Chunk, seq: int, what: str, **fields: object) -> None:
    """Raise where ``item`` refuses the command at ``seq``.

    Raises:
        NotFound: what it acts on does not exist.
        Refused: for any other reason.
    """
    fact = item.data if isinstance(item, Event) else None
    if isinstance(fact, CommandRefused) and fact.command_seq == seq:
        error = NotFound if fact.reason in _NOT_THERE else Refused
        raise error(f"{what}, {in_words(fact.reason, fact.detail)}", **fields, reason=str(fact.reason))


async def unanswered(session: Session, what: str, timeout_s: float, **fields: object) -> WaitTimedOut:
    """The error for a command that is stored and that nobody answered in time."""
    runs = await session.scheduler_answers()
    why = "" if runs else ": no scheduler is running"
    return WaitTimedOut(f"{what} is stored and not answered within {timeout_s:g} s{why}", **fields)
