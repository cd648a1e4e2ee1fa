"""Loads that belong to the agent, not to the job that asked first: who leaves does not break them off for others."""

from __future__ import annotations

import asyncio
import time

from gpukeeper.agents.memory.tenancy import Tenancy
from gpukeeper.agents.runtimes.port import Provider
from gpukeeper.events.modelnames import canonical
from gpukeeper.events.work import Work

#: Runtime, model by its shortest name, options, and whether it is to sit in the host's memory.
_Key = tuple[str, str, str, bool]


class Load:
    """One load under way. Several jobs may wait for it."""

    def __init__(self, task: asyncio.Task[float]) -> None:
        self._task = task

    @property
    def going(self) -> bool:
        return not self._task.done()

    @property
    def took_s(self) -> float | None:
        """Seconds that it took; None where it has not ended, or not well."""
        if not self._task.done() or self._task.cancelled() or self._task.exception() is not None:
            return None
        return self._task.result()

    async def wait(self) -> float:
        """Seconds that the load took. Being cancelled does not break the load off.

        Raises:
            RuntimeFailure: the runtime refused or could not.
        """
        return await asyncio.shield(self._task)

    async def over(self, within_s: float) -> None:
        """Wait for its end, whatever it is, and break it off where it takes longer."""
        if within_s > 0:
            await asyncio.wait({self._task}, timeout=within_s)
        if self.going:
            await self.break_off()

    async def break_off(self) -> None:
        """Close the connection that it was asked for on, which is how a runtime is told; it is told once."""
        if self.going:
            self._task.cancel()
            await asyncio.wait({self._task})


class Loads:
    """The loads of one agent: one for each (runtime, model, options, kind of place) at a time."""

    def __init__(self, tenancy: Tenancy) -> None:
        self._tenancy = tenancy
        self._going: dict[_Key, Load] = {}

    def begin(self, provider: Provider, model: str, work: Work, *, on_cpu: bool) -> Load:
        """Begin to load, or join the same load where it is under way."""
        key = (provider.config.name, canonical(model), provider.load_options(work), on_cpu)
        load = self._going.get(key)
        if load is None:
            task = asyncio.create_task(self._load(key, provider, model, work), name=f"load {model}")
            task.add_done_callback(_look_at)
            load = self._going[key] = Load(task)
        return load

    def replaces(self, runtime: str, model: str, options: str) -> bool:
        """Whether a load is under way that brings ``model`` in with other options."""
        name = canonical(model)
        return any(each[:2] == (runtime, name) and each[2] != options for each in self._going)

    async def _load(self, key: _Key, provider: Provider, model: str, work: Work) -> float:
        runtime, name, options, on_cpu = key
        began_s = time.monotonic()
        self._tenancy.loading(runtime, +1)
        try:
            await provider.load(model, on_cpu=on_cpu, work=work)
            self._tenancy.loaded(runtime, name, options)
        finally:
            self._tenancy.loading(runtime, -1)
            del self._going[key]
        return round(time.monotonic() - began_s, 4)


def _look_at(task: asyncio.Task[float]) -> None:
    """Take note of how it ended, in case nobody waits any more."""
    if not task.cancelled():
        task.exception()
