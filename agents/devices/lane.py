"""One thread for calls that may never return.

A call into a driver cannot be interrupted, only no longer waited for. So every thing that can hang by itself (one
GPU, the driver as a whole, a file) gets a lane: one daemon thread at most, one call at a time. While a call is stuck
its lane says so at once and starts nothing; no other lane notices. When the call returns at last, its late answer is
dropped and the lane is as good as new.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from gpukeeper.events.errors import GpukeeperError

T = TypeVar("T")


class LaneStuck(GpukeeperError):
    """A call took longer than its limit, or an earlier one has still not returned."""

    code = "lane_stuck"
    retryable = True


class LaneClosed(GpukeeperError):
    """The lane was given up."""

    code = "lane_closed"


class _Call:
    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.done: Future[Any] = Future()


class Lane:
    """Runs calls one after another in a thread of its own, which starts with the first call.

    Used from one event loop. The thread is a daemon: a call that never returns does not keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._running: _Call | None = None
        self._stuck: _Call | None = None
        self._closed = False

    @property
    def stuck(self) -> bool:
        """Whether a call that nobody waits for any more has still not returned."""
        return self._stuck is not None and not self._stuck.done.done()

    async def call(self, work: Callable[[], T], *, limit_s: float) -> T:
        """Run ``work`` in the thread and return its value; what it raises is raised here.

        Raises:
            LaneStuck: after ``limit_s`` seconds (waiting for earlier calls counts), or at once while an earlier call
                is stuck.
            LaneClosed: after :meth:`close`.
        """
        if self._closed:
            raise LaneClosed("given up")
        if self.stuck:
            raise LaneStuck("an earlier call has still not returned")
        self._stuck = None
        call = _Call(work)
        self._calls.put(call)
        if self._thread is None:
            self._thread = Thread(target=self._serve, name=f"gpuq {self._name}", daemon=True)
            self._thread.start()
        answer = asyncio.wrap_future(call.done)
        try:
            done, _ = await asyncio.wait({answer}, timeout=limit_s)
        except asyncio.CancelledError:
            answer.cancel()
            raise
        if not done:
            # A call that has not begun is then never begun; one that has goes on unheard. The thread's own future is
            # cancelled here and now: through the loop's it would be a turn later, when the call may have begun.
            call.done.cancel()
            answer.cancel()
            self._stuck = self._running
            raise LaneStuck(f"no answer within {limit_s:g} s")
        return answer.result()

    async def close(self, *, limit_s: float) -> bool:
        """End the thread once it is idle, waiting at most ``limit_s``. Returns whether it has ended."""
        if not self._closed:
            self._closed = True
            self._calls.put(None)
        thread = self._thread
        if thread is None:
            return True
        if not self.stuck:
            await asyncio.to_thread(thread.join, limit_s)
        return not thread.is_alive()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            self._running = call
            if call.done.set_running_or_notify_cancel():
                try:
                    value = call.work()
                except BaseException as error:  # noqa: BLE001 - belongs to the caller, who gets it
                    call.done.set_exception(error)
                else:
                    call.done.set_result(value)
            self._running = None
