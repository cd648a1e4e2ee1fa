"""A container that only holds memory: it runs no jobs, and may be stopped for those of others where that is allowed.

Pausing is no release: the processes are frozen, and keep all that they hold on every device.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from gpukeeper.agents.config import RuntimeConfig
from gpukeeper.agents.containers.port import ContainerFailure, ContainerState
from gpukeeper.agents.containers.standing import trouble
from gpukeeper.agents.containers.steward import Steward
from gpukeeper.agents.runtimes.attempts import LOOK_TIMEOUT_S, attempt, utc_now
from gpukeeper.agents.runtimes.http import RuntimeHttp
from gpukeeper.agents.runtimes.port import Done, PullProgress, RuntimeFailure, Signs, Token
from gpukeeper.events.readings import Activity, Releases, ResidentModel, RuntimeReading
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import Task, Work


class PlainContainer:
    """One container of the registry, under the contract of ``port.Provider``.

    Args:
        config: its entry. With a ``url``, that must answer 200 too.
        steward: of this host's containers.
        container: its name.
        look_timeout_s: how long the URL may take to answer.
    """

    def __init__(
        self, config: RuntimeConfig, steward: Steward, container: str, *, look_timeout_s: float = LOOK_TIMEOUT_S
    ) -> None:
        self._config = config
        self._steward = steward
        self._container = container
        self._look_timeout_s = look_timeout_s
        self._http = RuntimeHttp(config.url) if config.url else None

    @property
    def config(self) -> RuntimeConfig:
        return self._config

    @property
    def loads_models(self) -> bool:
        return False

    @property
    def releases(self) -> Releases:
        return "all" if self._config.release == "stop" else "none"

    @property
    def pulls(self) -> bool:
        return False

    @property
    def reports_vram(self) -> bool:
        return False

    async def look(self) -> RuntimeReading:
        """As the port says. Residency is unknown while it runs: nobody but its processes' memory tells."""
        read_at = utc_now()
        state, answer = await asyncio.gather(self._steward.look(self._container), self._answers())
        problem = _problem(state) or (None if answer is None else str(answer))
        stopped = state.status in ("created", "exited", "dead", "missing")
        return RuntimeReading(
            runtime=self._config.name,
            read_at=read_at,
            healthy=problem is None,
            activity=self._activity(state),
            resident=() if stopped else None,
            models=(),
            error=problem,
        )

    async def residency(self) -> RuntimeReading:
        return await self.look()

    def find(self, reading: RuntimeReading, model: str) -> ResidentModel | None:  # noqa: ARG002 (it has no models)
        return None

    async def model_bytes(self, model: str) -> int | None:  # noqa: ARG002 (it has no models)
        return None

    def load_options(self, work: Work) -> str:  # noqa: ARG002 (it loads nothing)
        return ""

    async def load(self, model: str, *, on_cpu: bool, work: Work | None = None) -> None:  # noqa: ARG002 (it loads nothing)
        raise RuntimeFailure(
            Reason.LOAD_FAILED, f"{self._config.name} has no models, nor {model}: it only holds memory"
        )

    async def run(
        self,
        model: str,
        task: Task,
        work: Work,  # noqa: ARG002 (it runs no jobs)
        *,
        on_cpu: bool,  # noqa: ARG002
        keep_alive_s: int | None = None,  # noqa: ARG002
    ) -> AsyncGenerator[Token | Done]:
        raise RuntimeFailure(
            Reason.UNSUPPORTED_TASK, f"{self._config.name} only holds memory: it runs no {task} of {model}"
        )
        yield  # never reached: it makes this an iterator, as the contract has it

    async def release(self, model: str | None) -> None:
        """Stop the container, where its entry allows that. Returns when the engine says that it has stopped."""
        if self.releases == "none":
            raise RuntimeFailure(Reason.NOT_RELEASABLE, f'{self._config.name}: its entry does not say release = "stop"')
        if model is not None:
            raise RuntimeFailure(
                Reason.NOT_RELEASABLE, f"{self._config.name} lets go of all or nothing, not of {model}"
            )
        try:
            await self._steward.engine.stop(self._container)
        except ContainerFailure as failure:
            raise RuntimeFailure(Reason.RELEASE_FAILED, failure.detail) from failure

    async def pull(self, model: str) -> AsyncGenerator[PullProgress]:
        raise RuntimeFailure(Reason.MODEL_MISSING, f"{self._config.name} fetches nothing, nor {model}")
        yield  # never reached: it makes this an iterator, as the contract has it

    async def signs(self, model: str) -> Signs:  # noqa: ARG002 (it has no models)
        return Signs(activity=self._activity(await self._steward.look(self._container)), resident=False)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def _answers(self) -> RuntimeFailure | None:
        """None where its URL answers 200, or where it has none."""
        if self._http is None:
            return None
        return await attempt(self._http.check(""), self._config.url, self._look_timeout_s)

    def _activity(self, state: ContainerState) -> Activity:
        """Nobody can look inside; only who says that nobody else uses it knows that it idles."""
        return "idle" if self._config.sole_client and state.status != "unknown" else "unknown"


def _problem(state: ContainerState) -> str | None:
    """Why it is not healthy, in words."""
    why = trouble(state)
    if why is not None:
        return why
    if state.status == "unknown":
        return f"its container {state.name} cannot be looked at: {state.error or 'no further word'}"
    if state.health in (None, "healthy"):
        return None
    return f"the health check of its container {state.name} says {state.health}"
