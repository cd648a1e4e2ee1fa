"""KataGo: its analysis engine, started inside the container that the registry names.

Loading starts the engine, which brings the network into VRAM and keeps it there: so where it sits can be proven
before a job's question is asked. The engine serves one job after another until it is released, which ends it. A run
that is left early ends it too, unless it answers others meanwhile: those would be lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

import structlog

from gpukeeper.agents.config import RuntimeConfig
from gpukeeper.agents.containers.port import ContainerFailure
from gpukeeper.agents.containers.standing import with_container
from gpukeeper.agents.containers.steward import Steward
from gpukeeper.agents.runtimes import katago_wire as wire
from gpukeeper.agents.runtimes.attempts import utc_now
from gpukeeper.agents.runtimes.katago_engine import AnalysisEngine
from gpukeeper.agents.runtimes.port import Done, PullProgress, RuntimeFailure, Signs, Token
from gpukeeper.events.readings import Releases, ResidentModel, RuntimeReading
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import JobResult, Task, Work

_log = structlog.get_logger("gpukeeper.katago")

MODEL = "katago"


class KataGo:
    """One container with KataGo, under the contract of ``port.Provider``.

    Args:
        config: its entry of the registry.
        steward: of this host's containers.
        container: its name.
    """

    def __init__(self, config: RuntimeConfig, steward: Steward, container: str) -> None:
        self._config = config
        self._steward = steward
        self._container = container
        self._names = tuple(dict.fromkeys((MODEL, config.name)))
        self._engine: AnalysisEngine | None = None
        #: Engines that were ended, as far as that is not proven yet.
        self._ending: list[AnalysisEngine] = []
        self._changing = asyncio.Lock()
        self._bytes: int | None = None

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
        return False

    async def look(self) -> RuntimeReading:
        """As the port says. What it holds and whether it works is known: the engine is ours, and no one else's."""
        state = await self._steward.look(self._container)
        known = state.status != "unknown"
        engine = self._living()
        rows = () if engine is None else (ResidentModel(model=MODEL, size_bytes=self._bytes),)
        reading = RuntimeReading(
            runtime=self._config.name,
            read_at=utc_now(),
            healthy=known,
            activity=(await self.signs(MODEL)).activity,
            resident=rows if known and not self._ending else None,
            models=self._names,
            error=None if known else state.error,
        )
        return with_container(reading, state) if known else reading

    async def residency(self) -> RuntimeReading:
        return await self.look()

    def find(self, reading: RuntimeReading, model: str) -> ResidentModel | None:
        return next(iter(reading.resident or ()), None) if model in self._names else None

    async def model_bytes(self, model: str) -> int | None:
        """The size of the network's file inside the container; in VRAM it takes a multiple of that."""
        path = wire.model_file(self._config.command)
        if path is None or model not in self._names:
            return None
        if self._bytes is None:
            try:
                self._bytes = await self._steward.engine.file_bytes(self._container, path)
            except ContainerFailure:
                return None  # unknown, which is what None says
        return self._bytes

    def load_options(self, work: Work) -> str:  # noqa: ARG002 (the command has them)
        return ""

    async def load(self, model: str, *, on_cpu: bool, work: Work | None = None) -> None:  # noqa: ARG002 (the command says)
        await self._loaded(model)

    async def run(
        self,
        model: str,
        task: Task,
        work: Work,
        *,
        on_cpu: bool,  # noqa: ARG002 (the command says where it computes)
        keep_alive_s: int | None = None,  # noqa: ARG002 (it stays until it is released)
    ) -> AsyncGenerator[Token | Done]:
        if task != "analysis" or work.analysis is None:
            raise RuntimeFailure(Reason.UNSUPPORTED_TASK, f"{self._config.name} analyses games: it does no {task}")
        engine = await self._loaded(model)
        question = engine.ask(work.analysis)
        answered = False
        try:
            while await question.partial():
                yield Token("")
            answered = True
        except RuntimeFailure as failure:
            answered = failure.reason in (Reason.RUNTIME_ERROR, Reason.UNSUPPORTED_TASK)
            raise
        finally:
            question.close()
            if not answered:
                await self._leave(engine, question.give_up)
        yield Done(JobResult(output=wire.output(question.lines, work.analysis), model=MODEL, finish_reason="stop"))

    async def release(self, model: str | None) -> None:
        """End the engine. It is refused while it answers."""
        if model is not None and model not in self._names:
            raise RuntimeFailure(Reason.RELEASE_FAILED, f"{self._config.name} has no {model}")
        if self.releases == "none":
            raise RuntimeFailure(Reason.NOT_RELEASABLE, f'{self._config.name}: its entry says release = "none"')
        async with self._changing:
            engine = self._living()
            if engine is not None and engine.asked:
                raise RuntimeFailure(Reason.OWNER_BUSY, f"{self._config.name} answers {engine.asked} analyses")
            if engine is not None:
                await self._end(engine)
        if self._ending:
            raise RuntimeFailure(Reason.RELEASE_FAILED, f"nothing proves that KataGo in {self._container} has ended")

    async def pull(self, model: str) -> AsyncGenerator[PullProgress]:
        raise RuntimeFailure(Reason.MODEL_MISSING, f"{self._config.name} fetches nothing, nor {model}")
        yield  # never reached: it makes this an iterator, as the contract has it

    async def signs(self, model: str) -> Signs:  # noqa: ARG002 (it has one model)
        for engine in tuple(self._ending):
            if await engine.program.ended() and engine in self._ending:
                self._ending.remove(engine)
        engine = self._living()
        busy = bool(self._ending) or self._changing.locked() or (engine is not None and engine.asked > 0)
        return Signs(activity="busy" if busy else "idle", resident=engine is not None)

    async def close(self) -> None:
        """End the engine: nobody else could use or end it."""
        async with self._changing:
            if self._engine is not None:
                await self._end(self._engine)

    # --- the engine

    def _living(self) -> AnalysisEngine | None:
        return self._engine if self._engine is not None and self._engine.alive else None

    async def _loaded(self, model: str) -> AnalysisEngine:
        """The engine, started where there is none.

        Raises:
            RuntimeFailure: LOAD_FAILED with KataGo's or the container engine's words.
        """
        if model not in self._names:
            raise RuntimeFailure(Reason.LOAD_FAILED, f"{self._config.name} has {MODEL} and no {model}")
        async with self._changing:
            engine = self._living()
            if engine is not None:
                return engine
            if self._engine is not None:
                await self._end(self._engine)
            await self.model_bytes(MODEL)
            try:
                program = await self._steward.engine.exec(self._container, self._config.command)
            except ContainerFailure as failure:
                raise RuntimeFailure(Reason.LOAD_FAILED, f"{self._container}: {failure.detail}") from failure
            engine = self._engine = AnalysisEngine(program)
            try:
                await engine.ready()
            except BaseException:
                # Not waited for any more, or broken: half loaded it would hold memory that nobody knows of.
                await self._end(engine)
                raise
            return engine

    async def _leave(self, engine: AnalysisEngine, give_up: Callable[[], Awaitable[None]]) -> None:
        """A question was left before its end."""
        if engine.asked:
            try:
                await give_up()
            except RuntimeFailure as failure:
                _log.warning("katago_ended_meanwhile", why=failure.detail)
            return
        async with self._changing:
            if engine is self._engine and not engine.asked:
                await self._end(engine)

    async def _end(self, engine: AnalysisEngine) -> None:
        """Kill it, and remember it until that is proven."""
        self._engine = None
        if not await engine.end():
            self._ending.append(engine)
