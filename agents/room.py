"""What every attempt on this host shares: the log, the devices' subjects and slots, reservations, outputs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from gpukeeper.agents.config import STOP_PROOF_S_MAX, RuntimeConfig
from gpukeeper.agents.devices.hostmemory import available_mb
from gpukeeper.agents.devices.inventory import Inventory
from gpukeeper.agents.disk import free_disk_mb
from gpukeeper.agents.looks import FreshLooks
from gpukeeper.agents.memory.handoff import Handoff
from gpukeeper.agents.memory.holdings import is_own
from gpukeeper.agents.memory.loads import Loads
from gpukeeper.agents.memory.observer import Observer
from gpukeeper.agents.memory.tenancy import Tenancy
from gpukeeper.agents.memory.turns import Turns
from gpukeeper.agents.memory.uses import Uses
from gpukeeper.agents.outputs import Outputs
from gpukeeper.agents.processes import family, listener_pid
from gpukeeper.agents.runtimes.port import Provider
from gpukeeper.agents.writer import OwnSubject, patiently
from gpukeeper.capacity.admission import HostRoom as HostLeft
from gpukeeper.capacity.admission import Ledger
from gpukeeper.capacity.device import Device
from gpukeeper.capacity.need import Need
from gpukeeper.capacity.owners import owners_on
from gpukeeper.capacity.reclaim import Owner
from gpukeeper.events import subjects
from gpukeeper.events.clock import now
from gpukeeper.events.codec import decode
from gpukeeper.events.fact import Fact
from gpukeeper.events.instants import parse_utc
from gpukeeper.events.log import Follower, Log, Stored
from gpukeeper.events.objects import Objects
from gpukeeper.events.readings import DeviceReading, DeviceState, RuntimeReading
from gpukeeper.events.recorder import Recorder
from gpukeeper.projections.host import Suspicion
from gpukeeper.projections.hostview import HostView

if TYPE_CHECKING:
    from gpukeeper.agents.provisioning import Provisioner


class Slot(msgspec.Struct, frozen=True):
    """One place for one job on one device."""

    device: Device
    index: int
    subject: OwnSubject


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """Why a device is blocked, and what must be free before it is not."""

    why: str
    free_mb: int
    #: A reading that was begun before does not know of it.
    at: datetime
    since_seq: int = 0


class HostRoom:
    """Shared by the attempts of one agent. Single-threaded: its fields change only between awaits."""

    def __init__(
        self,
        *,
        host: str,
        boot_id: str,
        instance_id: str,
        log: Log,
        recorder: Recorder,
        payloads: Objects,
        inventory: Inventory,
        outputs: Outputs,
        view: HostView,
        now: Callable[[], datetime] = now,
    ) -> None:
        self.host = host
        self.boot_id = boot_id
        self.instance_id = instance_id
        self.log = log
        self.recorder = recorder
        self.payloads = payloads
        self.inventory = inventory
        self.outputs = outputs
        self.view = view
        #: The clock that readings are dated by.
        self.now = now
        self.ledger = Ledger()
        #: What was promised of the host's own memory and disk, by claim. No reading shows for sure that it is taken, so
        #: it counts until the claim is over.
        self.host_needs: dict[int, Need] = {}
        #: Who uses which runtime, and since when it does nothing.
        self.tenancy = Tenancy(now=now)
        #: One load or release at a time on each device.
        self.turns = Turns()
        self.loads = Loads(self.tenancy)
        #: Which resident models jobs rest on.
        self.uses = Uses()
        self.handoff = Handoff(self)
        self.observer = Observer(self)
        #: Fetches models that are missing, where the agent was told how.
        self.provisioner: Provisioner | None = None
        #: What blocks a device: an owner of its memory that did not let go.
        self.blocked: dict[str, Block] = {}
        #: The state of each device as the log was told last.
        self.told_states: dict[str, DeviceState] = {}
        #: Runtimes whose last placement check failed, this agent's or its predecessor's.
        self.suspects: dict[str, Suspicion] = dict(view.suspects)
        #: Those of them that were proven to have left the work that they gave no progress on.
        self.work_left: dict[str, Suspicion] = {}
        #: How long an attempt runs before it follows its job's subject.
        self.watch_after_s = 1.0
        #: A slot stays taken this long after a stop was asked for, unless the runtime is proven to have stopped before.
        self.stop_proof_limit_s = STOP_PROOF_S_MAX
        #: After a run that took longer, the placement of its model is looked at again.
        self.recheck_after_s = 60.0
        self._looks: dict[str, FreshLooks] = {}
        self._devices: dict[str, OwnSubject] = {}
        self._runtimes: dict[str, OwnSubject] = {}
        self._free: dict[str, list[Slot]] = {}
        #: Devices whose slots are offered, as they were announced last.
        self._offered: dict[str, Device] = {}

    def may_claim(self, device_id: str) -> bool:
        """Whether a claim would rest on all that stands on the device's subject, and this agent speaks for the host.

        A sequence alone would not say that another agent has joined, and holds the slot.
        """
        folded = self.view.device_seq.get(device_id, 0)
        return self.speaks_for_host() and folded >= self.device_subject(device_id).foreign_seq

    def speaks_for_host(self) -> bool:
        """Whether no other agent has joined for this host since, as far as it is folded here."""
        return self.view.instance_id in ("", self.instance_id)

    # --- blocked devices

    def block(self, device_id: str, why: str, *, free_mb: int) -> None:
        """Give nothing out there until at least ``free_mb`` are free, or an operator resumes the device."""
        resumed_seq = self.view.resumed.get(device_id, 0)
        self.blocked[device_id] = Block(why=why, free_mb=free_mb, at=self.now(), since_seq=resumed_seq)

    def still_blocked(self, reading: DeviceReading) -> Block | None:
        """What blocks the device, after one more reading of it."""
        block = self.blocked.get(reading.device)
        if block is None:
            return None
        yielded = reading.state == "healthy" and reading.free_mb is not None and reading.free_mb >= block.free_mb
        resumed = self.view.resumed.get(reading.device, 0) > block.since_seq
        if resumed or (yielded and parse_utc(reading.read_at) >= block.at):
            del self.blocked[reading.device]
            return None
        return block

    async def host_left(self, runtime: RuntimeConfig) -> HostLeft:
        """What the host has left beside its devices, measured now."""
        ram_mb = await asyncio.to_thread(available_mb)
        disk_mb = await asyncio.to_thread(free_disk_mb, runtime)
        return HostLeft(ram_mb=ram_mb, disk_mb=disk_mb)

    def unpromised(self, left: HostLeft) -> HostLeft:
        """``left``, less what is promised to other jobs by now."""
        ram_mb = sum(need.ram_mb or 0 for need in self.host_needs.values())
        disk_mb = sum(need.disk_mb or 0 for need in self.host_needs.values())
        return HostLeft(
            ram_mb=None if left.ram_mb is None else left.ram_mb - ram_mb,
            disk_mb=None if left.disk_mb is None else left.disk_mb - disk_mb,
        )

    # --- owners of memory

    def gpu_ids(self) -> tuple[str, ...]:
        """The devices that a runtime without a list of its own may use."""
        return tuple(
            device.id for device in self.inventory.devices if device.kind == "gpu" and device.unschedulable is None
        )

    def owners_on(self, device_id: str, *, but: int | None = None, releasing: bool = True) -> tuple[Owner, ...]:
        """Who holds memory there, by the newest looks.

        Args:
            device_id: the device.
            but: the claim that asks.
            releasing: what is being let go of stands as such, so that nobody asks for it twice.
        """
        owners = owners_on(device_id, self.tenancy.tenants(self.gpu_ids(), self.view.pins, but=but))
        if not releasing:
            return owners
        return tuple(
            msgspec.structs.replace(owner, stopping=True) if self.tenancy.is_releasing(owner.runtime) else owner
            for owner in owners
        )

    # --- subjects

    def device_subject(self, device_id: str) -> OwnSubject:
        if device_id not in self._devices:
            subject = subjects.device(self.host, device_id)
            seq = self.view.device_seq.get(device_id, 0)
            self._devices[device_id] = OwnSubject(self.recorder, subject, f"{self.host}/{device_id}", seq)
        return self._devices[device_id]

    def runtime_subject(self, name: str) -> OwnSubject:
        if name not in self._runtimes:
            subject = subjects.runtime(self.host, name)
            seq = self.view.runtime_seq.get(name, 0)
            self._runtimes[name] = OwnSubject(self.recorder, subject, f"{self.host}/{name}", seq)
        return self._runtimes[name]

    async def follow_job(self, job: str, after: int, on_fact: Callable[[Fact], None]) -> Follower:
        """Hear what is appended to a held job."""

        def on_stored(stored: Stored) -> None:
            data = decode(stored).data
            if isinstance(data, Fact):
                on_fact(data)

        return await patiently(lambda: self.log.follow(on_stored, after=after, subjects=(subjects.job(job),)))

    # --- slots

    def open_slots(self, devices: Iterable[Device]) -> None:
        """Offer the slots of ``devices``.

        A device that has some keeps them, as some may be out; those that are taken from now on know it as it is now.
        """
        for device in devices:
            known = device.id in self._offered
            self._offered[device.id] = device
            if not known:
                subject = self.device_subject(device.id)
                self._free[device.id] = [Slot(device, index, subject) for index in range(device.slots)]

    def take_slot(self, device_id: str) -> Slot | None:
        """A free slot of the device, the lowest first, or None."""
        free = self._free.get(device_id)
        return msgspec.structs.replace(free.pop(0), device=self._offered[device_id]) if free else None

    def take_slots(self, device_ids: Iterable[str]) -> tuple[Slot, ...] | None:
        """A free slot of each device, or None where one of them has none: all or nothing."""
        taken: list[Slot] = []
        for device_id in device_ids:
            slot = self.take_slot(device_id)
            if slot is None:
                for each in taken:
                    self.give_slot(each)
                return None
            taken.append(slot)
        return tuple(taken)

    def give_slot(self, slot: Slot) -> None:
        """The slot is free again."""
        free = self._free[slot.device.id]
        free.append(slot)
        free.sort(key=lambda one: one.index)

    # --- evidence

    async def residency(self, provider: Provider) -> RuntimeReading:
        """What the runtime holds, read after this call began."""
        name = provider.config.name
        if name not in self._looks:
            self._looks[name] = FreshLooks(provider)
        return await self._looks[name].residency()

    def devices_of(self, provider: Provider, claimed: Device) -> tuple[str, ...]:
        """The devices that a model of this runtime may sit on, the one that was claimed first.

        A runtime chooses among its GPUs by itself. What may not be scheduled (the whole of a MIG card) is left out.
        """
        if claimed.kind == "cpu":
            return (claimed.id,)
        named = provider.config.devices
        others = (
            device.id
            for device in self.inventory.devices
            if device.kind == "gpu" and device.unschedulable is None and (not named or device.id in named)
        )
        return (claimed.id, *(other for other in others if other != claimed.id))

    async def read_devices(self, provider: Provider, claimed: Device) -> tuple[DeviceReading, ...]:
        """Measure :meth:`devices_of` at the same time, in that order."""
        return tuple(await asyncio.gather(*(self.inventory.read(each) for each in self.devices_of(provider, claimed))))

    async def process_use_mb(self, provider: Provider, readings: Iterable[DeviceReading]) -> int | None:
        """What the runtime's process and its workers hold on these devices, for runtimes that do not report it.

        A llama.cpp router and a vLLM have one that listens and others that hold the memory. None where unknown.
        """
        uses = [use for reading in readings for use in reading.processes or ()]
        port = urlsplit(provider.config.url).port
        container = self.observer.container_of(provider.config.name)
        if provider.reports_vram or not uses or (port is None and container is None):
            return None
        pids = frozenset[int]() if port is None else await asyncio.to_thread(_serving, port)
        held = [use.used_mb for use in uses if use.used_mb is not None and is_own(use, pids, container)]
        return sum(held) if held else None


def _serving(port: int) -> frozenset[int]:
    """The process that listens on ``port`` and all that it started; none where that is unknown. Blocks."""
    pid = listener_pid(port)
    return frozenset() if pid is None else family(pid)
