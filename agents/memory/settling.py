"""When a device has shown what a release gave back. Pure.

A runtime that says that it let go has not always done so, and drivers show freed memory late (a ComfyUI after three
seconds): so the reading is watched until it no longer moves.
"""

from __future__ import annotations

from typing import Literal

#: A reading that rose and then stayed for this long will not move any more.
STILL_S = 5.0
#: The same where all that was promised is there.
STILL_AS_PROMISED_S = 0.5
#: Less than this share of the promise is no yield: the owner still holds it.
YIELD_SHARE_MIN = 0.5

Seen = Literal["moving", "enough", "settled"]


class Settling:
    """Watches the free memory of one device after one release. Times are seconds of one monotonic clock."""

    def __init__(self, *, before_mb: int, promised_mb: int, wanted_mb: int | None) -> None:
        self.before_mb = before_mb
        self.promised_mb = promised_mb
        #: What must be free for whoever asked; None where all that can be had is wanted.
        self.wanted_mb = wanted_mb
        self.free_mb = before_mb
        self._since_s: float | None = None

    @property
    def measured_mb(self) -> int:
        """By how much the free memory rose."""
        return self.free_mb - self.before_mb

    @property
    def yielded(self) -> bool:
        """Whether the device shows that the owner let go of at least a good part."""
        return self.measured_mb > 0 and self.measured_mb >= YIELD_SHARE_MIN * self.promised_mb

    def saw(self, free_mb: int | None, at_s: float) -> Seen:
        """Take note of a reading. One without figures tells nothing and lets the waiting go on."""
        if free_mb is None:
            return "moving"
        if self._since_s is None or free_mb != self.free_mb:
            self.free_mb, self._since_s = free_mb, at_s
        if self.wanted_mb is not None and free_mb >= self.wanted_mb:
            return "enough"
        if not self.yielded:
            # Some of what rose may be anybody's: as long as so little has come, the owner may still let go.
            return "moving"
        still_s = STILL_AS_PROMISED_S if self.measured_mb >= self.promised_mb else STILL_S
        return "settled" if at_s - self._since_s >= still_s else "moving"
