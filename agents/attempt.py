"""One attempt at one job: claim, admit, load, verify, start, run, end, release; each step an event.

What each step rests on:

1. *claim* (the device's subject): the slot is ours; its sequence is the epoch. Losing it ends the attempt.
2. *admit* (the job's subject, at the sequence the route names): the sole right to execute. Losing it releases the slot.
3. *load* and *verify*: nothing of the job's own work is sent before its model is proven to sit where it should.
4. *started*: from here on a crash leaves the outcome unknown, so it is stored before the first byte is sent.
5. the end (the job's subject), then *released* (the device's).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from enum import StrEnum
from typing import Any

import msgspec
import structlog

from gpukeeper.agents import endings
from gpukeeper.agents.admission import Admit, Deny, Need, admit
from gpukeeper.agents.body import Body, BodyMissing, fetch_body
from gpukeeper.agents.endings import ClockExpired, SoFar, late_result
from gpukeeper.agents.placement import Verdict, judge
from gpukeeper.agents.room import HostRoom, Slot
from gpukeeper.agents.runtimes.port import Done, Provider, RuntimeFailure, Signs, Token
from gpukeeper.agents.stopping import NOT_LOADED, StopProof
from gpukeeper.agents.writer import CancelWanted, HeldJob, NotRecorded, Superseded, patiently
from gpukeeper.events import job as facts
from gpukeeper.events.clock import now, now_rfc3339
from gpukeeper.events.device import Claimed, Released
from gpukeeper.events.errors import LogUnavailable
from gpukeeper.events.fact import Fact
from gpukeeper.events.objects import put_body
from gpukeeper.events.readings import ClaimBeat, DeviceReading, ResidentModel, RuntimeReading
from gpukeeper.events.reasons import Reason
from gpukeeper.events.runtime import ModelLoaded, Suspect
from gpukeeper.events.spec import INLINE_BYTES_MAX
from gpukeeper.events.work import JobResult
from gpukeeper.projections.host import Suspicion, why_suspect
from gpukeeper.projections.hostview import PendingRoute

_log = structlog.get_logger("gpukeeper.attempt")

MB = 1_048_576
_FENCED = "the claim was ended by somebody else; the scheduler gives the job its end"
_PROGRESS_EVERY_S = 5.0
_PARTIAL_CHARS_MAX = 8_192
_STOP_PROOF_EVERY_S = 0.25
#: A watch that broke begins again after this long.
_WATCH_AGAIN_S = 1.0
#: What was seen longer ago is looked at again before an admission rests on it.
_EVIDENCE_AGE_MAX_S = 5.0


class Stop(StrEnum):
    """Why a run is ended from outside."""

    CANCEL = "cancel"
    PREEMPT = "preempt"
    FENCED = "fenced"


def _sources(verdict: Verdict) -> str:
    """Where a verdict's figures come from, for its event."""
    read = f" ({', '.join(verdict.devices_read)})" if verdict.devices_read else ""
    return f"vram: {verdict.sources.vram}; device: {verdict.sources.device}{read}"


async def _end_all(tasks: tuple[asyncio.Task[Any], ...]) -> None:
    """Cancel what still runs, and take note of how each ended: most have ended by now and cost nothing here."""
    left = {task for task in tasks if not task.done()}
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left)
    for task in tasks:
        if not task.cancelled():
            task.exception()


class Attempt:
    """One claim's life. Owned by the agent's dispatcher; :meth:`run` never raises for what a job can do wrong."""

    def __init__(
        self,
        room: HostRoom,
        route: PendingRoute,
        slot: Slot,
        provider: Provider,
    ) -> None:
        self.room = room
        self.route = route
        self.slot = slot
        self.provider = provider
        self.epoch = 0
        self.phase = "claiming"
        self.tokens = 0
        self.last_progress_at: str | None = None
        self.stop_reason: Stop | None = None
        #: The claim is being given back.
        self.released = False
        self._held = HeldJob(room.recorder, route.job, route.job_seq)
        self._work_task: asyncio.Task[Fact] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._note: asyncio.Task[None] | None = None
        self._load_s: float | None = None
        self._first_byte_s: float | None = None
        self._run_began_s: float | None = None
        self._model = ""
        #: What the runtime shows while the load or the run goes on; the latter is looked for by a task of its own.
        self._during: Signs | None = None
        self._look: asyncio.Task[Signs] | None = None

    def beat(self) -> ClaimBeat | None:
        """What heartbeats say about this claim; None before it is one."""
        if not self.epoch:
            return None
        return ClaimBeat(
            job=self.route.job,
            device=self.slot.device.id,
            slot=self.slot.index,
            epoch=self.epoch,
            attempt=self.route.attempt,
            phase=self.phase,
            tokens=self.tokens,
            last_progress_at=self.last_progress_at,
        )

    @property
    def looked_during_run(self) -> bool:
        """Whether it is known what the runtime shows while this run goes on."""
        return self._look is not None and self._look.done()

    def stop(self, why: Stop) -> None:
        """End the work in hand, for this reason; the first reason stays, but for a claim that is no more.

        The work is told once: who is told again while it tidies up would leave that undone.
        """
        first = self.stop_reason is None
        if first or why is Stop.FENCED:
            self.stop_reason = why
        if first and self._work_task is not None:
            self._work_task.cancel()

    # --- the whole

    async def run(self) -> None:
        """Go through all steps. Returns when the slot is given back.

        Cancelling it is for an agent that is torn down: the claim stays, and whoever comes next ends it.
        """
        asked_at = asyncio.get_running_loop().time()
        body_task = asyncio.create_task(fetch_body(self.room, self.route.submission_seq))
        look_task = asyncio.create_task(self.room.residency(self.provider))
        read_task = asyncio.create_task(self.room.read_devices(self.provider, self.slot.device))
        helpers = (body_task, look_task, read_task)
        try:
            if not await self._claim():
                return
            try:
                body = await body_task
                look, readings = await look_task, await read_task
                if asyncio.get_running_loop().time() - asked_at > _EVIDENCE_AGE_MAX_S:
                    look, readings = await asyncio.gather(
                        self.room.residency(self.provider), self.room.read_devices(self.provider, self.slot.device)
                    )
                await self._hold(body, look, readings)
            except Superseded as error:
                _log.info("attempt_superseded", **self._context(), why=error.message)
            except NotRecorded as error:
                _log.error("attempt_not_recorded", **self._context(), why=error.message)
            except Exception as fault:  # noqa: BLE001
                await self._fail(fault)
            await self._release()
        finally:
            await _end_all(tuple(task for task in (self._note, self._look) if task is not None))
            await _end_all(helpers)

    async def _fail(self, fault: Exception) -> None:
        """A fault of our own ends this job, not the agent and every other job with it."""
        _log.error("attempt_fault", **self._context(), exc_info=fault)
        try:
            await self._end(endings.failed(self._so_far(), Reason.INTERNAL, f"{type(fault).__name__}: {fault}"[:2000]))
        except (Superseded, NotRecorded) as error:
            _log.warning("attempt_fault_not_recorded", **self._context(), why=error.message)

    def _context(self) -> dict[str, object]:
        return {
            "job": self.route.job,
            "device": self.slot.device.id,
            "epoch": self.epoch,
            "attempt": self.route.attempt,
        }

    async def _claim(self) -> bool:
        fact = Claimed(
            host=self.room.host,
            device=self.slot.device.id,
            slot=self.slot.index,
            job=self.route.job,
            attempt=self.route.attempt,
            route_seq=self.route.seq,
            boot_id=self.room.boot_id,
            instance_id=self.room.instance_id,
        )
        device_id = self.slot.device.id
        seq = await self.slot.subject.append_once(fact, job=self.route.job, may=lambda: self.room.may_claim(device_id))
        if seq is None:
            return False
        self.epoch = seq
        self.phase = "claimed"
        return True

    async def _release(self) -> None:
        self.released = True
        self.room.ledger = self.room.ledger.release(self.epoch)
        await self.room.outputs.end(self.route.job, self.route.attempt)
        if self.stop_reason is Stop.FENCED:
            # The claim has been ended already.
            return
        released = Released(host=self.room.host, device=self.slot.device.id, epoch=self.epoch, job=self.route.job)
        await self.slot.subject.append(released, job=self.route.job, epoch=self.epoch)

    async def _hold(self, body: Body | BodyMissing, look: RuntimeReading, readings: Sequence[DeviceReading]) -> None:
        """Everything between the claim and the release."""
        if self.stop_reason is not None:
            raise Superseded(f"stopped before admission: {self.stop_reason}")
        watch = asyncio.get_running_loop().call_later(self.room.watch_after_s, self._begin_watch)
        try:
            if isinstance(body, BodyMissing):
                await self._end(endings.failed(self._so_far(), Reason.BODY_MISSING, body.detail))
                return
            resident = self.provider.find(look, body.model)
            if not await self._admit(body, look, readings[0], resident):
                return
            self._work_task = asyncio.create_task(self._work(body, look, readings, resident))
            if self.stop_reason is not None:
                self._work_task.cancel()
            await self._end(await self._outcome(self._work_task))
        except CancelWanted as wanted:
            self.stop_reason = Stop.CANCEL
            await self._end(endings.cancelled(self._so_far(), wanted.wish))
        finally:
            watch.cancel()
            if self._watcher is not None:
                self._watcher.cancel()
                await asyncio.gather(self._watcher, return_exceptions=True)

    def _begin_watch(self) -> None:
        """Most jobs are over before this: a consumer of their own would cost more than they do."""
        self._watcher = asyncio.create_task(self._watch_job())

    async def _watch_job(self) -> None:
        """Follow the job's own subject: that is how a wish for its end is heard."""
        while True:
            follower = await self.room.follow_job(self.route.job, self._held.seq, self._on_job_event)
            try:
                await asyncio.shield(follower.broken)
            except LogUnavailable as error:
                _log.warning("job_not_watched", **self._context(), why=error.message)
                await asyncio.sleep(_WATCH_AGAIN_S)
            finally:
                await follower.stop()

    def _on_job_event(self, fact: Fact) -> None:
        if isinstance(fact, facts.CancelRequested):
            self._held.cancel = fact
            self.stop(Stop.CANCEL)

    # --- admission

    async def _admit(
        self, body: Body, look: RuntimeReading, reading: DeviceReading, resident: ResidentModel | None
    ) -> bool:
        """Decide on live readings, and take the right to execute. False: denied, and said so."""
        need = await self._need(body, look, resident)
        if self.stop_reason is Stop.FENCED:
            raise Superseded(_FENCED)
        decision = self._decide(need, look, reading, resident)
        evidence: dict[str, Any] = {
            "job": self.route.job,
            "host": self.room.host,
            "device": self.slot.device.id,
            "slot": self.slot.index,
            "epoch": self.epoch,
            "attempt": self.route.attempt,
            "route_seq": self.route.seq,
            "runtime": self.provider.config.name,
            "need_mb": decision.need_mb,
            "need_source": decision.need_source,
            "reserved_mb": decision.reserved_mb,
            "headroom_mb": decision.headroom_mb,
            "usable_mb": decision.usable_mb,
            "reading": reading,
            "residency": msgspec.structs.replace(look, models=None),
            "detail": decision.detail,
        }
        if isinstance(decision, Deny):
            await self._held.append(facts.Denied(**evidence, reason=decision.reason), epoch=self.epoch)
            return False
        if decision.reserve_mb:
            self.room.ledger = self.room.ledger.reserve(self.epoch, self.slot.device.id, decision.reserve_mb, now())
        admitted = facts.Admitted(**evidence, instance_id=self.room.instance_id, resident=resident is not None)
        await self._held.append(admitted, epoch=self.epoch)
        self.phase = "admitted"
        return True

    async def _need(self, body: Body, look: RuntimeReading, resident: ResidentModel | None) -> Need | None:
        """What the model takes: as declared, else as the runtime reports, else nobody knows."""
        if body.vram_mb is not None:
            return Need(vram_mb=body.vram_mb, source="declared")
        if resident is not None or not look.healthy or look.resident is None:
            return None
        size = await self.provider.model_bytes(body.model)
        return None if size is None else Need(vram_mb=-(-size // MB), source="reported")

    def _decide(
        self, need: Need | None, look: RuntimeReading, reading: DeviceReading, resident: ResidentModel | None
    ) -> Admit | Deny:
        """Waits for nothing, so that what is reserved here is reserved before another attempt decides."""
        device = self.slot.device
        ledger = self.room.ledger = self.room.ledger.seen_in(reading)
        reserved_mb = ledger.unseen_mb(reading)

        def deny(reason: Reason, detail: str) -> Deny:
            return Deny(
                reason=reason,
                detail=detail,
                need_mb=None if need is None else need.vram_mb,
                need_source="" if need is None else need.source,
                reserved_mb=reserved_mb,
                headroom_mb=device.headroom_mb,
                usable_mb=None,
            )

        if not look.healthy:
            return deny(Reason.RUNTIME_UNREACHABLE, f"{self.provider.config.name}: {look.error or 'not healthy'}")
        if look.resident is None:
            # Not knowing what it holds is not the same as its holding nothing.
            return deny(Reason.RESIDENCY_UNKNOWN, f"{self.provider.config.name}: {look.error or 'it did not say'}")
        return admit(
            device=device,
            reading=reading,
            reserved_mb=reserved_mb,
            need=need,
            resident=resident is not None,
            allow_unknown_need=self.provider.config.allow_unknown_need,
        )

    # --- the work

    async def _outcome(self, work: asyncio.Task[Fact]) -> Fact:
        """The fact that ends the attempt, however the work ended."""
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if not work.cancelled():
                # The whole agent is being torn down.
                work.cancel()
                raise
            return await self._stopped_end(proven=await self._prove_stopped())
        except CancelWanted as wanted:
            await self._prove_stopped()
            return endings.cancelled(self._so_far(), wanted.wish)
        except ClockExpired as expired:
            await self._prove_stopped()
            return endings.expired(self._so_far(), expired)
        except RuntimeFailure as failure:
            if self.stop_reason is None:
                return endings.failed(self._so_far(), failure.reason, failure.detail, status=failure.status)
            # It was told to stop, and this is how it took that.
            return await self._stopped_end(proven=await self._prove_stopped())
        except Exception:
            await self._prove_stopped()
            raise

    async def _work(
        self, body: Body, look: RuntimeReading, readings: Sequence[DeviceReading], resident: ResidentModel | None
    ) -> Fact:
        device = self.slot.device
        self._model = body.model
        before, after = readings, readings
        if resident is None:
            look, after = await self._load(body)
        verdict = judge(
            intended=device.kind,
            model=body.model,
            resident=self.provider.find(look, body.model),
            residency_known=look.resident is not None,
            reports_vram=self.provider.reports_vram,
            model_bytes=await self._model_bytes(look, body.model),
            before=before,
            after=after,
            was_resident=resident is not None,
            process_use_mb=await self.room.process_use_mb(self.provider, after),
            min_ratio=self.provider.config.min_vram_ratio,
        )
        if not verdict.passed:
            return await self._misplaced(body, verdict)
        placed = facts.PlacementVerified(**self._placement(body, verdict))
        await self._held.append(placed, epoch=self.epoch)
        self.phase = "placed"
        started = facts.Started(job=self.route.job, epoch=self.epoch, attempt=self.route.attempt)
        await self._held.append(started, epoch=self.epoch)
        self.phase = "running"
        self._during = None
        return await self._execute(body)

    async def _load(self, body: Body) -> tuple[RuntimeReading, Sequence[DeviceReading]]:
        """Bring the model in, within the load clock, and look again."""
        self.phase = "loading"
        self._during = NOT_LOADED
        clock = self.route.clocks.load
        loop = asyncio.get_running_loop()
        began, began_s = loop.time(), time.monotonic()
        try:
            async with asyncio.timeout(clock.limit_s):
                await self.provider.load(body.model, on_cpu=self._on_cpu, work=body.work)
                self._load_s = round(time.monotonic() - began_s, 4)
                look = await self.room.residency(self.provider)
        except TimeoutError:
            raise ClockExpired("load", clock, loop.time() - began) from None
        self.phase = "loaded"
        self.room.ledger = self.room.ledger.loaded(self.epoch, now())
        after = await self.room.read_devices(self.provider, self.slot.device)
        await self.room.runtime_subject(self.provider.config.name).append(
            ModelLoaded(
                host=self.room.host,
                runtime=self.provider.config.name,
                model=body.model,
                job=self.route.job,
                epoch=self.epoch,
                load_s=self._load_s,
            ),
            job=self.route.job,
        )
        return look, after

    async def _model_bytes(self, look: RuntimeReading, model: str) -> int | None:
        row = self.provider.find(look, model)
        if row is not None and row.size_bytes is not None:
            return row.size_bytes
        return await self.provider.model_bytes(model)

    async def _misplaced(self, body: Body, verdict: Verdict) -> Fact:
        """One attempt, no reload loop: the job fails, and no more work goes there until the runtime passes again."""
        assert verdict.reason is not None
        await self._held.append(
            facts.PlacementFailed(**self._placement(body, verdict), reason=verdict.reason), epoch=self.epoch
        )
        name = self.provider.config.name
        suspect = Suspect(
            host=self.room.host,
            runtime=name,
            model=body.model,
            job=self.route.job,
            reason=verdict.reason,
            detail=verdict.detail,
            device=self.slot.device.id,
        )
        self.room.suspects[name] = Suspicion(body.model, self.slot.device.id, why_suspect(suspect))
        await self.room.runtime_subject(name).append(suspect, job=self.route.job)
        return endings.failed(self._so_far(), verdict.reason, verdict.detail)

    async def _execute(self, body: Body) -> Fact:
        """Send the work and pass on what comes, under the first-byte, idle and run clocks."""
        clocks = self.route.clocks
        loop = asyncio.get_running_loop()
        self._run_began_s = time.monotonic()
        began, run_until = loop.time(), loop.time() + clocks.run.limit_s
        last, progress_at = began, began
        name: facts.ClockName = "first_byte"
        self.room.outputs.begin(self.route.job, self.route.attempt)
        result: JobResult | None = None
        look: asyncio.TimerHandle | None = None
        limit = asyncio.timeout_at(min(run_until, began + clocks.first_byte.limit_s))
        try:
            async with limit, aclosing(self._stream(body)) as stream:
                async for item in stream:
                    last = loop.time()
                    name = "idle"
                    limit.reschedule(min(run_until, last + clocks.idle.limit_s))
                    if self._first_byte_s is None:
                        # Not by the loop's clock, which may be as coarse as a millisecond.
                        self._first_byte_s = round(time.monotonic() - self._run_began_s, 4)
                        look = loop.call_later(self.room.watch_after_s, self._look_during_run)
                    if isinstance(item, Done):
                        result = item.result
                        break
                    self.tokens += 1
                    self.last_progress_at = now_rfc3339()
                    if item.text:
                        await self.room.outputs.push(self.route.job, item.text)
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

    def _stream(self, body: Body) -> AsyncGenerator[Token | Done]:
        return self.provider.run(
            body.model,
            body.task,
            body.work,
            on_cpu=self._on_cpu,
            keep_alive_s=self.provider.config.keep_alive_s,
        )

    @property
    def _on_cpu(self) -> bool:
        return self.slot.device.kind == "cpu"

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
        note = facts.Progress(job=self.route.job, epoch=self.epoch, tokens=self.tokens, elapsed_s=round(elapsed_s, 3))
        await self._held.append(note, epoch=self.epoch)

    def _look_during_run(self) -> None:
        """Remember what the runtime shows while it answers: what it shows after a stop is compared with that.

        Only of runs that last: most are over before, and a look at each would cost more than it gains.
        """
        self._look = asyncio.create_task(self.provider.signs(self._model))

    async def _prove_stopped(self) -> bool:
        """Keep the slot until the runtime is proven to have stopped, or for as long as that may take.

        Returns whether it is proven.
        """
        if self.phase not in ("loading", "running"):
            return True
        during = self._during
        if self._look is not None:
            # A look that is still under way may have seen what came after the stop.
            during = self._look.result() if self.looked_during_run else None
            self._look.cancel()
        self.phase = "stopping"
        proof = StopProof(during)
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self.room.stop_proof_limit_s
        while loop.time() < give_up_at:
            if proof.shown_by(await self.provider.signs(self._model)):
                return True
            await asyncio.sleep(_STOP_PROOF_EVERY_S)
        return False

    def _placement(self, body: Body, verdict: Verdict) -> dict[str, Any]:
        return {
            "job": self.route.job,
            "epoch": self.epoch,
            "runtime": self.provider.config.name,
            "model": body.model,
            "intended": self.slot.device.kind,
            "size_bytes": verdict.size_bytes,
            "vram_bytes": verdict.vram_bytes,
            "ratio": verdict.ratio,
            "device_before_mb": verdict.device_before_mb,
            "device_after_mb": verdict.device_after_mb,
            "sources": _sources(verdict),
            "load_s": self._load_s,
            "detail": verdict.detail,
        }

    # --- the end

    async def _end(self, fact: Fact) -> None:
        """Append the end; where the claim is no more or the job moved on without us, say what became of the attempt."""
        fenced = self.stop_reason is Stop.FENCED
        try:
            if not fenced:
                await self._append_end(fact)
                return
        except Superseded as error:
            why = error
        else:
            why = Superseded(_FENCED)
        late = late_result(fact)
        if late is not None:
            await self._held.append_late(late, epoch=self.epoch)
        raise why

    async def _append_end(self, fact: Fact) -> None:
        """Append the end, or, where it is the agent's own wish and somebody was promised the job's end, that one."""
        if not endings.is_own_wish(fact):
            await self._held.append(fact, epoch=self.epoch, heed_cancel=False)
            return
        wish = self._held.cancel
        if wish is None:
            try:
                await self._held.append(fact, epoch=self.epoch)
            except CancelWanted as wanted:
                wish = wanted.wish
            else:
                return
        await self._held.append(endings.cancelled(self._so_far(), wish), epoch=self.epoch, heed_cancel=False)

    def _so_far(self) -> SoFar:
        """What the attempt has come to, for the fact that ends it."""
        run_s = None if self._run_began_s is None else round(time.monotonic() - self._run_began_s, 4)
        return SoFar(
            job=self.route.job,
            epoch=self.epoch,
            attempt=self.route.attempt,
            timings=facts.Timings(load_s=self._load_s, first_byte_s=self._first_byte_s, run_s=run_s),
            partial=self.room.outputs.text(self.route.job, self.route.attempt)[-_PARTIAL_CHARS_MAX:] or None,
        )

    async def _succeeded(self, result: JobResult) -> Fact:
        body = msgspec.json.encode(result)
        ref = None
        if len(body) > INLINE_BYTES_MAX:
            ref = await patiently(lambda: put_body(self.room.payloads, body))
        return endings.succeeded(self._so_far(), None if ref else result, ref)

    async def _stopped_end(self, *, proven: bool) -> Fact:
        """The end of an attempt that was stopped from outside; ``proven`` says whether the runtime surely stopped."""
        so_far = self._so_far()
        if self.stop_reason is Stop.CANCEL and self._held.cancel is not None:
            return endings.cancelled(so_far, self._held.cancel)
        if self.stop_reason is Stop.FENCED:
            if self._run_began_s is not None:
                # The runtime had the job: whoever reads that it is lost wants to know what became of it.
                await self._held.append_late(endings.fenced(so_far), epoch=self.epoch)
            raise Superseded(_FENCED)
        if self._run_began_s is None:
            return endings.handed_back(so_far)
        if proven:
            return endings.preempted(so_far)
        return endings.not_stopped(so_far, self.room.stop_proof_limit_s)
