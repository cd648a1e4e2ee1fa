"""A Hugging Face style server: ``/generate``, ``/generate_stream`` where it has it, ``/health``, ``/info``.

One process, one model. ``/discharge`` makes it let go of its memory; the next request brings the model back, so
a load is a request for one token. Whether it holds its model stands in ``/info`` (``loaded``) on servers that say so.
On others it counts as loaded while it is healthy, and as discharged from the discharge that was asked for here until
the next load or run: what its memory really does, the device's reading shows.

It does not say how much memory its model takes: see ``holds_mb`` of the registry, as for vLLM. A server that says it
computes on the CPU counts as having nothing in VRAM. Nor does it say whether it works: activity is unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from gpukeeper.agents.config import RuntimeConfig
from gpukeeper.agents.runtimes import huggingface_wire as wire
from gpukeeper.agents.runtimes.attempts import LOOK_TIMEOUT_S, attempt, believable, utc_now
from gpukeeper.agents.runtimes.http import RuntimeHttp
from gpukeeper.agents.runtimes.openai_chat import END, sse_data
from gpukeeper.agents.runtimes.port import Done, PullProgress, RuntimeFailure, Signs, Token
from gpukeeper.events.modelnames import all_names, find_resident, same_model
from gpukeeper.events.readings import Releases, ResidentModel, RuntimeReading
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import Task, Work

MB = 1_048_576


class HuggingFace:
    """One server of the registry, under the contract of ``port.Provider``."""

    def __init__(self, config: RuntimeConfig, *, look_timeout_s: float = LOOK_TIMEOUT_S) -> None:
        self._config = config
        self._look_timeout_s = look_timeout_s
        self._http = RuntimeHttp(config.url)
        #: A discharge was asked for, and neither load nor run since.
        self._discharged = False
        #: The server has no ``/generate_stream``: learned from its own answer.
        self._streams = True

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
        read_at = utc_now()
        health, info = await asyncio.gather(
            attempt(self._http.check("/health"), "/health", limit_s), attempt(self._info(), "/info", limit_s)
        )
        return self._reading(read_at, info, health if isinstance(health, RuntimeFailure) else None)

    async def residency(self) -> RuntimeReading:
        read_at = utc_now()
        return self._reading(read_at, await attempt(self._info(), "/info", self._look_timeout_s), None)

    def _reading(
        self, read_at: str, info: wire.Info | RuntimeFailure, unhealthy: RuntimeFailure | None
    ) -> RuntimeReading:
        name = self._config.name
        failed = unhealthy or (info if isinstance(info, RuntimeFailure) else None)
        if failed is not None or isinstance(info, RuntimeFailure):
            return RuntimeReading(runtime=name, read_at=read_at, healthy=False, error=str(failed))
        loaded = not self._discharged if info.loaded is None else info.loaded
        return RuntimeReading(
            runtime=name,
            read_at=read_at,
            healthy=True,
            resident=(self._row(info),) if loaded else (),
            models=all_names(info.model_id),
        )

    def _row(self, info: wire.Info) -> ResidentModel:
        holds_mb = self._config.holds_mb
        size = None if holds_mb is None else holds_mb * MB
        vram = 0 if size is not None and info.model_device_type == "cpu" else size
        return ResidentModel(model=info.model_id, size_bytes=size, vram_bytes=vram)

    def find(self, reading: RuntimeReading, model: str) -> ResidentModel | None:
        return find_resident(reading.resident or (), model)

    async def model_bytes(self, model: str) -> int | None:
        info = await attempt(self._info(), "/info", self._look_timeout_s)
        holds_mb = self._config.holds_mb
        if isinstance(info, RuntimeFailure) or holds_mb is None or not same_model(info.model_id, model):
            return None
        return holds_mb * MB

    def load_options(self, work: Work) -> str:  # noqa: ARG002 (they were chosen when it was started)
        return ""

    async def load(self, model: str, *, on_cpu: bool, work: Work | None = None) -> None:  # noqa: ARG002 (it has one model)
        """Bring the model back, where it was discharged, with a request for one token."""
        info = await self._served(model)
        if info.loaded or (info.loaded is None and not self._discharged):
            return
        body = {"inputs": ".", "parameters": {"max_new_tokens": 1}}
        try:
            await self._http.post("/generate", body, wire.either_decoder)
        except RuntimeFailure as failure:
            if failure.reason is Reason.RUNTIME_ERROR and (failure.status or 0) >= 500:
                raise RuntimeFailure(Reason.LOAD_FAILED, failure.detail, status=failure.status) from failure
            raise
        self._discharged = False

    def run(
        self,
        model: str,
        task: Task,
        work: Work,
        *,
        on_cpu: bool,  # noqa: ARG002 (where its model is was chosen when it was started)
        keep_alive_s: int | None = None,  # noqa: ARG002 (the server keeps its model)
    ) -> AsyncGenerator[Token | Done]:
        if task != "generate":
            raise RuntimeFailure(Reason.UNSUPPORTED_TASK, f"a Hugging Face server generates from a prompt, no {task}")
        return self._generate(model, work)

    async def release(self, model: str | None) -> None:  # noqa: ARG002 (it has one model)
        if self._config.release == "none":
            raise RuntimeFailure(Reason.NOT_RELEASABLE, f"the registry forbids {self._config.name} to be discharged")
        try:
            await self._http.tell("/discharge", {})
        except RuntimeFailure as failure:
            if failure.status is None:
                raise
            raise RuntimeFailure(Reason.RELEASE_FAILED, failure.detail, status=failure.status) from failure
        self._discharged = True

    async def pull(self, model: str) -> AsyncGenerator[PullProgress]:
        raise RuntimeFailure(Reason.MODEL_MISSING, f"{self._config.name} has what it was started with, not {model}")
        yield  # what makes it a generator

    async def signs(self, model: str) -> Signs:
        """It shows nothing of its work; whether it holds the model, where it says so."""
        info = await attempt(self._info(), "/info", self._look_timeout_s)
        if isinstance(info, RuntimeFailure) or info.loaded is None:
            return Signs()
        return Signs(resident=info.loaded and same_model(info.model_id, model))

    async def close(self) -> None:
        await self._http.close()

    async def _info(self) -> wire.Info:
        info = await self._http.get("/info", wire.info_decoder)
        believable([ResidentModel(model=info.model_id)], "/info")
        return info

    async def _served(self, model: str) -> wire.Info:
        """What the server says of itself; raises LOAD_FAILED where it serves another model."""
        info = await self._info()
        if not same_model(info.model_id, model):
            raise RuntimeFailure(
                Reason.LOAD_FAILED, f"{self._config.name} serves {info.model_id}, and cannot load {model}"
            )
        return info

    async def _generate(self, model: str, work: Work) -> AsyncGenerator[Token | Done]:
        """The answer names no model, so what it serves is compared with what was asked before anything is sent."""
        served = (await self._served(model)).model_id
        self._discharged = False
        body = {"inputs": work.prompt, "parameters": wire.parameters(work)}
        if self._streams:
            try:
                async with aclosing(self._streamed(body, served)) as stream:
                    async for item in stream:
                        yield item
                return
            except RuntimeFailure as failure:
                if failure.status != 404:
                    raise
                # It has no such path, and so did nothing: asked again without streaming, now and from here on.
                self._streams = False
        answer = wire.generated(await self._http.post("/generate", body, wire.either_decoder), "/generate")
        if answer.generated_text:
            yield Token(answer.generated_text)
        yield Done(wire.result(answer.generated_text, answer.details, served))

    async def _streamed(self, body: dict[str, Any], served: str) -> AsyncGenerator[Token | Done]:
        path = "/generate_stream"
        async with self._http.stream(path, body) as lines:
            async for line in lines:
                data = sse_data(line, path)
                if data is None or data == END:
                    continue
                record = wire.streamed(data, path)
                if record.token is not None and record.token.text and not record.token.special:
                    yield Token(record.token.text)
                if record.generated_text is not None:
                    await lines.finish()
                    yield Done(wire.result(record.generated_text, record.details, served))
                    return
        raise RuntimeFailure(Reason.RUNTIME_CUT, f"{path}: the stream ended without its last record")
