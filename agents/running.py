"""The run of one job: its work goes to the runtime, and what comes is passed on under the job's clocks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from gpukeeper.agents import endings
from gpukeeper.agents.body import Body
from gpukeeper.agents.endings import ClockExpired
from gpukeeper.agents.hold import Hold
from gpukeeper.agents.runtimes.port import Done, RuntimeFailure, Signs, Token
from gpukeeper.agents.stopping import StopProof
from gpukeeper.agents.writer import patiently
from gpukeeper.capacity.residency import Stay
from gpukeeper.events import job as facts
from gpukeeper.events.clock import now_rfc3339
from gpukeeper.events.fact import Fact
from gpukeeper.events.objects import put_body
from gpukeeper.events.reasons import Reason
from gpukeeper.events.spec import INLINE_BYTES_MAX
from gpukeeper.events.work import JobResult

_PROGRESS_EVERY_S = 5.0
_STOP_PROOF_EVERY_S = 0.25


class Run:
    """One run. :meth:`execute` once; :meth:`prove_stopped` where it was ended from outside."""

    def __init__(self, hold: Hold) -> None:
        self._hold = hold
        self._note: asyncio.Task[None] | None = None
        #: What the runtime shows while the load or the run goes on; the latter is looked for by a task of its own.
        self.during: Signs | None = None
        self._look: asyncio.Task[Signs] | None = None

    @property
    def looked(self) -> bool:
        """Whether it is known what the runtime shows while this run goes on."""
        return self._look is not None and self._look.done()

    def tasks(self) -> tuple[asyncio.Task[None] | asyncio.Task[Signs], ...]:
        """What goes on beside it, to be ended with the attempt."""
        return tuple(task for task in (self._note, self._look) if task is not None)

    async def execute(self, body: Body, stay: Stay) -> Fact:
        """Send the work and pass on what comes, under the first-byte, idle and run clocks.

        Raises:
            RuntimeFailure, ClockExpired: how else it may end.
            CancelWanted, Superseded: what a note of its progress met.
        """
        hold = self._hold
        clocks = hold.route.clocks
        loop = asyncio.get_running_loop()
        hold.run_began_s = time.monotonic()
        began, run_until = loop.time(), loop.time() + clocks.run.limit_s
        last, progress_at = began, began
        name: facts.ClockName = "first_byte"
        hold.room.outputs.begin(hold.route.job, hold.route.attempt)
        result: JobResult | None = None
        look: asyncio.TimerHandle | None = None
        limit = asyncio.timeout_at(min(run_until, began + clocks.first_byte.limit_s))
        try:
            async with limit, aclosing(self._stream(body, stay)) as stream:
                async for item in stream:
                    last = loop.time()
                    name = "idle"
                    limit.reschedule(min(run_until, last + clocks.idle.limit_s))
                    if hold.first_byte_s is None:
                        # Not by the loop's clock, which may be as coarse as a millisecond.
                        hold.first_byte_s = round(time.monotonic() - hold.run_began_s, 4)
                        look = loop.call_later(hold.room.watch_after_s, self._look_during_run)
                    if isinstance(item, Done):
                        result = item.result
                        break
                    hold.tokens += 1
                    hold.last_progress_at = now_rfc3339()
                    if item.text:
                        await hold.room.outputs.push(hold.route.job, item.text)
                    if last - progress_at >= _PROGRESS_EVERY_S and self._noted():
                        progress_at = last
                        self._note = asyncio.create_task(self._note_progress(last - began))
        except TimeoutError:
            if not limit.expired():
                raise
            # By what was scheduled: the loop's clock may say a little less than that when a timer is due.
            if limit.when() == run_until:
                raise ClockExpired("run", clocks.run, loop.time() - began) from None
            since = began if name == "first_byte" else last
            clock = clocks.first_byte if name == "first_byte" else clocks.idle
            raise ClockExpired(name, clock, loop.time() - since) from None
        finally:
            if look is not None:
                look.cancel()
        if result is None:
            raise RuntimeFailure(Reason.RUNTIME_CUT, "the answer ended without its last part")
        return await self._succeeded(result)

    async def prove_stopped(self) -> bool:
        """Keep the slot until the runtime is proven to have stopped, or for as long as that may take.

        Returns whether it is proven.
        """
        hold = self._hold
        if hold.phase not in ("loading", "running"):
            return True
        during = self.during
        if self._look is not None:
            # A look that is still under way may have seen what came after the stop.
            during = self._look.result() if self.looked else None
            self._look.cancel()
        hold.phase = "stopping"
        proof = StopProof(during)
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + hold.room.stop_proof_limit_s
        while loop.time() < give_up_at:
            if proof.shown_by(await hold.provider.signs(hold.model)):
                return True
            await asyncio.sleep(_STOP_PROOF_EVERY_S)
        return False

    def _stream(self, body: Body, stay: Stay) -> AsyncGenerator[Token | Done]:
        hold = self._hold
        return hold.provider.run(body.model, body.task, body.work, on_cpu=hold.on_cpu, keep_alive_s=stay.keep_alive_s)

    def _noted(self) -> bool:
        """Whether the last note is stored. Beside the run, so that a log that is away neither stops it nor its clocks.

        Raises:
            CancelWanted, Superseded: what the note met.
        """
        if self._note is None:
            return True
        if not self._note.done():
            return False
        note, self._note = self._note, None
        note.result()
        return True

    async def _note_progress(self, elapsed_s: float) -> None:
        hold = self._hold
        await hold.append(
            facts.Progress(job=hold.route.job, epoch=hold.epoch, tokens=hold.tokens, elapsed_s=round(elapsed_s, 3))
        )

    def _look_during_run(self) -> None:
        """Remember what the runtime shows while it answers: what it shows after a stop is compared with that.

        Only of runs that last: most are over before, and a look at each would cost more than it gains.
        """
        self._look = asyncio.create_task(self._hold.provider.signs(self._hold.model))

    async def _succeeded(self, result: JobResult) -> Fact:
        body = msgspec.json.encode(result)
        ref = None
        if len(body) > INLINE_BYTES_MAX:
            ref = await patiently(lambda: put_body(self._hold.room.payloads, body))
        return endings.succeeded(self._hold.so_far(), None if ref else result, ref)
