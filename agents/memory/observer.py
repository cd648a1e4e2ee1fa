"""Looks at the registered runtimes as owners of memory: what they do, what they hold where, since when they rest."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from msgspec.structs import replace

from gpukeeper.agents.containers.standing import with_container
from gpukeeper.agents.memory.holdings import holdings_of
from gpukeeper.agents.processes import family, listener_pid
from gpukeeper.agents.runtimes.activity import infer_activity
from gpukeeper.agents.runtimes.port import Provider
from gpukeeper.events.readings import DeviceReading, RuntimeReading

if TYPE_CHECKING:
    from gpukeeper.agents.containers.steward import Steward
    from gpukeeper.agents.room import HostRoom


class Observer:
    """Looks of one agent. The newest of each runtime is kept by the tenancy, with the idleness that it proves."""

    def __init__(self, room: HostRoom) -> None:
        self._room = room
        #: Of the host's containers, where the registry names any.
        self.steward: Steward | None = None

    async def look_at_all(self, readings: Mapping[str, DeviceReading]) -> dict[str, RuntimeReading]:
        """Look at every registered runtime at once, beside ``readings`` of the devices that were taken just now."""
        providers = self._room.tenancy.providers()
        looks = await asyncio.gather(*(self._look(provider, readings) for provider in providers))
        return {look.runtime: look for look in looks}

    async def _look(self, provider: Provider, readings: Mapping[str, DeviceReading]) -> RuntimeReading:
        tenancy = self._room.tenancy
        config = provider.config
        previous = tenancy.reading(config.name)
        own_jobs = tenancy.at_work(config.name)
        look = await provider.look()
        if self.steward is not None and (state := await self.steward.state_of(config.name)) is not None:
            look = with_container(look, state)
        usable = config.devices or self._room.gpu_ids()
        near = [readings[device] for device in usable if device in readings]
        activity = infer_activity(
            look,
            own_jobs=max(own_jobs, tenancy.at_work(config.name)),
            sole_client=config.sole_client,
            device_readings=near if len(near) == len(usable) else (),
            previous=previous,
        )
        holdings = holdings_of(
            look,
            near,
            pids=await self._pids(provider, near),
            container=config.container,
            only_device=usable[0] if len(usable) == 1 else None,
        )
        return tenancy.looked(replace(look, activity=activity, holdings=holdings))

    async def _pids(self, provider: Provider, near: list[DeviceReading]) -> frozenset[int] | None:
        """The processes of the runtime; None where that is unknown. Asked only where a device lists processes."""
        port = urlsplit(provider.config.url).port
        if port is None or not any(reading.processes for reading in near):
            return None
        return await asyncio.to_thread(_family_of_listener, port)


def _family_of_listener(port: int) -> frozenset[int] | None:
    pid = listener_pid(port)
    return None if pid is None else family(pid)
