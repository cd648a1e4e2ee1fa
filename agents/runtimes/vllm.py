"""A vLLM server: one model (and adapters on it), chosen when it was started, which it may put to sleep and wake.

``/health`` and ``/v1/models`` prove only that its API process lives; whether it works is what ``/metrics`` says.

Asleep it is healthy and holds nothing: the next job's load wakes it. It can sleep where it was started with
``--enable-sleep-mode`` and ``VLLM_SERVER_DEV_MODE=1``; without them it is always awake, and a release fails.

It does not say how much memory its model takes. The registry does (``holds_mb``), and awake counts as all of it in
VRAM: vLLM does not spill. The device's reading must bear that out before a job starts. Without that figure nothing
proves where the model is, and no job starts on a GPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial

from msgspec.structs import replace

from gpukeeper.agents.config import RuntimeConfig
from gpukeeper.agents.runtimes import openai_run
from gpukeeper.agents.runtimes import vllm_wire as wire
from gpukeeper.agents.runtimes.attempts import LOOK_TIMEOUT_S, attempt, believable, utc_now
from gpukeeper.agents.runtimes.http import RuntimeHttp
from gpukeeper.agents.runtimes.port import Done, PullProgress, RuntimeFailure, Signs, Token
from gpukeeper.events.modelnames import same_model
from gpukeeper.events.readings import Releases, ResidentModel, RuntimeReading
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import Task, Work

MB = 1_048_576


class Vllm:
    """One vLLM server of the registry, under the contract of ``port.Provider``."""

    def __init__(self, config: RuntimeConfig, *, look_timeout_s: float = LOOK_TIMEOUT_S) -> None:
        self._config = config
        self._look_timeout_s = look_timeout_s
        self._http = RuntimeHttp(config.url)
        #: What the newest answer of ``/v1/models`` listed: the server takes a name in its own spelling only.
        self._listed = wire.Models(data=[])

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
        return self._config.holds_mb is not None

    async def look(self) -> RuntimeReading:
        limit_s = self._look_timeout_s
        health, metrics, reading = await asyncio.gather(
            attempt(self._http.check("/health"), "/health", limit_s),
            attempt(self._http.text("/metrics"), "/metrics", limit_s),
            self.residency(),
        )
        if isinstance(health, RuntimeFailure):
            return RuntimeReading(runtime=reading.runtime, read_at=reading.read_at, healthy=False, error=str(health))
        return replace(reading, activity=wire.activity(metrics))

    async def residency(self) -> RuntimeReading:
        limit_s = self._look_timeout_s
        read_at = utc_now()
        models, asleep = await asyncio.gather(
            attempt(self._models(), "/v1/models", limit_s), attempt(self._asleep(), "/is_sleeping", limit_s)
        )
        name = self._config.name
        failed = [str(answer) for answer in (models, asleep) if isinstance(answer, RuntimeFailure)]
        error = "; ".join(failed) or None
        if isinstance(models, RuntimeFailure):
            return RuntimeReading(runtime=name, read_at=read_at, healthy=False, error=error)
        resident: tuple[ResidentModel, ...] | None = None
        if not isinstance(asleep, RuntimeFailure):
            resident = () if asleep else (self._row(models),)
        return RuntimeReading(
            runtime=name, read_at=read_at, healthy=True, resident=resident, models=wire.names(models), error=error
        )

    def _row(self, models: wire.Models) -> ResidentModel:
        holds_mb = self._config.holds_mb
        size = None if holds_mb is None else holds_mb * MB
        return ResidentModel(model=wire.own_names(models)[0], size_bytes=size, vram_bytes=size)

    def find(self, reading: RuntimeReading, model: str) -> ResidentModel | None:
        if not any(same_model(name, model) for name in reading.models or ()):
            return None
        return next(iter(reading.resident or ()), None)

    async def model_bytes(self, model: str) -> int | None:
        models = await attempt(self._models(), "/v1/models", self._look_timeout_s)
        holds_mb = self._config.holds_mb
        if isinstance(models, RuntimeFailure) or holds_mb is None or wire.served_name(models, model) is None:
            return None
        return holds_mb * MB

    def load_options(self, work: Work) -> str:  # noqa: ARG002 (they were chosen when it was started)
        return ""

    async def load(self, model: str, *, on_cpu: bool, work: Work | None = None) -> None:  # noqa: ARG002 (it has one model)
        """Wake it, where it sleeps. After a sleep of level 2 its weights are read again before it is used: awake alone
        it would answer from memory that holds nothing."""
        await self._check_served(model)
        if not await self._asleep():
            return
        try:
            if self._config.release == "sleep2":
                await self._http.tell("/wake_up?tags=weights", {})
                await self._http.tell("/collective_rpc", {"method": "reload_weights"})
                await self._http.tell("/wake_up?tags=kv_cache", {})
            else:
                await self._http.tell("/wake_up", {})
        except RuntimeFailure as failure:
            if failure.status is None:
                raise
            raise RuntimeFailure(Reason.LOAD_FAILED, failure.detail, status=failure.status) from failure

    def run(
        self,
        model: str,
        task: Task,
        work: Work,
        *,
        on_cpu: bool,  # noqa: ARG002 (where its model is was chosen when it was started)
        keep_alive_s: int | None = None,  # noqa: ARG002 (the server keeps its model)
    ) -> AsyncGenerator[Token | Done]:
        name = wire.served_name(self._listed, model) or model
        check = partial(self._check_answered, model)
        match task:
            case "generate":
                return openai_run.complete(self._http, name, wire.settings(work), work, check)
            case "chat":
                return openai_run.chat(self._http, name, wire.settings(work), work, check)
            case "embed":
                return openai_run.embed(self._http, name, work, check)
            case "workflow" | "analysis":
                raise RuntimeFailure(Reason.UNSUPPORTED_TASK, f"a vLLM server does no {task}")

    async def release(self, model: str | None) -> None:  # noqa: ARG002 (it has one model, and sleeps as a whole)
        if self._config.release == "none":
            raise RuntimeFailure(Reason.NOT_RELEASABLE, f"the registry forbids {self._config.name} to be put to sleep")
        level = 2 if self._config.release == "sleep2" else 1
        try:
            await self._http.tell(f"/sleep?level={level}", {})
        except RuntimeFailure as failure:
            if failure.status is None:
                raise
            hint = "; it sleeps only with --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1" * (failure.status == 404)
            raise RuntimeFailure(Reason.RELEASE_FAILED, failure.detail + hint, status=failure.status) from failure

    async def pull(self, model: str) -> AsyncGenerator[PullProgress]:
        raise RuntimeFailure(
            Reason.MODEL_MISSING, f"a vLLM server cannot fetch {model}: it has what it was started with"
        )
        yield  # what makes it a generator

    async def signs(self, model: str) -> Signs:  # noqa: ARG002 (it has one model)
        """Its metrics say whether any request runs or waits."""
        metrics = await attempt(self._http.text("/metrics"), "/metrics", self._look_timeout_s)
        return Signs(activity=wire.activity(metrics))

    async def close(self) -> None:
        await self._http.close()

    async def _models(self) -> wire.Models:
        models = await self._http.get("/v1/models", wire.models_decoder)
        believable([ResidentModel(model=served.id) for served in models.data], "/v1/models")
        wire.own_names(models)
        self._listed = models
        return models

    async def _asleep(self) -> bool:
        try:
            return (await self._http.get("/is_sleeping", wire.sleeping_decoder)).is_sleeping
        except RuntimeFailure as failure:
            if wire.cannot_sleep(failure):
                return False
            raise

    async def _check_served(self, model: str) -> None:
        """Raise LOAD_FAILED where it serves others than ``model``."""
        models = await self._models()
        if wire.served_name(models, model) is None:
            has = ", ".join(served.id for served in models.data) or "no model"
            raise RuntimeFailure(Reason.LOAD_FAILED, f"{self._config.name} serves {has}, and cannot load {model}")

    async def _check_answered(self, model: str, answered: str | None) -> None:
        """Raise where the answer came from another model. It signs with the first of its names, whichever was asked."""
        if answered is None or same_model(answered, model):
            return
        own = wire.own_names(await self._models())
        if not all(any(same_model(name, one) for one in own) for name in (model, answered)):
            raise RuntimeFailure(Reason.RUNTIME_BAD_REPLY, f"asked {model}, answered by {answered}")
