"""What the agent says to a wish to have memory freed, up to its last word. Pure."""

from __future__ import annotations

from typing import Any, Literal

from gpukeeper.cli.exitcodes import Exit
from gpukeeper.events.codec import Event
from gpukeeper.events.device import Considered, Reclaimed, ReclaimFailed, ReclaimRefused, ReclaimRequested

State = Literal["freed", "refused", "failed"]


class Freeing:
    """Takes the agent's facts about the wish at ``wanted_seq``.

    A wish may lead to several releases. Each request names all whom the agent goes by then to ask, so that the last
    word is known: a refusal, a failure, or the measurement after the last of them, or the one that shows enough.
    """

    def __init__(self, wanted_seq: int, vram_mb: int | None = None) -> None:
        self.wanted_seq = wanted_seq
        self.vram_mb = vram_mb
        self.events: list[Event] = []
        self.ended = False
        #: As measured on the device, release by release.
        self.freed_mb = 0
        self.considered: tuple[Considered, ...] = ()
        self._releases = 0
        self._expected = 1
        self._last: ReclaimRefused | ReclaimFailed | None = None

    def take(self, event: Event) -> bool:
        """Take one event; return whether it is about this wish."""
        fact = event.data
        if not isinstance(fact, ReclaimRequested | Reclaimed | ReclaimRefused | ReclaimFailed):
            return False
        if fact.wanted_seq != self.wanted_seq:
            return False
        self.events.append(event)
        match fact:
            case ReclaimRequested():
                going = sum(1 for each in fact.considered if each.kept is None)
                self._expected = self._releases + max(going, 1)
                self.considered = fact.considered
            case Reclaimed():
                self._releases += 1
                self.freed_mb += max(fact.measured_mb, 0)
                self.ended = self._releases >= self._expected or (self.vram_mb is not None and self._is_enough())
            case ReclaimRefused():
                self.considered = fact.considered or self.considered
                self._last, self.ended = fact, True
            case ReclaimFailed():
                self._last, self.ended = fact, True
        return True

    @property
    def state(self) -> State | None:
        """What came of it; None while there is no last word and nothing was freed."""
        if isinstance(self._last, ReclaimFailed):
            return "failed"
        if isinstance(self._last, ReclaimRefused):
            # All that could be had was had, and was all that was asked for.
            return "freed" if self._releases and self._is_enough() else "refused"
        if not self._releases:
            return None
        return "freed" if self._is_enough() else "refused"

    @property
    def exit(self) -> Exit:
        return {"freed": Exit.OK, "refused": Exit.REFUSED, "failed": Exit.JOB_FAILED, None: Exit.TIMED_OUT}[self.state]

    def document(self) -> dict[str, Any]:
        """The outcome as JSON: figures in MB, what stays and why."""
        return {
            "state": self.state,
            "freed_mb": self.freed_mb,
            "wanted_mb": self.vram_mb,
            "reason": None if self._last is None else self._last.reason,
            "detail": "" if self._last is None else self._last.detail,
            "stays": [each for each in self.considered if each.kept is not None],
        }

    def _is_enough(self) -> bool:
        return self.vram_mb is None or self.freed_mb >= self.vram_mb
