"""An Ollama server: it loads models by itself, and says how much of each it believes to be in VRAM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import Any

from gpukeeper.agents.config import RuntimeConfig
from gpukeeper.agents.runtimes import ollama_chat
from gpukeeper.agents.runtimes import ollama_wire as wire
from gpukeeper.agents.runtimes.attempts import LOOK_TIMEOUT_S, attempt, believable, utc_now
from gpukeeper.agents.runtimes.http import RuntimeHttp, decode, error_words
from gpukeeper.agents.runtimes.port import Done, PullProgress, RuntimeFailure, Signs, Token
from gpukeeper.events.modelnames import all_names, find_resident, same_model
from gpukeeper.events.readings import Releases, ResidentModel, RuntimeReading
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import JobResult, Task, Work

#: A load never asks for less: 0 would unload instead, and a few seconds could end before the work begins.
LOAD_KEEP_ALIVE_S_MIN = 300
#: More layers than any model has: asked for them all in VRAM, Ollama refuses where it would otherwise spill.
ALL_LAYERS = 999
#: Behind the words of a load that failed.
_WHY_REFUSED = "; it was asked for the whole model in VRAM, and not to spill (refuse_spill)"


class Ollama:
    """One Ollama of the registry, under the contract of ``port.Provider``."""

    def __init__(self, config: RuntimeConfig, *, look_timeout_s: float = LOOK_TIMEOUT_S) -> None:
        self._config = config
        self._look_timeout_s = look_timeout_s
        self._http = RuntimeHttp(config.url)

    @property
    def config(self) -> RuntimeConfig:
        return self._config

    @property
    def loads_models(self) -> bool:
        return True

    @property
    def releases(self) -> Releases:
        return "none" if self._config.release == "none" else "model"

    @property
    def pulls(self) -> bool:
        return True

    @property
    def reports_vram(self) -> bool:
        return True

    async def look(self) -> RuntimeReading:
        limit_s = self._look_timeout_s
        read_at = utc_now()
        ps, tags = await asyncio.gather(
            attempt(self._resident(), "/api/ps", limit_s),
            attempt(self._tags(), "/api/tags", limit_s),
        )
        failed = [str(answer) for answer in (ps, tags) if isinstance(answer, RuntimeFailure)]
        resident = None if isinstance(ps, RuntimeFailure) else ps
        names: tuple[str, ...] | None = None
        if not isinstance(tags, RuntimeFailure):
            names = tuple(dict.fromkeys(name for tag in tags for name in all_names(tag.named)))
        return RuntimeReading(
            runtime=self._config.name,
            read_at=read_at,
            healthy=resident is not None,
            resident=resident,
            models=names,
            error="; ".join(failed) or None,
        )

    async def residency(self) -> RuntimeReading:
        read_at = utc_now()
        ps = await attempt(self._resident(), "/api/ps", self._look_timeout_s)
        if isinstance(ps, RuntimeFailure):
            return RuntimeReading(runtime=self._config.name, read_at=read_at, healthy=False, error=str(ps))
        return RuntimeReading(runtime=self._config.name, read_at=read_at, healthy=True, resident=ps)

    def find(self, reading: RuntimeReading, model: str) -> ResidentModel | None:
        return find_resident(reading.resident or (), model)

    async def model_bytes(self, model: str) -> int | None:
        limit_s = self._look_timeout_s
        ps, tags = await asyncio.gather(
            attempt(self._resident(), "/api/ps", limit_s),
            attempt(self._tags(), "/api/tags", limit_s),
        )
        if not isinstance(ps, RuntimeFailure):
            row = find_resident(ps, model)
            if row is not None and row.size_bytes is not None and row.size_bytes > 0:
                return row.size_bytes
        if not isinstance(tags, RuntimeFailure):
            for tag in tags:
                if same_model(tag.named, model):
                    return wire.positive(tag.size)
        return None

    def load_options(self, work: Work) -> str:
        return wire.load_options(work)

    async def load(self, model: str, *, on_cpu: bool, work: Work | None = None) -> None:
        path = "/api/generate"
        options = wire.runner_options(work)
        refuses = self._place(options, on_cpu=on_cpu)
        keep_s = self._config.keep_alive_s
        body: dict[str, Any] = {
            "model": model,
            "stream": False,
            "keep_alive": keep_s if keep_s < 0 else max(keep_s, LOAD_KEEP_ALIVE_S_MIN),
        }
        if options:
            body["options"] = options
        try:
            answer = await self._http.post(path, body, wire.record_decoder)
        except RuntimeFailure as failure:
            if failure.reason is Reason.RUNTIME_ERROR and (failure.status or 0) >= 500:
                words = failure.detail + _WHY_REFUSED if refuses else failure.detail
                raise RuntimeFailure(Reason.LOAD_FAILED, words, status=failure.status) from failure
            raise
        if answer.error is not None:
            words = f"{path}: {error_words(answer.error)}"
            raise RuntimeFailure(Reason.LOAD_FAILED, words + _WHY_REFUSED if refuses else words)
        if not answer.done:
            raise RuntimeFailure(Reason.RUNTIME_BAD_REPLY, f"{path}: the answer to a load does not say it is done")

    def run(
        self, model: str, task: Task, work: Work, *, on_cpu: bool, keep_alive_s: int | None = None
    ) -> AsyncGenerator[Token | Done]:
        if task in ("workflow", "analysis"):
            raise RuntimeFailure(Reason.UNSUPPORTED_TASK, f"an Ollama does no {task}")
        options = wire.options(work)
        if on_cpu:
            # Ollama loads again when a request's ``num_gpu`` differs. One without takes the model as it is, which is
            # where it was proven to be, whoever loaded it.
            options["num_gpu"] = 0
        keep_s = self._config.keep_alive_s if keep_alive_s is None else keep_alive_s
        body: dict[str, Any] = {"model": model, "keep_alive": keep_s}
        if options:
            body["options"] = options
        return self._embed(body, work) if task == "embed" else self._stream(body, work, chat=task == "chat")

    def _place(self, options: dict[str, Any], *, on_cpu: bool) -> bool:
        """Say in ``options`` where the model goes. Whether Ollama was asked to refuse rather than to spill."""
        if on_cpu:
            options["num_gpu"] = 0
            return False
        if not self._config.refuse_spill or "num_gpu" in options:
            return False
        options["num_gpu"] = ALL_LAYERS
        return True

    async def release(self, model: str | None) -> None:
        if self.releases == "none":
            raise RuntimeFailure(Reason.NOT_RELEASABLE, f"{self._config.name}: its registry entry forbids releases")
        if model is None:
            raise RuntimeFailure(Reason.NOT_RELEASABLE, "an Ollama lets go of one model at a time: name it")
        path = "/api/generate"
        body = {"model": model, "keep_alive": 0, "stream": False}
        try:
            answer = await self._http.post(path, body, wire.record_decoder)
        except RuntimeFailure as failure:
            if failure.status is not None and failure.reason in (Reason.RUNTIME_ERROR, Reason.RUNTIME_BUSY):
                raise RuntimeFailure(Reason.RELEASE_FAILED, failure.detail, status=failure.status) from failure
            raise
        if answer.error is not None:
            raise RuntimeFailure(Reason.RELEASE_FAILED, f"{path}: {error_words(answer.error)}")
        if not answer.done:
            raise RuntimeFailure(Reason.RUNTIME_BAD_REPLY, f"{path}: the answer to a release does not say it is done")

    async def pull(self, model: str) -> AsyncGenerator[PullProgress]:
        path = "/api/pull"
        try:
            async with self._http.stream(path, {"model": model, "stream": True}) as lines:
                async for line in lines:
                    record = decode(line, wire.pull_decoder, path)
                    yield record.progress(path)
                    if record.status == "success":
                        await lines.finish()
                        return
        except RuntimeFailure as failure:
            if failure.status is not None and failure.reason is Reason.RUNTIME_ERROR:
                raise RuntimeFailure(Reason.PROVISION_FAILED, failure.detail, status=failure.status) from failure
            raise
        raise RuntimeFailure(Reason.RUNTIME_CUT, f"{path}: the stream ended without success")

    async def signs(self, model: str) -> Signs:
        """Ollama never says whether it works. It moves a model's ``expires_at`` on when the last request has ended.

        It takes a request for ended as soon as its client has left. The runner notices that at its next token, and so
        not before it has read the whole prompt (ollama#11889).
        """
        ps = await attempt(self._resident(), "/api/ps", self._look_timeout_s)
        if isinstance(ps, RuntimeFailure):
            return Signs()
        row = find_resident(ps, model)
        if row is None:
            return Signs(resident=False)
        return Signs(resident=True, last_end=None if row.stopping else row.expires_at)

    async def _resident(self) -> tuple[ResidentModel, ...]:
        ps = await self._http.get("/api/ps", wire.ps_decoder)
        return believable(wire.resident(ps, datetime.now(UTC)), "/api/ps")

    async def _tags(self) -> list[wire.Tag]:
        return wire.named_tags(await self._http.get("/api/tags", wire.tags_decoder))

    async def close(self) -> None:
        await self._http.close()

    async def _stream(self, body: dict[str, Any], work: Work, *, chat: bool) -> AsyncGenerator[Token | Done]:
        path = "/api/chat" if chat else "/api/generate"
        asked = {"messages": ollama_chat.messages(work)} if chat else {"prompt": work.prompt}
        pieces: list[str] = []
        calls: list[Any] = []
        async with self._http.stream(path, {**body, **asked, "stream": True}) as lines:
            async for line in lines:
                record = decode(line, wire.record_decoder, path)
                if record.error is not None:
                    raise RuntimeFailure(Reason.RUNTIME_ERROR, f"{path}: {error_words(record.error)}")
                text = record.text_of(chat=chat, path=path)
                calls += record.calls
                if text:
                    pieces.append(text)
                if text or record.thinks:
                    yield Token(text)
                if record.done:
                    await lines.finish()
                    yield Done(wire.result(record, "".join(pieces), calls, chat=chat))
                    return
        raise RuntimeFailure(Reason.RUNTIME_CUT, f"{path}: the stream ended without its last record")

    async def _embed(self, body: dict[str, Any], work: Work) -> AsyncGenerator[Token | Done]:
        path = "/api/embed"
        answer = await self._http.post(path, {**body, "input": work.input}, wire.embed_decoder)
        wanted = 1 if isinstance(work.input, str) else len(work.input or ())
        if len(answer.embeddings) != wanted:
            raise RuntimeFailure(
                Reason.RUNTIME_BAD_REPLY, f"{path}: {len(answer.embeddings)} embeddings for {wanted} inputs"
            )
        yield Done(JobResult(embeddings=answer.embeddings, prompt_tokens=answer.prompt_eval_count, model=answer.model))
