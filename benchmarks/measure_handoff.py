"""How long the agent takes from a device that is proven free to the next job's request, beside the runtime's own time.

The agent's own attempt, handoff and load run against a runtime and a card in memory and a log whose appends take what a
server's take. Two spans are added up for each job: from the return of the first reading that shows enough free memory
to the request to load, and from the end of the load to the request to run. The runtime's load lies between them and
does not count; neither does waiting for the device to show what was let go, which is not the agent's to shorten.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from typing import Any

from figures import Figure, at_most

from gpukeeper.agents.attempt import Attempt
from gpukeeper.agents.config import AgentConfig, RuntimeConfig
from gpukeeper.agents.devices.inventory import Inventory
from gpukeeper.agents.outputs import Outputs
from gpukeeper.agents.room import HostRoom
from gpukeeper.agents.runtimes.port import Done, PullProgress, RuntimeFailure, Signs, Token
from gpukeeper.capacity.device import Device
from gpukeeper.events import subjects
from gpukeeper.events.clock import new_id, now, now_ns, now_rfc3339
from gpukeeper.events.codec import encode
from gpukeeper.events.fact import Fact
from gpukeeper.events.instants import utc_text
from gpukeeper.events.job import Accepted, Clock, Clocks
from gpukeeper.events.log import Appended, Outcome, Record
from gpukeeper.events.memory import MemoryLog
from gpukeeper.events.modelnames import find_resident
from gpukeeper.events.objects import MemoryObjects
from gpukeeper.events.readings import DeviceReading, ResidentModel, RuntimeReading
from gpukeeper.events.reasons import Reason
from gpukeeper.events.recorder import Recorder, Stamp
from gpukeeper.events.route import Routed
from gpukeeper.events.work import JobResult, Task, Work
from gpukeeper.projections.hostview import HostView, PendingRoute

_HOST = "bench"
_MB = 1024 * 1024
_TOTAL_MB = 24_000
_MODEL_MB = 16_000
_GOAL_MS = 50.0
#: A JetStream append with its acknowledgement, on loopback with every write on disk, takes less than this.
_APPEND_S = 0.002
#: NVML in its thread, and an HTTP request to a runtime on loopback.
_READ_S = 0.002
_LOOK_S = 0.003
#: From the accepted release until the card shows it, and the load.
_SETTLE_S = 0.03
_LOAD_S = 0.02
_DEVICE = Device(id="g0", kind="gpu", name="bench")


class _Log(MemoryLog):
    """With the time that an append takes."""

    async def append(self, record: Record) -> Outcome:
        await asyncio.sleep(_APPEND_S)
        return await super().append(record)


class _Moments:
    """What is measured of one job."""

    def __init__(self) -> None:
        self.proven_s: float | None = None
        self.load_asked_s = 0.0
        self.loaded_s = 0.0
        self.run_asked_s = 0.0

    @property
    def added_ms(self) -> float:
        assert self.proven_s is not None, "a card that was full has shown room before the load"
        return 1000 * (self.load_asked_s - self.proven_s + self.run_asked_s - self.loaded_s)


class _Card(Inventory):
    """One card, full of what idle runtimes hold."""

    def __init__(self) -> None:
        super().__init__(AgentConfig(host=_HOST, find_devices=False), now=now)
        self.used_mb = 0
        self.moments = _Moments()

    @property
    def devices(self) -> tuple[Device, ...]:
        return (_DEVICE,)

    async def find(self) -> tuple[Device, ...]:
        return self.devices

    async def read(self, device_id: str) -> DeviceReading:
        free_mb, read_at = _TOTAL_MB - self.used_mb, utc_text(now())
        await asyncio.sleep(_READ_S)
        if free_mb >= _MODEL_MB and self.moments.proven_s is None:
            self.moments.proven_s = time.perf_counter()
        return DeviceReading(
            device=device_id,
            source="nvml",
            read_at=read_at,
            total_mb=_TOTAL_MB,
            used_mb=self.used_mb,
            free_mb=free_mb,
            processes=(),
        )

    async def read_all(self) -> dict[str, DeviceReading]:
        return {_DEVICE.id: await self.read(_DEVICE.id)}


class _Runtime:
    """A runtime that takes its time, and lets the card show what it did."""

    loads_models = True
    reports_vram = True
    pulls = False
    releases = "model"

    def __init__(self, name: str, card: _Card) -> None:
        self.config = RuntimeConfig(name=name, provider="ollama", url="http://x", devices=(_DEVICE.id,), idle_grace_s=0)
        self._card = card
        self.held: list[str] = []

    def put(self, model: str) -> None:
        self.held.append(model)
        self._card.used_mb += _MODEL_MB

    def _let_go(self) -> None:
        self._card.used_mb -= _MODEL_MB * len(self.held)
        self.held.clear()

    async def look(self) -> RuntimeReading:
        read_at, held = utc_text(now()), tuple(self.held)
        await asyncio.sleep(_LOOK_S)
        size = _MODEL_MB * _MB
        return RuntimeReading(
            runtime=self.config.name,
            read_at=read_at,
            healthy=True,
            activity="idle",
            resident=tuple(ResidentModel(model=model, size_bytes=size, vram_bytes=size) for model in held),
        )

    async def residency(self) -> RuntimeReading:
        return await self.look()

    async def signs(self, model: str) -> Signs:
        return Signs(activity="idle", resident=model in self.held)

    def find(self, reading: RuntimeReading, model: str) -> ResidentModel | None:
        return find_resident(reading.resident or (), model)

    async def model_bytes(self, model: str) -> int | None:
        return _MODEL_MB * _MB

    def load_options(self, work: Work) -> str:
        return ""

    async def load(self, model: str, *, on_cpu: bool, work: Work | None = None) -> None:
        self._card.moments.load_asked_s = time.perf_counter()
        await asyncio.sleep(_LOAD_S)
        self.put(model)
        self._card.moments.loaded_s = time.perf_counter()

    async def run(
        self, model: str, task: Task, work: Work, *, on_cpu: bool, keep_alive_s: int | None = None
    ) -> AsyncGenerator[Token | Done]:
        self._card.moments.run_asked_s = time.perf_counter()
        yield Done(JobResult(text="x"))

    async def release(self, model: str | None) -> None:
        asyncio.get_running_loop().call_later(_SETTLE_S, self._let_go)

    async def pull(self, model: str) -> AsyncGenerator[PullProgress]:
        raise RuntimeFailure(Reason.MODEL_MISSING, f"{model} is not fetched here")
        yield

    async def close(self) -> None:
        return


async def _unheard(subject: str, body: bytes) -> None:
    """Nobody watches the outputs."""


class _Host:
    """An agent's room over a log in memory."""

    def __init__(self) -> None:
        self.log = _Log(now_ns=now_ns)
        self.card = _Card()
        self.runtimes = [_Runtime(name, self.card) for name in ("one", "other")]
        self.room = HostRoom(
            host=_HOST,
            boot_id="boot",
            instance_id="one",
            log=self.log,
            recorder=Recorder(self.log, Stamp(source="/bench", new_id=new_id, now=now_rfc3339)),
            payloads=MemoryObjects(),
            inventory=self.card,
            outputs=Outputs(_unheard),
            view=HostView(_HOST),
        )
        self.room.open_slots([_DEVICE])
        for runtime in self.runtimes:
            self.room.tenancy.register(runtime, grace_s=0.0, gap_max_s=15.0)  # type: ignore[arg-type]

    async def put(self, fact: Fact, subject: str) -> int:
        event_id = new_id()
        body = encode(fact, event_id=event_id, source="/bench", subject="bench", time=now_rfc3339())
        outcome = await MemoryLog.append(self.log, Record(subject=subject, body=body, event_id=event_id))
        assert isinstance(outcome, Appended)
        return outcome.seq

    async def handed_off_ms(self, job: str, runtime: _Runtime) -> float:
        """One job for ``runtime``, which needs what the other one holds."""
        raw: dict[str, Any] = {"id": job, "model": "m", "prompt": "p", "need": {"vram_mb": _MODEL_MB}}
        submitted = await MemoryLog.append(
            self.log, Record(subject="gpuq.submit.bench", body=json.dumps(raw).encode(), event_id=new_id())
        )
        assert isinstance(submitted, Appended)
        clocks = Clocks(**dict.fromkeys(Clocks.__struct_fields__, Clock(limit_s=600, source="bench")))
        accepted = Accepted(
            job=job,
            submission_seq=submitted.seq,
            producer="bench",
            digest="d",
            kind="inference",
            task="generate",
            model="m",
            clocks=clocks,
        )
        job_seq = await self.put(accepted, subjects.job(job))
        known: dict[str, Any] = {
            "job": job,
            "device": _DEVICE.id,
            "runtime": runtime.config.name,
            "submission_seq": submitted.seq,
            "job_seq": job_seq,
            "attempt": 1,
            "clocks": clocks,
        }
        route = PendingRoute(seq=await self.put(Routed(host=_HOST, **known), subjects.route(_HOST, job)), **known)
        slot = self.room.take_slot(_DEVICE.id)
        assert slot is not None
        moments = self.card.moments = _Moments()
        # What its last run left behind is seen to be at rest.
        await self.room.observer.look_at_all(await self.card.read_all())
        await Attempt(self.room, route, slot, runtime).run()  # type: ignore[arg-type]
        self.room.give_slot(slot)
        return moments.added_ms


async def _waits_ms() -> float:
    """What the steps on the way wait for, one after another, without any work of ours."""
    began_s = time.perf_counter()
    for wait_s in (_APPEND_S, _READ_S, _READ_S, _APPEND_S, _LOOK_S, _APPEND_S, _APPEND_S, _APPEND_S):
        await asyncio.sleep(wait_s)
    return 1000 * (time.perf_counter() - began_s)


def _p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * 99 // 100)]


async def measure_handoff(*, jobs: int) -> list[Figure]:
    """Two runtimes with models of which only one fits take the card from each other.

    The baseline is what the same waits take on this machine by themselves: where that is far above their sum, the
    machine is busy with something else.
    """
    host = _Host()
    host.runtimes[1].put("m")
    took: list[float] = []
    waits: list[float] = []
    for number in range(jobs):
        took.append(await host.handed_off_ms(f"job-{number}", host.runtimes[number % 2]))
        waits.append(await _waits_ms())
    note = (
        f"p99 of {jobs} handoffs, p50 {sorted(took)[jobs // 2]:.1f} ms; from the reading that shows room to the load, "
        f"and from its end to the run; appends take {1000 * _APPEND_S:g} ms, readings {1000 * _READ_S:g} ms, "
        f"looks {1000 * _LOOK_S:g} ms"
    )
    return [at_most("handoff_added", _p99(took), "ms", _GOAL_MS, baseline=_p99(waits), note=note)]
