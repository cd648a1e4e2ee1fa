"""Fetches models that are missing: each once, however many jobs wait for it, with its events.

A fetch goes on as long as somebody waits for it. Who stops waiting (a cancelled job, an expired clock) leaves it to the
others; when the last one leaves, the runtime is told to stop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import structlog

from gpukeeper.agents.config import RuntimeConfig
from gpukeeper.agents.disk import free_disk_mb
from gpukeeper.agents.room import HostRoom
from gpukeeper.agents.runtimes.port import Provider, RuntimeFailure
from gpukeeper.agents.writer import NotRecorded
from gpukeeper.capacity.provision import Layers, may_fetch, too_full
from gpukeeper.events.fact import Fact
from gpukeeper.events.modelnames import canonical, same_model
from gpukeeper.events.reasons import Reason
from gpukeeper.events.runtime import Provisioned, ProvisionFailed, ProvisionProgress, ProvisionStarted

_log = structlog.get_logger("gpukeeper.provisioning")

#: At most one event of progress in this time.
PROGRESS_EVERY_S = 5.0
_DETAIL_CHARS_MAX = 2_000

#: What is free on the disk of a runtime, in MB; None where unknown.
FreeDisk = Callable[[RuntimeConfig], Awaitable[int | None]]


async def measured(config: RuntimeConfig) -> int | None:
    """What is free where this runtime keeps its models, read now, in a thread."""
    return await asyncio.to_thread(free_disk_mb, config)


class _Fetch:
    """One fetch, and how many wait for it."""

    def __init__(self, provider: Provider, model: str, job: str) -> None:
        self.provider = provider
        self.model = model
        #: The job for which it began: the others wait for the same.
        self.job = job
        self.waiters = 0
        #: Nobody waited any more: it is being given up.
        self.leaving = False
        #: Ends with why the fetch failed, or None. Never cancelled.
        self.task: asyncio.Task[RuntimeFailure | None] | None = None
        self.pulling: asyncio.Task[None] | None = None

    def give_up(self) -> None:
        self.leaving = True
        if self.pulling is not None:
            self.pulling.cancel()


class Provisioner:
    """The fetches of one agent. Single-threaded: its fields change only between awaits."""

    def __init__(
        self,
        room: HostRoom,
        *,
        leaves_mb: int,
        free_disk: FreeDisk = measured,
        progress_every_s: float = PROGRESS_EVERY_S,
    ) -> None:
        self._room = room
        self._leaves_mb = leaves_mb
        self._free_disk = free_disk
        self._progress_every_s = progress_every_s
        self._fetches: dict[tuple[str, str], _Fetch] = {}
        #: How many fetches of each model have ended: a look from before one does not show what it brought.
        self._ended: Counter[tuple[str, str]] = Counter()

    async def ensure(self, provider: Provider, model: str, job: str, until: float) -> bool:
        """Return when the runtime has ``model``: at once where it has, or does not say, or can fetch none.

        Whether it had to be fetched.

        Args:
            provider: the runtime that lacks it, or may.
            model: as the job names it.
            job: for whom.
            until: when this job stops waiting, by the clock of the running loop, in seconds.

        Raises:
            RuntimeFailure: MODEL_MISSING where it may not be fetched, else why the fetch failed, in the runtime's own
                words.
            TimeoutError: ``until`` has come. The fetch goes on for others that wait.
            NotRecorded: the log refuses its events for good.
        """
        if not provider.pulls:
            return False
        key = (provider.config.name, canonical(model))
        async with asyncio.timeout_at(until):
            while True:
                fetch = self._fetches.get(key)
                if fetch is not None and fetch.leaving:
                    await self._gone(fetch)
                    continue
                if fetch is None:
                    ended = self._ended[key]
                    if await _has(provider, model):
                        return False
                    free_mb = await self._free_disk(provider.config)
                    if key in self._fetches or ended != self._ended[key]:
                        continue
                    fetch = self._begin(key, provider, model, job, free_mb)
                await self._wait_for(fetch)
                return True

    async def close(self) -> None:
        """Give up every fetch, and return when they have ended and said so."""
        fetches = list(self._fetches.values())
        for fetch in fetches:
            fetch.give_up()
        for fetch in fetches:
            await self._gone(fetch)

    def _begin(self, key: tuple[str, str], provider: Provider, model: str, job: str, free_mb: int | None) -> _Fetch:
        config = provider.config
        refusal = may_fetch(model, runtime=config.name, allowed=config.pull, free_mb=free_mb, leaves_mb=self._leaves_mb)
        if refusal is not None:
            raise RuntimeFailure(refusal.reason, refusal.detail)
        fetch = self._fetches[key] = _Fetch(provider, model, job)
        fetch.task = asyncio.create_task(self._fetch(key, fetch))
        return fetch

    async def _wait_for(self, fetch: _Fetch) -> None:
        assert fetch.task is not None
        fetch.waiters += 1
        try:
            failure = await asyncio.shield(fetch.task)
        finally:
            fetch.waiters -= 1
            if not fetch.waiters and not fetch.task.done():
                fetch.give_up()
        if failure is not None:
            raise RuntimeFailure(failure.reason, failure.detail, status=failure.status)

    async def _gone(self, fetch: _Fetch) -> None:
        """Wait for its end, whatever it is: those who wait for the model hear of it."""
        assert fetch.task is not None
        await asyncio.wait({fetch.task})

    # --- one fetch

    async def _fetch(self, key: tuple[str, str], fetch: _Fetch) -> RuntimeFailure | None:
        try:
            return await self._told(fetch)
        finally:
            del self._fetches[key]
            self._ended[key] += 1

    async def _told(self, fetch: _Fetch) -> RuntimeFailure | None:
        """Fetch, with an event at the beginning and one at the end."""
        about = {"host": self._room.host, "runtime": fetch.provider.config.name, "model": fetch.model, "job": fetch.job}
        began_s = asyncio.get_running_loop().time()
        await self._append(fetch, ProvisionStarted(**about))
        failure = await self._outcome(fetch, about)
        if failure is None:
            await self._append(
                fetch, Provisioned(**about, took_s=round(asyncio.get_running_loop().time() - began_s, 3))
            )
        else:
            detail = failure.detail[:_DETAIL_CHARS_MAX]
            await self._append(fetch, ProvisionFailed(**about, reason=failure.reason, detail=detail))
        return failure

    async def _outcome(self, fetch: _Fetch, about: dict[str, str]) -> RuntimeFailure | None:
        if not fetch.leaving:
            fetch.pulling = asyncio.create_task(self._pull(fetch, about))
            await asyncio.wait({fetch.pulling})
            if not fetch.pulling.cancelled():
                try:
                    fetch.pulling.result()
                except RuntimeFailure as failure:
                    return failure
                return None
        return RuntimeFailure(Reason.PROVISION_FAILED, f"the fetch of {fetch.model} was given up: nobody waits for it")

    async def _pull(self, fetch: _Fetch, about: dict[str, str]) -> None:
        """Let the runtime fetch, and watch the disk: how much is to come shows only now."""
        loop = asyncio.get_running_loop()
        layers = Layers()
        next_s = loop.time()
        note: asyncio.Task[None] | None = None
        try:
            async with aclosing(fetch.provider.pull(fetch.model)) as pulling:
                async for progress in pulling:
                    grown = layers.take(progress.status, progress.completed_bytes, progress.total_bytes)
                    due = loop.time() >= next_s
                    if grown or due:
                        await self._check_disk(fetch, layers)
                    if due and (note is None or note.done()):
                        next_s = loop.time() + self._progress_every_s
                        told = ProvisionProgress(
                            **about,
                            status=progress.status,
                            completed_bytes=layers.completed_bytes,
                            total_bytes=layers.total_bytes,
                        )
                        # A log that is away for a while does not keep the runtime from going on.
                        note = asyncio.create_task(self._note(fetch, told))
        finally:
            if note is not None:
                await asyncio.wait({note})

    async def _check_disk(self, fetch: _Fetch, layers: Layers) -> None:
        full = too_full(
            free_mb=await self._free_disk(fetch.provider.config),
            missing_bytes=layers.missing_bytes,
            leaves_mb=self._leaves_mb,
        )
        if full is not None:
            raise RuntimeFailure(Reason.PROVISION_FAILED, f"the fetch of {fetch.model} was stopped: {full}")

    async def _note(self, fetch: _Fetch, progress: ProvisionProgress) -> None:
        try:
            await self._append(fetch, progress)
        except NotRecorded as error:
            _log.warning("progress_not_recorded", runtime=progress.runtime, model=progress.model, error=error.message)

    async def _append(self, fetch: _Fetch, fact: Fact) -> None:
        await self._room.runtime_subject(fetch.provider.config.name).append(fact, job=fetch.job)


async def _has(provider: Provider, model: str) -> bool:
    """Whether the runtime has the model. Where it does not say so now, loading will show it."""
    reading = await provider.look()
    return reading.models is None or any(same_model(name, model) for name in reading.models)
