"""Answers to commands that are not done, and what all answers repeat of a command. Pure."""

from __future__ import annotations

from gpukeeper.events import subjects
from gpukeeper.events.proposal import Proposal
from gpukeeper.events.reasons import Reason
from gpukeeper.events.site import CommandRefused
from gpukeeper.projections.unanswered import Command

#: What a command says is repeated in the answer, which must fit into a message beside the rest.
REASON_CHARS_MAX = 4_096
NAME_CHARS_MAX = 128


def refuse(command: Command, reason: Reason, detail: str) -> Proposal:
    """Answer a command with why it is not done."""
    job = None if command.job is None else shorten(command.job, NAME_CHARS_MAX)
    fact = CommandRefused(
        command_seq=command.seq,
        actor=shorten(command.actor, NAME_CHARS_MAX),
        reason=reason,
        detail=shorten(detail, REASON_CHARS_MAX),
        job=job,
    )
    return Proposal(
        subject=subjects.SITE,
        fact=fact,
        expected=None,
        aggregate="site",
        correlationid=job,
        causationid=cause(command),
        actor=command.actor,
    )


def cause(command: Command) -> str | None:
    """The command's own id, where it is one: a cut id would be another."""
    return command.event_id if 0 < len(command.event_id) <= NAME_CHARS_MAX else None


def shorten(text: str, limit: int) -> str:
    """``text`` in at most ``limit`` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
