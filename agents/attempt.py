"""One attempt at one job: claim, admit, load, verify, start, run, end, release; each step an event.

What each step rests on:

1. *claim* (the device's subject): the slot is ours; its sequence is the epoch. Losing it ends the attempt.
2. *admit* (the job's subject, at the sequence the route names): the sole right to execute. Losing it releases the slot.
3. *prepare* (``preparing.py``): room on the device, the model in it. Nothing of the job's own work is sent before the
   model is proven to sit where it should.
4. *started*: from here on a crash leaves the outcome unknown, so it is stored before the first byte is sent. Then the
   run (``running.py``).
5. the end (the job's subject), then *released* (the device's).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any

import msgspec
import structlog

from gpukeeper.agents import endings
from gpukeeper.agents.body import Body, BodyMissing, fetch_body
from gpukeeper.agents.endings import ClockExpired, late_result
from gpukeeper.agents.fetching import fetch_missing, may_fetch, worth_fetching
from gpukeeper.agents.hold import Hold
from gpukeeper.agents.preparing import Evidence, Preparation, suspect
from gpukeeper.agents.room import HostRoom, Slot
from gpukeeper.agents.running import Run
from gpukeeper.agents.runtimes.port import Provider, RuntimeFailure
from gpukeeper.agents.stopping import NOT_LOADED
from gpukeeper.agents.writer import CancelWanted, NotRecorded, Superseded
from gpukeeper.capacity.admission import Deny
from gpukeeper.capacity.admission import HostRoom as HostLeft
from gpukeeper.capacity.decision import Decision, Question, decide
from gpukeeper.capacity.need import Need, which_need
from gpukeeper.capacity.owners import why_stays
from gpukeeper.capacity.residency import Stay, stay_of
from gpukeeper.events import job as facts
from gpukeeper.events.device import Claimed, Released
from gpukeeper.events.errors import LogUnavailable
from gpukeeper.events.fact import Fact
from gpukeeper.events.readings import ClaimBeat, DeviceReading, RuntimeReading
from gpukeeper.events.reasons import Reason
from gpukeeper.events.runtime import ModelUnloaded, Pinned
from gpukeeper.projections.host import Suspicion, is_pinned
from gpukeeper.projections.hostview import PendingRoute

_log = structlog.get_logger("gpukeeper.attempt")

MB = 1_048_576
_FENCED = "the claim was ended by somebody else; the scheduler gives the job its end"
#: A watch that broke begins again after this long.
_WATCH_AGAIN_S = 1.0
#: What was seen longer ago is looked at again before an admission rests on it.
_EVIDENCE_AGE_MAX_S = 5.0
#: What was loaded is remembered for so long after its claim: no decision rests on readings that are older.
_LEDGER_KEPT_S = 60.0


class Stop(StrEnum):
    """Why a run is ended from outside."""

    CANCEL = "cancel"
    PREEMPT = "preempt"
    FENCED = "fenced"
    DEVICE_LOST = "device_lost"
    #: Somebody else ended the job before it was admitted.
    ENDED = "ended"


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
        more: Sequence[Slot] = (),
    ) -> None:
        self.room = room
        self.route = route
        self.slot = slot
        self.provider = provider
        self.stop_reason: Stop | None = None
        self._stop_detail = ""
        #: The claim is being given back.
        self.released = False
        self._hold = Hold(room, route, slot, provider, more)
        self._held = self._hold.job
        self._preparation = Preparation(self._hold, wanted=lambda: self.stop_reason is None)
        self._run = Run(self._hold)
        #: When the run began, by the loop's clock; None before it.
        self._run_at: float | None = None
        self._work_task: asyncio.Task[Any] | None = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def epoch(self) -> int:
        """Sequence of the claim; 0 before it is one."""
        return self._hold.epoch

    @property
    def phase(self) -> str:
        return self._hold.phase

    @property
    def tokens(self) -> int:
        return self._hold.tokens

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All slots that were taken for it, on one device each."""
        return (self.slot, *self._hold.more)

    @property
    def claims(self) -> tuple[tuple[str, int], ...]:
        """Its claims, as (device, epoch)."""
        return tuple((slot.device.id, epoch) for slot, epoch in self._hold.claims)

    def beats(self) -> list[ClaimBeat]:
        """What heartbeats say about its claims; nothing before it has one."""
        return self._hold.beats()

    @property
    def looked_during_run(self) -> bool:
        """Whether it is known what the runtime shows while this run goes on."""
        return self._run.looked

    def stop(self, why: Stop, detail: str = "") -> None:
        """End the work in hand, for this reason; the first reason stays, but for a claim that is no more.

        The work is told once: who is told again while it tidies up would leave that undone.
        """
        first = self.stop_reason is None
        if first or why is Stop.FENCED:
            self.stop_reason = why
            self._stop_detail = detail
        if first and self._work_task is not None:
            self._work_task.cancel()

    # --- the whole

    async def run(self) -> None:
        """Go through all steps. Returns when the slot is given back.

        Cancelling it is for an agent that is torn down: the claim stays, and whoever comes next ends it.
        """
        asked_at = self.room.now()
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
                await self._while_held(body, look, readings, asked_at)
            except Superseded as error:
                _log.info("attempt_superseded", **self._hold.context(), why=error.message)
            except NotRecorded as error:
                _log.error("attempt_not_recorded", **self._hold.context(), why=error.message)
            except Exception as fault:  # noqa: BLE001
                await self._fail(fault)
            await self._release()
        finally:
            await _end_all(self._run.tasks())
            await _end_all(helpers)

    async def _fail(self, fault: Exception) -> None:
        """A fault of our own ends this job, not the agent and every other job with it."""
        _log.error("attempt_fault", **self._hold.context(), exc_info=fault)
        try:
            await self._end(
                endings.failed(self._hold.so_far(), Reason.INTERNAL, f"{type(fault).__name__}: {fault}"[:2000])
            )
        except (Superseded, NotRecorded) as error:
            _log.warning("attempt_fault_not_recorded", **self._hold.context(), why=error.message)

    async def _claim(self) -> bool:
        """Take every slot, the first one first; or none: those that were taken are given back."""
        seq = await self._claim_slot(self.slot)
        if seq is None:
            return False
        self._hold.epoch = seq
        self._hold.phase = "claimed"
        self.room.tenancy.enter(self.provider.config.name, seq)
        for slot in self._hold.more:
            try:
                more_seq = await self._claim_slot(slot)
            except NotRecorded:
                await self._release()
                raise
            if more_seq is None:
                await self._release()
                return False
            self._hold.more_epochs[slot.device.id] = more_seq
        return True

    async def _claim_slot(self, slot: Slot) -> int | None:
        fact = Claimed(
            host=self.room.host,
            device=slot.device.id,
            slot=slot.index,
            job=self.route.job,
            attempt=self.route.attempt,
            route_seq=self.route.seq,
            boot_id=self.room.boot_id,
            instance_id=self.room.instance_id,
        )
        device_id = slot.device.id
        return await slot.subject.append_once(fact, job=self.route.job, may=lambda: self.room.may_claim(device_id))

    async def _release(self) -> None:
        self.released = True
        self.room.tenancy.leave(self.provider.config.name, self.epoch)
        self.room.uses.end(self.epoch)
        self.room.host_needs.pop(self.epoch, None)
        for _, epoch in self._hold.claims:
            self.room.ledger = self.room.ledger.release(epoch)
        await self.room.outputs.end(self.route.job, self.route.attempt)
        for slot, epoch in self._hold.claims:
            if self.stop_reason is Stop.FENCED and not self._stands(slot, epoch):
                # The claim has been ended already.
                continue
            released = Released(host=self.room.host, device=slot.device.id, epoch=epoch, job=self.route.job)
            await slot.subject.append(released, job=self.route.job, epoch=epoch)

    def _stands(self, slot: Slot, epoch: int) -> bool:
        """Whether a claim still stands, as far as is folded here; of several, somebody may have ended one alone. After
        a takeover they are the next agent's to end."""
        return self.room.speaks_for_host() and epoch in self.room.view.claims.get(slot.device.id, {})

    async def _while_held(
        self, body: Body | BodyMissing, look: RuntimeReading, readings: Sequence[DeviceReading], asked_at: datetime
    ) -> None:
        """Everything between the claim and the release."""
        if self.stop_reason is not None:
            raise Superseded(f"stopped before admission: {self.stop_reason}")
        watch = asyncio.get_running_loop().call_later(self.room.watch_after_s, self._begin_watch)
        try:
            if isinstance(body, BodyMissing):
                await self._end(endings.failed(self._hold.so_far(), Reason.BODY_MISSING, body.detail))
                return
            evidence = await self._fetched(body, await self._evidence(body, look, readings, asked_at))
            if evidence is None or not await self._admit(body, evidence):
                return
            work = self._work_task = asyncio.create_task(self._work(body, evidence))
            if self.stop_reason is not None:
                self._work_task.cancel()
            end = await self._outcome(work)
            await self._end(end)
            await self._recheck(body)
            if isinstance(end, facts.Succeeded):
                await self._settle_model(body)
        except CancelWanted as wanted:
            self.stop_reason = Stop.CANCEL
            await self._end(endings.cancelled(self._hold.so_far(), wanted.wish))
        except asyncio.CancelledError:
            # The whole agent is being torn down.
            await self._preparation.over(break_off=True)
            raise
        finally:
            watch.cancel()
            if self._watcher is not None:
                self._watcher.cancel()
                await asyncio.gather(self._watcher, return_exceptions=True)
            await self._preparation.over(break_off=self._breaks_off)

    @property
    def _breaks_off(self) -> bool:
        """Whether a load is ended with the job: a cancelled one's goes on, as others may want the model."""
        return self.stop_reason in (Stop.PREEMPT, Stop.FENCED, Stop.DEVICE_LOST)

    async def _evidence(
        self, body: Body, look: RuntimeReading, readings: Sequence[DeviceReading], asked_at: datetime
    ) -> Evidence:
        """What the admission rests on: looked at again where it is old, or something was being released there."""
        tenancy, name = self.room.tenancy, self.provider.config.name
        fresh = 0 <= (self.room.now() - asked_at).total_seconds() <= _EVIDENCE_AGE_MAX_S
        if fresh and not tenancy.released_since(name, asked_at):
            evidence = self._preparation.evidence(body, look, readings)
            if evidence.disputed is None:
                return evidence
        await tenancy.until_settled(name)
        return await self._preparation.look(body)

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
                _log.warning("job_not_watched", **self._hold.context(), why=error.message)
                await asyncio.sleep(_WATCH_AGAIN_S)
            finally:
                await follower.stop()

    def _on_job_event(self, fact: Fact) -> None:
        if isinstance(fact, facts.CancelRequested):
            self._held.cancel = fact
            self.stop(Stop.CANCEL)
        elif isinstance(fact, facts.ENDS) and self._hold.phase == "provisioning":
            self.stop(Stop.ENDED)

    # --- admission

    async def _fetched(self, body: Body, evidence: Evidence) -> Evidence | None:
        """What the admission rests on once the runtime has the model; None where the job has ended instead.

        Raises:
            Superseded: the attempt was stopped, or the job ended, while the model was fetched.
            CancelWanted: a wish for the job's end was heard meanwhile.
        """
        if not may_fetch(self._hold, evidence):
            return evidence
        _, decisions = await self._decisions(body, evidence)
        if not worth_fetching(_hardest(decisions)):
            return evidence
        self._hold.phase = "provisioning"
        fetch = self._work_task = asyncio.create_task(fetch_missing(self._hold, body))
        try:
            fetched = await asyncio.shield(fetch)
        except asyncio.CancelledError:
            if not fetch.cancelled():
                # The whole agent is being torn down.
                fetch.cancel()
                raise
            if self.stop_reason is Stop.CANCEL and self._held.cancel is not None:
                raise CancelWanted(self._held.cancel) from None
            raise Superseded(f"stopped while its model was fetched: {self.stop_reason}") from None
        except ClockExpired as expired:
            await self._end(endings.expired(self._hold.so_far(), expired))
            return None
        except RuntimeFailure as failure:
            await self._end(endings.failed(self._hold.so_far(), failure.reason, failure.detail, status=failure.status))
            return None
        finally:
            self._work_task = None
        if self.stop_reason is not None:
            raise Superseded(f"stopped before admission: {self.stop_reason}")
        self._hold.phase = "claimed"
        return await self._preparation.look(body) if fetched else evidence

    async def _decisions(self, body: Body, evidence: Evidence) -> tuple[Need | None, list[Decision]]:
        """What the model takes, and whether it may use each of the job's devices."""
        need = await self._need(body, evidence)
        left = await self.room.host_left(self.provider.config) if need is not None and need.asks_host else None
        decisions = [self._decide(slot, need, evidence, left) for slot, _ in self._hold.claims]
        hardest = _hardest(decisions)
        if hardest.plan is not None and not hardest.releases:
            # Who holds the memory was seen at the last heartbeat: a refusal rests on what they hold and do now.
            await self.room.observer.look_at_all(await self.room.inventory.read_all())
            decisions = [self._decide(slot, need, evidence, left) for slot, _ in self._hold.claims]
        return need, decisions

    async def _admit(self, body: Body, evidence: Evidence) -> bool:
        """Decide on live readings, and take the right to execute. False: denied, and said so."""
        look, resident = evidence.look, evidence.row is not None
        need, decisions = await self._decisions(body, evidence)
        if self.stop_reason is Stop.FENCED:
            raise Superseded(_FENCED)
        decision = _hardest(decisions)
        # Of several devices, the one whose figures these are: a denial is about that one.
        slot = self.slots[next(at for at, one in enumerate(decisions) if one is decision)]
        denied_there = isinstance(decision.admission, Deny) and not decision.releases
        admission = decision.admission
        stays = () if decision.plan is None else decision.plan.considered
        told: dict[str, Any] = {
            "job": self.route.job,
            "host": self.room.host,
            "epoch": self.epoch,
            "attempt": self.route.attempt,
            "route_seq": self.route.seq,
            "runtime": self.provider.config.name,
            "need_mb": admission.need_mb,
            "need_source": admission.need_source,
            "reserved_mb": admission.reserved_mb,
            "headroom_mb": admission.headroom_mb,
            "usable_mb": admission.usable_mb,
            "reading": next(one for one in evidence.readings if one.device == slot.device.id),
            "residency": msgspec.structs.replace(look, models=None),
            "considered": stays,
        }
        if denied_there and isinstance(admission, Deny):
            detail = "; ".join((admission.detail.rstrip("."), *why_stays(stays)))
            denied = facts.Denied(
                **told, device=slot.device.id, slot=slot.index, detail=detail, reason=admission.reason
            )
            await self._held.append(denied, epoch=self.epoch)
            return False
        if isinstance(admission, Deny):
            names = ", ".join(owner.label for owner in decision.releases)
            detail = f"{admission.detail.rstrip('.')}; after a release of {names}"
        else:
            detail = admission.detail
        if resident:
            self._preparation.in_use(body)
        for (slot, epoch), one in zip(self._hold.claims, decisions, strict=True):
            found = one.admission
            reserve_mb = (found.need_mb or 0) if isinstance(found, Deny) else found.reserve_mb
            if reserve_mb:
                self.room.ledger = self.room.ledger.reserve(epoch, slot.device.id, reserve_mb, self.room.now())
        if need is not None and need.asks_host and not resident:
            self.room.host_needs[self.epoch] = need
        self._hold.need = need
        admitted = facts.Admitted(
            **told,
            device=self.slot.device.id,
            slot=self.slot.index,
            detail=detail,
            instance_id=self.room.instance_id,
            resident=resident,
            more_devices=self.route.more_devices,
        )
        await self._held.append(admitted, epoch=self.epoch)
        self._hold.phase = "admitted"
        return True

    async def _need(self, body: Body, evidence: Evidence) -> Need | None:
        """What the model takes: as declared, else as learned, else as the runtime reports, else nobody knows."""
        learned_mb, reported_mb = None, None
        look = evidence.look
        if body.need.vram_mb is None and evidence.row is None and look.healthy and look.resident is not None:
            name = self.provider.config.name
            options = self.provider.load_options(body.work)
            learned_mb = self.room.view.learned.peak_mb(self.room.host, name, body.model, options)
            if learned_mb is None:
                size = await self.provider.model_bytes(body.model)
                reported_mb = None if size is None else -(-size // MB)
        return which_need(
            declared_mb=body.need.vram_mb,
            learned_mb=learned_mb,
            reported_mb=reported_mb,
            ram_mb=body.need.ram_mb,
            disk_mb=body.need.disk_mb,
        )

    def _decide(self, slot: Slot, need: Need | None, evidence: Evidence, left: HostLeft | None) -> Decision:
        """Waits for nothing, so that what is reserved here is reserved before another attempt decides."""
        device, look = slot.device, evidence.look
        reading = next(one for one in evidence.readings if one.device == device.id)
        ledger = self.room.ledger = self.room.ledger.seen_in(reading, older_by_s=_LEDGER_KEPT_S)
        reserved_mb = ledger.unseen_mb(reading)

        def deny(reason: Reason, detail: str) -> Decision:
            return Decision(
                admission=Deny(
                    reason=reason,
                    detail=detail,
                    need_mb=None if need is None else need.vram_mb,
                    need_source="" if need is None else need.source,
                    reserved_mb=reserved_mb,
                    headroom_mb=device.headroom_mb,
                    usable_mb=None,
                )
            )

        if not look.healthy:
            return deny(Reason.RUNTIME_UNREACHABLE, f"{self.provider.config.name}: {look.error or 'not healthy'}")
        if look.resident is None:
            # Not knowing what it holds is not the same as its holding nothing.
            return deny(Reason.RESIDENCY_UNKNOWN, f"{self.provider.config.name}: {look.error or 'it did not say'}")
        if evidence.disputed is not None:
            return deny(Reason.RESIDENCY_UNKNOWN, evidence.disputed)
        if evidence.kept is not None:
            return deny(Reason.OWNER_BUSY, evidence.kept)
        block = self.room.still_blocked(reading)
        return decide(
            Question(
                device=device,
                reading=reading,
                reserved_mb=reserved_mb,
                need=need,
                resident=evidence.row is not None,
                allow_unknown_need=self.provider.config.allow_unknown_need,
                room=None if left is None else self.room.unpromised(left),
                drained=self.room.view.drained.get(device.id),
                blocked=None if block is None else block.why,
                owners=self.room.owners_on(device.id, but=self.epoch),
            )
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
            return endings.cancelled(self._hold.so_far(), wanted.wish)
        except ClockExpired as expired:
            suspicion: Suspicion | None = None
            if expired.name in ("first_byte", "idle"):
                detail = f"no progress within its {expired.name} clock of {expired.clock.limit_s:g} s"
                suspicion = await suspect(self._hold, self._hold.model, Reason.DEADLINE, detail)
            if await self._prove_stopped() and suspicion is not None:
                self.room.work_left[self.provider.config.name] = suspicion
            return endings.expired(self._hold.so_far(), expired)
        except RuntimeFailure as failure:
            if self.stop_reason is None:
                return await self._failed_by_runtime(failure)
            # It was told to stop, and this is how it took that.
            return await self._stopped_end(proven=await self._prove_stopped())
        except Exception:
            await self._prove_stopped()
            raise

    async def _failed_by_runtime(self, failure: RuntimeFailure) -> Fact:
        """A runtime whose GPU fell off the bus fails in words of its own, if in any: the driver is asked as well."""
        device, so_far = self.slot.device, self._hold.so_far()
        reading = await self.room.inventory.read(device.id)
        if reading.state != "lost":
            return endings.failed(so_far, failure.reason, failure.detail, status=failure.status)
        why = f"{device.id} ({device.name}) is lost: {reading.error or 'no further word'}"
        detail = f"{why}; {self.provider.config.name}: {failure.detail}"
        return endings.failed(so_far, Reason.DEVICE_LOST, detail, status=failure.status)

    async def _work(self, body: Body, evidence: Evidence) -> Fact:
        hold = self._hold
        hold.model = body.model
        if evidence.row is None:
            self._run.during = NOT_LOADED
        end = await self._preparation.prepare(body, evidence)
        if end is not None:
            return end
        self.room.tenancy.use(self.provider.config.name, self.epoch)
        await hold.append(facts.Started(job=self.route.job, epoch=self.epoch, attempt=self.route.attempt))
        hold.phase = "running"
        self._run.during = None
        self._preparation.in_use(body, asked=True)
        stay = self._stay(body)
        if stay.policy == "pin":
            self.room.tenancy.kept(self.provider.config.name, body.model)
        self._run_at = asyncio.get_running_loop().time()
        return await self._run.execute(body, stay)

    def _stay(self, body: Body) -> Stay:
        config = self.provider.config
        pins = self.room.view.pins.get(config.name, ())
        return stay_of(
            job=body.residency,
            runtime=config.residency,
            keep_alive_s=config.keep_alive_s,
            pinned=is_pinned(pins, body.model),
        )

    async def _recheck(self, body: Body) -> None:
        """After a long run: whether the model still sits where it was proven to sit. Changes nothing about the job."""
        if self._run_at is None or self.stop_reason is not None:
            return
        ran_s = asyncio.get_running_loop().time() - self._run_at
        if ran_s >= self.room.recheck_after_s:
            await self._preparation.recheck(body, ran_s)

    async def _settle_model(self, body: Body) -> None:
        """What the residency policy asks for now that the job has ended. What fails is told, and changes no end."""
        stay, tenancy, name = self._stay(body), self.room.tenancy, self.provider.config.name
        if stay.policy == "pin" and stay.source != "pin":
            why = "the job asks for it" if stay.source == "job" else "its runtime is configured so"
            pinned = Pinned(
                host=self.room.host,
                runtime=name,
                model=body.model,
                actor=self.route.job,
                reason=why,
                job=self.route.job,
            )
            await self.room.runtime_subject(name).append(pinned, job=self.route.job)
        if not stay.unloads or self.provider.releases == "none" or tenancy.jobs(name, but=self.epoch):
            return
        try:
            async with asyncio.timeout(self.provider.config.release_timeout_s):
                turn = await self.room.turns.take(self.room.devices_of(self.provider, self.slot.device))
                try:
                    if not await self._unload(body):
                        return
                finally:
                    turn.leave()
        except (RuntimeFailure, TimeoutError) as failure:
            _log.warning("not_unloaded", **self._hold.context(), runtime=name, why=str(failure) or "no end in time")
            return
        unloaded = ModelUnloaded(host=self.room.host, runtime=name, model=body.model, why="policy", job=self.route.job)
        await self.room.runtime_subject(name).append(unloaded, job=self.route.job)

    async def _unload(self, body: Body) -> bool:
        """In a turn: let go of the job's model, where nobody else has come for it or keeps it. Whether it is gone."""
        room, tenancy, name = self.room, self.room.tenancy, self.provider.config.name
        whole = self.provider.releases == "all"
        before = await room.inventory.read(self.slot.device.id)
        if self._stays(body) or tenancy.is_releasing(name):
            return False
        gone = False
        tenancy.begin_release(name, None if whole else body.model)
        try:
            look = await room.residency(self.provider)
            row = self.provider.find(look, body.model)
            if look.resident is None:
                why = look.error or "residency unknown"
                _log.warning("not_unloaded", **self._hold.context(), runtime=name, why=why)
                return False
            if row is None:
                # The runtime unloaded it by itself, as the run had told it to.
                gone = True
                return True
            if tenancy.keeps(name, row) or self._stays(body):
                return False
            if whole and (len(look.resident) > 1 or room.view.pins.get(name)):
                # It would let go of what is not this job's as well.
                return False
            await self.provider.release(None if whole else body.model)
            gone = True
            await room.handoff.until_shown(self.slot.device.id, before, (row.vram_bytes or 0) // MB)
        finally:
            if not gone:
                tenancy.stays(name, body.model)
            tenancy.end_release(name)
        return True

    def _stays(self, body: Body) -> bool:
        """Whether another job has come to the runtime meanwhile, or somebody wants the model to stay."""
        return self.room.tenancy.jobs(self.provider.config.name, but=self.epoch) > 0 or not self._stay(body).unloads

    async def _prove_stopped(self) -> bool:
        """Whether the runtime is proven to have stopped working for this job; keeps the slot while that is looked for.

        A load of a cancelled job goes on and is no work for it: the slot is kept until that has ended.
        """
        if self.stop_reason is Stop.CANCEL and self._hold.phase == "loading":
            return True
        if self.stop_reason is Stop.DEVICE_LOST:
            return False
        if self._breaks_off:
            await self._preparation.over(break_off=True)
        return await self._run.prove_stopped()

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
        await self._held.append(endings.cancelled(self._hold.so_far(), wish), epoch=self.epoch, heed_cancel=False)

    async def _stopped_end(self, *, proven: bool) -> Fact:
        """The end of an attempt that was stopped from outside; ``proven`` says whether the runtime surely stopped."""
        so_far = self._hold.so_far()
        if self.stop_reason is Stop.CANCEL and self._held.cancel is not None:
            return endings.cancelled(so_far, self._held.cancel)
        if self.stop_reason is Stop.FENCED:
            if self._hold.run_began_s is not None:
                # The runtime had the job: whoever reads that it is lost wants to know what became of it.
                await self._held.append_late(endings.fenced(so_far), epoch=self.epoch)
            raise Superseded(_FENCED)
        if self.stop_reason is Stop.DEVICE_LOST:
            return endings.failed(so_far, Reason.DEVICE_LOST, self._stop_detail)
        if self._hold.run_began_s is None:
            return endings.handed_back(so_far)
        if proven:
            return endings.preempted(so_far)
        return endings.not_stopped(so_far, self.room.stop_proof_limit_s)


def _hardest(decisions: Sequence[Decision]) -> Decision:
    """What stands in the way on any of a job's devices stands in the way of the job: a refusal, then a release."""
    refused = (one for one in decisions if isinstance(one.admission, Deny) and not one.releases)
    releases = (one for one in decisions if one.releases)
    return next(refused, None) or next(releases, decisions[0])
