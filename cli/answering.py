"""What is heard of an operator's command, up to the last word. Pure."""

from __future__ import annotations

from typing import Any

from gpukeeper.cli.exitcodes import Exit
from gpukeeper.cli.freeing import Freeing
from gpukeeper.cli.words import type_name
from gpukeeper.events.codec import Event
from gpukeeper.events.device import Drained, ReclaimWanted, Resumed
from gpukeeper.events.reasons import Reason
from gpukeeper.events.runtime import Acted, ActWanted, Pinned, Unpinned

#: What the scheduler says yes with.
_YES = (Drained, Resumed, Pinned, Unpinned, ReclaimWanted, ActWanted)
#: The agent did not even try, for its operator's own good.
_NOT_TRIED = (Reason.CRASH_LOOPING, Reason.NO_CONTAINER, Reason.OWNER_BUSY, Reason.PINNED)


class Answers:
    """What is heard of one command: the scheduler's yes, and the agent's answer where it is the agent that acts.

    ``command_seq`` is the command's sequence, by which answers name it.
    """

    def __init__(self, command_seq: int) -> None:
        self.command_seq = command_seq
        self.yes: Event | None = None
        self.freeing: Freeing | None = None
        self.acted: Event | None = None

    @property
    def ended(self) -> bool:
        match None if self.yes is None else self.yes.data:
            case None:
                return False
            case ReclaimWanted():
                return self.freeing is not None and self.freeing.ended
            case ActWanted():
                return self.acted is not None
            case _:
                return True

    def take(self, event: Event) -> bool:
        """Take one event; return whether it is an answer."""
        fact = event.data
        if isinstance(fact, _YES) and fact.command_seq == self.command_seq:
            self.yes = event
            if isinstance(fact, ReclaimWanted):
                self.freeing = Freeing(event.seq, fact.vram_mb)
            return True
        if self.freeing is not None:
            return self.freeing.take(event)
        if self.yes is not None and isinstance(fact, Acted) and fact.wanted_seq == self.yes.seq:
            self.acted = event
            return True
        return False

    @property
    def events(self) -> list[Event]:
        """All answers, in order."""
        found = [] if self.yes is None else [self.yes]
        found += [] if self.freeing is None else self.freeing.events
        return found if self.acted is None else [*found, self.acted]

    @property
    def exit(self) -> Exit:
        """What the exit status says of it, once it :attr:`ended`."""
        if self.freeing is not None:
            return self.freeing.exit
        fact = None if self.acted is None else self.acted.data
        if isinstance(fact, Acted) and not fact.done:
            return Exit.REFUSED if fact.reason in _NOT_TRIED else Exit.JOB_FAILED
        return Exit.OK

    def document(self) -> dict[str, Any]:
        """The outcome as JSON. ``state``: what was answered (``drained``, ...), ``done``, ``refused``, ``failed``."""
        if self.freeing is not None:
            return self.freeing.document()
        fact = None if self.acted is None else self.acted.data
        if isinstance(fact, Acted):
            state = "done" if fact.done else "refused" if self.exit is Exit.REFUSED else "failed"
            return {"state": state, "reason": fact.reason, "detail": fact.detail}
        return {"state": None if self.yes is None else type_name(self.yes).rpartition(".")[2]}
