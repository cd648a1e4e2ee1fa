"""A llama.cpp server (``llama-server``): one process, one model, chosen when it was started; or a router of many.

Which of both it is shows in its list of models, and so after the first look.

It answers any model's name with the one it has, so what it serves is read and compared with what was asked.
It does not say how much of the model sits in VRAM; that is left to the device's own reading.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from gpukeeper.agents.config import RuntimeConfig
from gpukeeper.agents.runtimes import llamacpp_completion, openai_run
from gpukeeper.agents.runtimes import llamacpp_wire as wire
from gpukeeper.agents.runtimes.attempts import LOOK_TIMEOUT_S, attempt, believable, utc_now
from gpukeeper.agents.runtimes.http import RuntimeHttp
from gpukeeper.agents.runtimes.llamacpp_router import Router
from gpukeeper.agents.runtimes.port import Done, PullProgress, RuntimeFailure, Signs, Token
from gpukeeper.events.modelnames import find_resident, same_model
from gpukeeper.events.readings import Releases, ResidentModel, RuntimeReading
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import Task, Work


class LlamaCpp:
    """One llama.cpp server of the registry, under the contract of ``port.Provider``."""

    def __init__(self, config: RuntimeConfig, *, look_timeout_s: float = LOOK_TIMEOUT_S) -> None:
        self._config = config
        self._look_timeout_s = look_timeout_s
        self._http = RuntimeHttp(config.url)
        #: The model file that the last look saw, and the ids that were served then: it names the model too.
        self._file: tuple[tuple[str, ...], str | None] = ((), None)
        self._router = Router(config.name, self._http, look_timeout_s)
        #: Whether the server is a router; None before it was asked.
        self._routes: bool | None = None

    @property
    def config(self) -> RuntimeConfig:
        return self._config

    @property
    def loads_models(self) -> bool:
        return bool(self._routes)

    @property
    def releases(self) -> Releases:
        return "model" if self._routes and self._config.release != "none" else "none"

    @property
    def pulls(self) -> bool:
        return False

    @property
    def reports_vram(self) -> bool:
        return False

    async def look(self) -> RuntimeReading:
        limit_s = self._look_timeout_s
        read_at = utc_now()
        health, slots, models, props = await asyncio.gather(
            attempt(self._http.get("/health", wire.health_decoder), "/health", limit_s),
            attempt(self._http.get("/slots", wire.slots_decoder), "/slots", limit_s),
            attempt(self._models(), "/v1/models", limit_s),
            attempt(self._http.get("/props", wire.props_decoder), "/props", limit_s),
        )
        name = self._config.name
        if isinstance(health, RuntimeFailure) or isinstance(models, RuntimeFailure):
            failed = health if isinstance(health, RuntimeFailure) else models
            return RuntimeReading(runtime=name, read_at=read_at, healthy=False, error=str(failed))
        if health.status != "ok":
            error = f"/health: status {health.status!r}"
            return RuntimeReading(runtime=name, read_at=read_at, healthy=False, error=error)
        path = None if self._routes or isinstance(props, RuntimeFailure) else props.model_path
        self._file = (wire.ids(models), path)
        return RuntimeReading(
            runtime=name,
            read_at=read_at,
            healthy=True,
            activity=await self._router.activity(models) if self._routes else wire.activity(slots),
            resident=self._resident(models),
            models=wire.names(models, path),
        )

    async def residency(self) -> RuntimeReading:
        read_at = utc_now()
        models = await attempt(self._models(), "/v1/models", self._look_timeout_s)
        name = self._config.name
        if isinstance(models, RuntimeFailure):
            return RuntimeReading(runtime=name, read_at=read_at, healthy=False, error=str(models))
        ids, path = self._file
        return RuntimeReading(
            runtime=name,
            read_at=read_at,
            healthy=True,
            resident=self._resident(models),
            models=wire.names(models, path if ids == wire.ids(models) else None),
        )

    def find(self, reading: RuntimeReading, model: str) -> ResidentModel | None:
        if self._routes:
            return self._router.find(reading, model)
        resident = reading.resident or ()
        if len(resident) == 1 and any(same_model(name, model) for name in reading.models or ()):
            return resident[0]
        return find_resident(resident, model)

    async def model_bytes(self, model: str) -> int | None:
        served = await attempt(self._served(model), "/v1/models", self._look_timeout_s)
        return None if isinstance(served, RuntimeFailure) else wire.resident(served).size_bytes

    def load_options(self, work: Work) -> str:  # noqa: ARG002 (they were chosen when it was started)
        return ""

    async def load(self, model: str, *, on_cpu: bool, work: Work | None = None) -> None:  # noqa: ARG002 (how was chosen when it was started)
        if await self._is_router():
            await self._router.load(model)
        else:
            await self._served(model)

    def run(
        self,
        model: str,
        task: Task,
        work: Work,
        *,
        on_cpu: bool,  # noqa: ARG002 (where its model is was chosen when it was started)
        keep_alive_s: int | None = None,  # noqa: ARG002 (the server keeps its model for life)
    ) -> AsyncGenerator[Token | Done]:
        if task in ("workflow", "analysis"):
            raise RuntimeFailure(Reason.UNSUPPORTED_TASK, f"a llama.cpp server does no {task}")
        return self._run(model, task, work)

    async def release(self, model: str | None) -> None:
        if not await self._is_router():
            raise RuntimeFailure(Reason.NOT_RELEASABLE, "a llama.cpp server keeps its model for life")
        if self.releases == "none":
            raise RuntimeFailure(Reason.NOT_RELEASABLE, f"{self._config.name}: its registry entry forbids releases")
        if model is None:
            raise RuntimeFailure(Reason.NOT_RELEASABLE, "a llama.cpp router lets go of one model at a time: name it")
        await self._router.release(model)

    async def pull(self, model: str) -> AsyncGenerator[PullProgress]:
        raise RuntimeFailure(Reason.MODEL_MISSING, f"a llama.cpp server cannot fetch {model}")
        yield  # what makes it a generator

    async def signs(self, model: str) -> Signs:
        """Its slots say whether any of them works, where it was started with ``--slots``."""
        if self._routes:
            return await self._router.signs(model)
        slots = await attempt(self._http.get("/slots", wire.slots_decoder), "/slots", self._look_timeout_s)
        return Signs(activity=wire.activity(slots))

    async def close(self) -> None:
        await self._http.close()

    async def _run(self, model: str, task: Task, work: Work) -> AsyncGenerator[Token | Done]:
        name, query = model, ""
        if await self._is_router():
            # It must not load for the work: nobody would look where the model went. One that was evicted is an error.
            name, query = self._router.id_of(model), "?autoload=false"
        check = partial(self._check_answered, model)
        match task:
            case "generate":
                doing = llamacpp_completion.generate(self._http, name, work, check, query=query)
            case "embed":
                doing = openai_run.embed(self._http, name, work, check, query=query)
            case _:
                settings = wire.settings(work)
                if (limit := settings.pop("n_predict", None)) is not None:
                    settings["max_tokens"] = limit
                doing = openai_run.chat(self._http, name, settings, work, check, query=query)
        async with aclosing(doing) as items:
            async for item in items:
                yield item

    async def _models(self) -> wire.Models:
        models = await self._http.get("/v1/models", wire.models_decoder)
        self._routes = wire.is_router(models)
        self._router.take(models)
        believable(self._resident(models), "/v1/models")
        return models

    def _resident(self, models: wire.Models) -> tuple[ResidentModel, ...]:
        return wire.routed(models) if self._routes else tuple(wire.resident(served) for served in models.data)

    async def _is_router(self) -> bool:
        if self._routes is None:
            await self._models()
        return bool(self._routes)

    async def _served(self, model: str) -> wire.Served:
        """What the server says about ``model``; raises LOAD_FAILED where it serves another."""
        models = await self._http.get("/v1/models", wire.models_decoder)
        for served in models.data:
            if any(same_model(name, model) for name in (served.id, *(served.aliases or ()))):
                return served
        if self._routes:
            raise RuntimeFailure(Reason.LOAD_FAILED, f"{self._config.name} lists no {model}")
        props = await attempt(self._http.get("/props", wire.props_decoder), "/props", self._look_timeout_s)
        path = None if isinstance(props, RuntimeFailure) else props.model_path
        if path and len(models.data) == 1 and same_model(path, model):
            return models.data[0]
        has = ", ".join(served.id for served in models.data) or "no model"
        raise RuntimeFailure(
            Reason.LOAD_FAILED,
            f"{self._config.name} serves {has} for life, and cannot load {model}",
        )

    async def _check_answered(self, model: str, answered: str | None) -> None:
        """Raise where the answer came from another model.

        Old servers put a fixed word into the answer, so what does not match is checked with the catalogue.
        """
        if answered is None or same_model(answered, model):
            return
        try:
            await self._served(model)
        except RuntimeFailure as failure:
            raise RuntimeFailure(
                Reason.RUNTIME_BAD_REPLY, f"asked {model}, answered by {answered}: {failure.detail}"
            ) from failure
