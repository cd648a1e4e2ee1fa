"""What the agent says to a wish to have memory freed, up to its last word. Pure."""

from __future__ import annotations

from typing import Any, Literal

from gpukeeper.cli.exitcodes import Exit
from gpukeeper.events.codec import Event
from gpukeeper.events.device import Considered, Reclaimed, ReclaimFailed, ReclaimRefused, ReclaimRequested
from gpukeeper.events.reasons import Reason

State = Literal["freed", "refused", "failed"]


class Freeing:
    """Takes the agent's facts about the wish at ``wanted_seq``.

    The last word is a refusal, or a failure or measurement that announces no other; one measurement that shows less
    than was wanted is none.
    Where it shows less, the agent looks for another owner, or refuses.
    """

    def __init__(self, wanted_seq: int, vram_mb: int | None = None) -> None:
        self.wanted_seq = wanted_seq
        #: How much shall be usable on the device; all that can be had where it is None.
        self.vram_mb = vram_mb
        self.events: list[Event] = []
        self.ended = False
        #: As measured on the device, release by release.
        self.freed_mb = 0
        self.considered: tuple[Considered, ...] = ()
        #: Free memory at which the wish is fulfilled, as the agent said with its last request.
        self._level_mb: int | None = None
        self._fulfilled: bool | None = None
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
                self._level_mb = fact.need_mb
                self.considered = fact.considered
            case Reclaimed():
                self.freed_mb += max(fact.measured_mb, 0)
                self._fulfilled = self._level_mb is None or fact.free_mb >= self._level_mb
                self.ended = self._fulfilled and not fact.more
                self._last = None
            case ReclaimRefused():
                self.considered = fact.considered or self.considered
                self._last, self.ended = fact, True
            case ReclaimFailed():
                self._last, self.ended = fact, not fact.more
        return True

    @property
    def state(self) -> State | None:
        """What came of it; None while nothing was freed, refused or failed."""
        if isinstance(self._last, ReclaimFailed):
            return "failed"
        if self._last is not None:
            # "Nothing more is needed" is a yes: enough is free, or all that could be had was had.
            return "freed" if self._last.reason is Reason.NOT_NEEDED else "refused"
        if self._fulfilled is None:
            return None
        return "freed" if self._fulfilled else "refused"

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
