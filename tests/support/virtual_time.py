"""Time that passes at once: an event loop whose clock jumps to the next timer whenever nothing is left to do.

For code that waits by the loop only: sleeps, timeouts and ``loop.time()`` agree, and no test waits for real. What comes
from outside the loop (threads, sockets, processes) is not waited for, and has no place under it.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from datetime import datetime, timedelta
from typing import Any, ParamSpec, cast

from gpukeeper.events.clock import from_ns, now

P = ParamSpec("P")

#: What a server's clock says when a loop begins, whose own clock begins at 0: some second of the year 2025.
START_NS = 1_750_000_000_000_000_000


class _Jumping(selectors.DefaultSelector):
    """Never blocks: the time it was asked to wait has passed."""

    def __init__(self) -> None:
        super().__init__()
        self.passed_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise AssertionError("the test waits for something that never comes")
            self.passed_s += max(timeout, 0.0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)
        # A timer is due when the clock is this close to it: finer than a float tells apart would never be reached.
        self._clock_resolution = 1e-6

    def be_early(self, by_s: float) -> None:
        """Let timers be due so long before their time where the loop is awake then, as those of coarse clocks are."""
        self._clock_resolution = by_s

    def time(self) -> float:
        return self._jumping.passed_s


def moment() -> datetime:
    """This machine's clock: the loop's where that is a virtual one."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualLoop):
        return now()
    return from_ns(START_NS) + timedelta(microseconds=round(loop.time() * 1e6))


def now_ns() -> int:
    """The loop's clock, as a server's clock of nanoseconds."""
    return START_NS + int(asyncio.get_running_loop().time() * 1e9)


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an async test (or one example of a property) on a loop of its own, in virtual time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **kwargs))

    return cast("Callable[P, None]", run)
