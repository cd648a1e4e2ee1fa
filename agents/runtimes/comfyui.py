"""A ComfyUI: it queues graphs, runs them one at a time, and loads the models that a graph names while it runs.

What it holds has no names. It counts as one model, called ``comfyui`` or as the runtime is, of the size that its
torch has allocated; a workflow names that model. It lets go of all of it at once.

*Placement.* There is nothing to load before a run, so the check before it can prove one thing: that ComfyUI is up
and computes where the job was meant to run. One that was started on the CPU says so, and fails the check. Of what it
holds from earlier runs, all is in VRAM by definition, and the device must show it. After :meth:`ComfyUI.load` a
ComfyUI that holds nothing yet is listed for a while with one byte: the check needs a figure to judge, and all of
nothing is in VRAM. Before it, such a ComfyUI is not resident, so that the job's declared need is asked of the device.
That the graph's own models land in VRAM nobody can say beforehand; ComfyUI itself fails a run that finds no room.

*Progress.* The queue and the history are asked once a second. Each answer that has the prompt in its place is a sign
of life, and the job's idle clock runs from the last one. How far a run is, they do not say: the run clock bounds it.
A status that cannot be had is no end of the run. A prompt that is in neither list any more is lost, not done.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from typing import Any

import structlog

from gpukeeper.agents.config import RuntimeConfig
from gpukeeper.agents.runtimes import comfyui_wire as wire
from gpukeeper.agents.runtimes.attempts import LOOK_TIMEOUT_S, attempt, utc_now
from gpukeeper.agents.runtimes.http import RuntimeHttp
from gpukeeper.agents.runtimes.port import Done, PullProgress, RuntimeFailure, Signs, Token
from gpukeeper.events.readings import Releases, ResidentModel, RuntimeReading
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import Task, Work

_log = structlog.get_logger("gpukeeper.comfyui")

#: Between two looks at a prompt.
POLL_S = 1.0
#: So many looks in a row may fail before the run counts as lost; each may take as long as a look.
FAILED_LOOKS_MAX = 120
#: So many looks in a row must find a prompt in neither list: queue and history are two requests.
GONE_LOOKS = 2
#: How long a load stands for a ComfyUI that holds nothing: until the check that follows it, and no later.
PREPARED_S = 30.0
_NOTHING_BYTES = 1


class ComfyUI:
    """One ComfyUI of the registry, under the contract of ``port.Provider``."""

    def __init__(
        self, config: RuntimeConfig, *, look_timeout_s: float = LOOK_TIMEOUT_S, poll_s: float = POLL_S
    ) -> None:
        self._config = config
        self._look_timeout_s = look_timeout_s
        self._poll_s = poll_s
        self._http = RuntimeHttp(config.url)
        self._names = tuple(dict.fromkeys((config.name, wire.MODEL)))
        #: Until when, on the loop's clock, a load stands for a ComfyUI that holds nothing.
        self._prepared_until = 0.0

    @property
    def config(self) -> RuntimeConfig:
        return self._config

    @property
    def loads_models(self) -> bool:
        return True

    @property
    def releases(self) -> Releases:
        return "none" if self._config.release == "none" else "all"

    @property
    def pulls(self) -> bool:
        return False

    @property
    def reports_vram(self) -> bool:
        return True

    async def look(self) -> RuntimeReading:
        limit_s = self._look_timeout_s
        read_at = utc_now()
        queue, stats = await asyncio.gather(
            attempt(self._queue(), "/queue", limit_s), attempt(self._row(), "/system_stats", limit_s)
        )
        failed = [str(answer) for answer in (queue, stats) if isinstance(answer, RuntimeFailure)]
        return RuntimeReading(
            runtime=self._config.name,
            read_at=read_at,
            healthy=not isinstance(queue, RuntimeFailure),
            activity=wire.activity(queue),
            resident=None if isinstance(stats, RuntimeFailure) else stats,
            models=self._names,
            error="; ".join(failed) or None,
        )

    async def residency(self) -> RuntimeReading:
        read_at = utc_now()
        stats = await attempt(self._row(), "/system_stats", self._look_timeout_s)
        failed = isinstance(stats, RuntimeFailure)
        return RuntimeReading(
            runtime=self._config.name,
            read_at=read_at,
            healthy=not failed,
            resident=None if isinstance(stats, RuntimeFailure) else stats,
            models=self._names,
            error=str(stats) if failed else None,
        )

    async def _row(self) -> tuple[ResidentModel, ...]:
        stats = await self._http.get("/system_stats", wire.stats_decoder)
        held = wire.held_bytes(stats)
        if not held and asyncio.get_running_loop().time() >= self._prepared_until:
            return ()
        size = held or _NOTHING_BYTES
        return (ResidentModel(model=wire.MODEL, size_bytes=size, vram_bytes=size if wire.on_gpu(stats) else 0),)

    def find(self, reading: RuntimeReading, model: str) -> ResidentModel | None:
        return next(iter(reading.resident or ()), None) if model in self._names else None

    async def model_bytes(self, model: str) -> int | None:  # noqa: ARG002 (a graph's models are nobody's to know)
        return None

    def load_options(self, work: Work) -> str:  # noqa: ARG002 (the graph says what it loads)
        return ""

    async def load(self, model: str, *, on_cpu: bool, work: Work | None = None) -> None:  # noqa: ARG002 (the run loads)
        if model not in self._names:
            raise RuntimeFailure(
                Reason.LOAD_FAILED, f"a workflow names its model {' or '.join(self._names)}, not {model}"
            )
        await self._http.get("/system_stats", wire.stats_decoder)
        self._prepared_until = asyncio.get_running_loop().time() + PREPARED_S

    def run(
        self,
        model: str,
        task: Task,
        work: Work,
        *,
        on_cpu: bool,  # noqa: ARG002 (where it computes was chosen when it was started)
        keep_alive_s: int | None = None,  # noqa: ARG002 (it keeps what fits)
    ) -> AsyncGenerator[Token | Done]:
        if task != "workflow":
            raise RuntimeFailure(Reason.UNSUPPORTED_TASK, f"a ComfyUI runs workflows, no {task}")
        if model not in self._names:
            raise RuntimeFailure(Reason.INVALID, f"a workflow names its model {' or '.join(self._names)}, not {model}")
        self._prepared_until = 0.0
        return self._run(work.workflow or {})

    async def release(self, model: str | None) -> None:  # noqa: ARG002 (what it holds has no names)
        if self._config.release == "none":
            raise RuntimeFailure(Reason.NOT_RELEASABLE, f"the registry forbids {self._config.name} to let go")
        try:
            await self._http.tell("/free", {"unload_models": True, "free_memory": True})
        except RuntimeFailure as failure:
            if failure.status is None:
                raise
            raise RuntimeFailure(Reason.RELEASE_FAILED, failure.detail, status=failure.status) from failure
        self._prepared_until = 0.0

    async def pull(self, model: str) -> AsyncGenerator[PullProgress]:
        raise RuntimeFailure(Reason.MODEL_MISSING, f"a ComfyUI cannot be asked to fetch {model}")
        yield  # what makes it a generator

    async def signs(self, model: str) -> Signs:  # noqa: ARG002 (its queue is one for all)
        """Its queue says whether anything runs or waits."""
        return Signs(activity=wire.activity(await attempt(self._queue(), "/queue", self._look_timeout_s)))

    async def close(self) -> None:
        await self._http.close()

    async def _queue(self) -> wire.Queue:
        return await self._http.get("/queue", wire.queue_decoder)

    # --- one run

    async def _run(self, graph: dict[str, Any]) -> AsyncGenerator[Token | Done]:
        """Queue the graph and follow it to its end. Leaving early takes it back, whether it waits or runs."""
        # Newer servers take the prompt's id from the client; the client's own finds it on older ones.
        prompt_id, client_id = str(uuid.uuid4()), uuid.uuid4().hex
        ended = False
        try:
            body = {"prompt": graph, "client_id": client_id, "prompt_id": prompt_id}
            try:
                prompt_id = (await self._http.post("/prompt", body, wire.posted_decoder)).prompt_id
            except RuntimeFailure as failure:
                ended = failure.status is not None and failure.status != 200  # it was refused, and so not queued
                raise
            place: wire.Place = "pending"
            failed_looks, gone_looks = 0, 0
            while True:
                looked = await self._look_at(prompt_id)
                if isinstance(looked, wire.Entry):
                    ended = True
                    yield Done(wire.outcome(looked, prompt_id))
                    return
                if isinstance(looked, RuntimeFailure):
                    failed_looks += 1
                    if failed_looks >= FAILED_LOOKS_MAX:
                        raise RuntimeFailure(
                            Reason.RUNTIME_UNREACHABLE,
                            f"prompt {prompt_id} was {place} when last seen; nothing heard in {failed_looks} looks: "
                            f"{looked.detail}",
                        )
                elif looked == "gone":
                    failed_looks, gone_looks = 0, gone_looks + 1
                    if gone_looks >= GONE_LOOKS:
                        ended = True
                        raise RuntimeFailure(
                            Reason.RUN_LOST,
                            f"prompt {prompt_id} was {place} and is now in neither queue nor history: "
                            f"{self._config.name} may have been started again",
                        )
                else:
                    place, failed_looks, gone_looks = looked, 0, 0
                    yield Token("")
                await asyncio.sleep(self._poll_s)
        finally:
            if not ended:
                await self._take_back(prompt_id, client_id)

    async def _look_at(self, prompt_id: str) -> wire.Entry | wire.Place | RuntimeFailure:
        """The end of the prompt, or its place in the queue, or why neither could be read.

        The queue is asked first: a prompt moves from there to the history, so one that left it in between is found.
        """
        limit_s = self._look_timeout_s
        queue = await attempt(self._queue(), "/queue", limit_s)
        if isinstance(queue, RuntimeFailure):
            return queue
        place = wire.place_of(queue, prompt_id)
        if place != "gone":
            return place
        path = f"/history/{prompt_id}"
        history = await attempt(self._http.get(path, wire.history_decoder), path, limit_s)
        if isinstance(history, RuntimeFailure):
            return history
        return history.get(prompt_id, place)

    async def _take_back(self, prompt_id: str, client_id: str) -> None:
        """Have a prompt deleted that waits, and interrupted where it runs.

        What cannot be told is logged and left: whether it has stopped is what :meth:`signs` shows afterwards.
        """
        queue = await attempt(self._queue(), "/queue", self._look_timeout_s)
        if isinstance(queue, RuntimeFailure):
            _log.warning("prompt_not_taken_back", runtime=self._config.name, prompt=prompt_id, why=str(queue))
            return
        for each in dict.fromkeys((prompt_id, *wire.prompt_ids_of(queue, client_id))):
            place = wire.place_of(queue, each)
            if place == "pending":
                await self._tell("/queue", {"delete": [each]}, each)
                # It may have begun before it was deleted.
                again = await attempt(self._queue(), "/queue", self._look_timeout_s)
                place = "gone" if isinstance(again, RuntimeFailure) else wire.place_of(again, each)
            if place == "running":
                await self._tell("/interrupt", {"prompt_id": each}, each)

    async def _tell(self, path: str, body: dict[str, Any], prompt_id: str) -> None:
        told = await attempt(self._http.tell(path, body), path, self._look_timeout_s)
        if isinstance(told, RuntimeFailure):
            _log.warning("prompt_not_taken_back", runtime=self._config.name, prompt=prompt_id, why=str(told))
