"""What the demonstration says, and what it has found to be true or not."""

from __future__ import annotations

import time

from gpukeeper.cli.printing import one_line, say


class Narration:
    """Speaks on stdout and counts what is not as it should be."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._steps = 0
        self.wrong: list[str] = []

    def step(self, title: str) -> None:
        """A heading, with the time since the beginning."""
        self._steps += 1
        say("")
        say(f"== {self._steps}. {title}  [{time.monotonic() - self._began:.1f} s]")

    def line(self, text: str) -> None:
        """One line of explanation, or of what was found."""
        say(f"   {one_line(text, 2000)}")

    def check(self, what: str, *, holds: bool) -> None:
        """Say whether ``what`` is so."""
        if not holds:
            self.wrong.append(what)
        say(f"   [{'ok' if holds else 'WRONG'}] {one_line(what, 2000)}")
