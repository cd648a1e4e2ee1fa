"""All devices of this host: what is found, with what the configuration says about it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import msgspec

from gpukeeper.agents.config import AgentConfig, DeviceConfig
from gpukeeper.agents.devices.amdgpu import AmdSource
from gpukeeper.agents.devices.amdgpu_sysfs import SYS_DRM
from gpukeeper.agents.devices.containers import PROC
from gpukeeper.agents.devices.hostmemory import PROC_MEMINFO, HostMemorySource
from gpukeeper.agents.devices.nvml import NvmlSource
from gpukeeper.agents.devices.pci import SYS_PCI
from gpukeeper.agents.devices.port import DeviceSource
from gpukeeper.agents.devices.static import StaticSource
from gpukeeper.capacity.device import Device
from gpukeeper.events.errors import ConfigError
from gpukeeper.events.instants import utc_text
from gpukeeper.events.readings import DeviceReading

NOT_FOUND = "declared, not found"


class Inventory:
    """Finds and reads the devices of one host.

    A declared device never vanishes: a GPU that is not there is listed under its id as "declared, not found" and reads
    ``lost`` or ``unknown``. What is declared about a found device (slots, headroom, an upper limit) is added to what
    was found.

    An integrated AMD part beside other GPUs is listed only where it is declared: runtimes do not use it by themselves,
    and a job that was sent there would run elsewhere.

    Raises:
        ConfigError: two devices of one id, or a kind that its source cannot have.
    """

    def __init__(
        self,
        config: AgentConfig,
        *,
        now: Callable[[], datetime],
        meminfo: Path = PROC_MEMINFO,
        proc: Path = PROC,
        drm: Path = SYS_DRM,
        pci: Path = SYS_PCI,
    ) -> None:
        _check(config.devices)
        self._now = now
        self._find_devices = config.find_devices
        #: The devices that each entry of the registry names.
        self._named = {runtime.name: runtime.devices for runtime in config.runtimes}
        cpus = tuple(_declared(each) for each in config.devices if each.source == "cpu")
        statics = tuple(_declared(each) for each in config.devices if each.source == "static")
        limit_s = config.reading_timeout_s
        self._sources: list[DeviceSource] = []
        self._nvml: NvmlSource | None = None
        self._amd: AmdSource | None = None
        #: For each source that finds devices by itself: what is declared of them.
        self._finders: dict[DeviceSource, dict[str, DeviceConfig]] = {}
        nvml = {each.id: each for each in config.devices if each.source == "nvml"}
        if config.find_devices or nvml:
            self._nvml = NvmlSource(now=now, limit_s=limit_s, meminfo=meminfo, proc=proc, pci=pci)
            self._finders[self._nvml] = nvml
        amd = {each.id: each for each in config.devices if each.source == "amdgpu"}
        if config.find_devices or amd:
            self._amd = AmdSource(now=now, limit_s=limit_s, drm=drm, meminfo=meminfo)
            self._finders[self._amd] = amd
        self._sources += self._finders
        if cpus:
            self._sources.append(HostMemorySource(cpus, now=now, limit_s=limit_s, meminfo=meminfo))
        if statics:
            self._sources.append(StaticSource(statics, now=now))
        self._order = {each.id: place for place, each in enumerate(config.devices)}
        self._devices: dict[str, tuple[Device, DeviceSource]] | None = None

    async def find(self) -> tuple[Device, ...]:
        """Look again. Declared devices first, in the order of the configuration, then found ones in the driver's."""
        answers = await asyncio.gather(*(source.find() for source in self._sources))
        found: dict[str, tuple[Device, DeviceSource]] = {}
        for source, devices in zip(self._sources, answers, strict=True):
            finder = self._finders.get(source)
            for device in devices:
                if finder is None:
                    found[device.id] = (device, source)
                elif device.id in finder:
                    found[device.id] = (_configured(device, finder[device.id]), source)
                elif self._find_devices and device.id not in self._order:
                    found[device.id] = (device, source)
        for source, finder in self._finders.items():
            for device_id, declared in finder.items():
                found.setdefault(device_id, (_declared(declared), source))
        self._leave_out_integrated(found)
        last = len(self._order)
        # Sorting is stable: found devices keep the driver's order behind the declared ones.
        self._devices = dict(sorted(found.items(), key=lambda item: self._order.get(item[0], last)))
        return tuple(device for device, _ in self._devices.values())

    def _leave_out_integrated(self, found: dict[str, tuple[Device, DeviceSource]]) -> None:
        """Take out integrated parts that nobody declared, where there is another GPU."""
        amd = self._amd
        if amd is None:
            return
        spare = [each for each in found if each not in self._order and amd.is_integrated(each)]
        gpus = [each for each, (_, source) in found.items() if source in self._finders]
        # A card whose driver is not up yet is another GPU as well.
        hidden = self._nvml is not None and not self._nvml.absent and self._nvml.problem() is not None
        if hidden or len(gpus) > len(spare):
            for each in spare:
                del found[each]

    @property
    def devices(self) -> tuple[Device, ...]:
        """What :meth:`find` found last."""
        return tuple(device for device, _ in (self._devices or {}).values())

    async def read(self, device_id: str) -> DeviceReading:
        """Measure one device. One that this host does not have reads ``unknown``."""
        entry = (await self._listed()).get(device_id)
        if entry is None:
            return DeviceReading(
                device=device_id,
                source="none",
                read_at=utc_text(self._now()),
                state="unknown",
                error="this host has no device of that id",
            )
        device, source = entry
        return await source.read(device)

    async def read_all(self) -> dict[str, DeviceReading]:
        """Measure every device at the same time, by id, in the order of :meth:`find`."""
        listed = await self._listed()
        readings = await asyncio.gather(*(source.read(device) for device, source in listed.values()))
        return dict(zip(listed, readings, strict=True))

    def problems(self) -> list[str]:
        """What a user should know about, in sentences without their full stops; empty when all is well."""
        found = [text for source in self._sources if (text := source.problem()) is not None and not self._idle(source)]
        found += [
            f"{device.id}: {NOT_FOUND}" for device, _ in (self._devices or {}).values() if device.name == NOT_FOUND
        ]
        found += [
            f"{device.id} ({device.name}): {device.unschedulable}"
            for device, _ in (self._devices or {}).values()
            if device.unschedulable is not None
        ]
        if self._devices is not None:
            found += [
                f"runtime {name} may use {device}: this host has no such device"
                for name, devices in self._named.items()
                for device in devices
                if device not in self._devices
            ]
        return found

    def _idle(self, source: DeviceSource) -> bool:
        """Whether that this source finds nothing is as it should be: a host of AMD's GPUs has no driver of NVIDIA's."""
        nvml = self._nvml
        if nvml is None or source is not nvml or not nvml.absent or self._finders[nvml]:
            return False
        return any(other is self._amd for _, other in (self._devices or {}).values())

    async def close(self) -> None:
        """Give up all sources. May be called twice."""
        await asyncio.gather(*(source.close() for source in self._sources))

    async def _listed(self) -> dict[str, tuple[Device, DeviceSource]]:
        if self._devices is None:
            await self.find()
        return self._devices or {}


def _check(devices: tuple[DeviceConfig, ...]) -> None:
    seen: set[str] = set()
    for each in devices:
        if each.id in seen:
            raise ConfigError(f"devices: {each.id} is declared twice", field="devices", device=each.id)
        seen.add(each.id)
        fits = {"nvml": "gpu", "amdgpu": "gpu", "cpu": "cpu", "static": each.kind}[each.source]
        if each.kind not in (None, fits):
            raise ConfigError(
                f"devices: {each.id} is read from {each.source}, so its kind is {fits}, not {each.kind}",
                field="devices",
                device=each.id,
            )


def _declared(config: DeviceConfig) -> Device:
    """A device of which only the declaration is known."""
    names = {"nvml": NOT_FOUND, "amdgpu": NOT_FOUND, "cpu": "host memory", "static": "declared"}
    return Device(
        id=config.id,
        kind=config.kind or ("cpu" if config.source == "cpu" else "gpu"),
        name=names[config.source],
        slots=config.slots,
        headroom_mb=config.headroom_mb,
        limit_mb=config.total_mb,
    )


def _configured(device: Device, config: DeviceConfig) -> Device:
    return msgspec.structs.replace(device, slots=config.slots, headroom_mb=config.headroom_mb, limit_mb=config.total_mb)
