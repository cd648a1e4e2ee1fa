"""A llama.cpp server (``llama-server``): one process, one model, chosen when it was started.

It answers any model's name with the one it has, so what it serves is read and compared with what was asked.
It does not say how much of the model sits in VRAM; that is left to the device's own reading.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial

from gpukeeper.agents.config import RuntimeConfig
from gpukeeper.agents.runtimes import llamacpp_wire as wire
from gpukeeper.agents.runtimes import openai_chat, openai_run
from gpukeeper.agents.runtimes.attempts import LOOK_TIMEOUT_S, attempt, believable, utc_now
from gpukeeper.agents.runtimes.http import RuntimeHttp, decode, error_words
from gpukeeper.agents.runtimes.port import Done, PullProgress, RuntimeFailure, Signs, Token
from gpukeeper.events.modelnames import find_resident, same_model
from gpukeeper.events.readings import Releases, ResidentModel, RuntimeReading
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import JobResult, Task, Work


class LlamaCpp:
    """One plain llama.cpp server of the registry, under the contract of ``port.Provider``."""

    def __init__(self, config: RuntimeConfig, *, look_timeout_s: float = LOOK_TIMEOUT_S) -> None:
        self._config = config
        self._look_timeout_s = look_timeout_s
        self._http = RuntimeHttp(config.url)
        #: The model file that the last look saw, and the ids that were served then: it names the model too.
        self._file: tuple[tuple[str, ...], str | None] = ((), None)

    @property
    def config(self) -> RuntimeConfig:
        return self._config

    @property
    def loads_models(self) -> bool:
        return False

    @property
    def releases(self) -> Releases:
        return "none"

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
        path = None if isinstance(props, RuntimeFailure) else props.model_path
        self._file = (wire.ids(models), path)
        return RuntimeReading(
            runtime=name,
            read_at=read_at,
            healthy=True,
            activity=wire.activity(slots),
            resident=tuple(wire.resident(served) for served in models.data),
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
            resident=tuple(wire.resident(served) for served in models.data),
            models=wire.names(models, path if ids == wire.ids(models) else None),
        )

    def find(self, reading: RuntimeReading, model: str) -> ResidentModel | None:
        resident = reading.resident or ()
        if len(resident) == 1 and any(same_model(name, model) for name in reading.models or ()):
            return resident[0]
        return find_resident(resident, model)

    async def model_bytes(self, model: str) -> int | None:
        served = await attempt(self._served(model), "/v1/models", self._look_timeout_s)
        return None if isinstance(served, RuntimeFailure) else wire.resident(served).size_bytes

    def load_options(self, work: Work) -> str:  # noqa: ARG002 (they were chosen when it was started)
        return ""

    async def load(self, model: str, *, on_cpu: bool, work: Work | None = None) -> None:  # noqa: ARG002 (it has one model)
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
        match task:
            case "generate":
                return self._generate(model, work)
            case "chat":
                return self._chat(model, work)
            case "embed":
                return self._embed(model, work)
            case "workflow" | "analysis":
                raise RuntimeFailure(Reason.UNSUPPORTED_TASK, f"a llama.cpp server does no {task}")

    async def release(self, model: str | None) -> None:  # noqa: ARG002 (it has one model, for life)
        raise RuntimeFailure(Reason.NOT_RELEASABLE, "a llama.cpp server keeps its model for life")

    async def pull(self, model: str) -> AsyncGenerator[PullProgress]:
        raise RuntimeFailure(Reason.MODEL_MISSING, f"a llama.cpp server cannot fetch {model}")
        yield  # what makes it a generator

    async def signs(self, model: str) -> Signs:  # noqa: ARG002 (it has one model)
        """Its slots say whether any of them works, where it was started with ``--slots``."""
        slots = await attempt(self._http.get("/slots", wire.slots_decoder), "/slots", self._look_timeout_s)
        return Signs(activity=wire.activity(slots))

    async def close(self) -> None:
        await self._http.close()

    async def _generate(self, model: str, work: Work) -> AsyncGenerator[Token | Done]:
        path = "/completion"
        body = {**wire.settings(work), "model": model, "prompt": work.prompt, "stream": True}
        pieces: list[str] = []
        async with self._http.stream(path, body) as lines:
            async for line in lines:
                data = openai_chat.sse_data(line, path)
                if data is None:
                    continue
                record = decode(data, wire.completion_decoder, path)
                if record.error is not None:
                    raise RuntimeFailure(Reason.RUNTIME_ERROR, f"{path}: {error_words(record.error)}")
                if record.content:
                    pieces.append(record.content)
                    yield Token(record.content)
                if record.stop:
                    await lines.finish()
                    await self._check_answered(model, record.model)
                    yield Done(
                        JobResult(
                            text="".join(pieces),
                            finish_reason=wire.finish(record),
                            prompt_tokens=record.tokens_evaluated,
                            completion_tokens=record.tokens_predicted,
                            model=record.model,
                        )
                    )
                    return
        raise RuntimeFailure(Reason.RUNTIME_CUT, f"{path}: the stream ended without its last record")

    def _chat(self, model: str, work: Work) -> AsyncGenerator[Token | Done]:
        settings = wire.settings(work)
        if (limit := settings.pop("n_predict", None)) is not None:
            settings["max_tokens"] = limit
        return openai_run.chat(self._http, model, settings, work, partial(self._check_answered, model))

    def _embed(self, model: str, work: Work) -> AsyncGenerator[Token | Done]:
        return openai_run.embed(self._http, model, work, partial(self._check_answered, model))

    async def _models(self) -> wire.Models:
        models = await self._http.get("/v1/models", wire.models_decoder)
        believable([wire.resident(served) for served in models.data], "/v1/models")
        return models

    async def _served(self, model: str) -> wire.Served:
        """What the server says about ``model``; raises LOAD_FAILED where it serves another."""
        models = await self._http.get("/v1/models", wire.models_decoder)
        for served in models.data:
            if any(same_model(name, model) for name in (served.id, *(served.aliases or ()))):
                return served
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
