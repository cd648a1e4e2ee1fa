"""Looks at the containers of this host's runtimes, remembers their restarts, and carries out what operators ask."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime

import msgspec
from msgspec.structs import replace

from gpukeeper.agents.config import AgentConfig
from gpukeeper.agents.containers.crashloop import Observation, crash_loop, remember
from gpukeeper.agents.containers.docker_engine import DockerEngine
from gpukeeper.agents.containers.port import ContainerEngine, ContainerFailure, ContainerState
from gpukeeper.agents.containers.standing import trouble
from gpukeeper.events.clock import now, now_rfc3339
from gpukeeper.events.reasons import Reason
from gpukeeper.events.runtime import Act


class ActOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an act, as :class:`gpukeeper.events.runtime.Acted` tells it."""

    done: bool
    reason: Reason | None = None
    detail: str = ""


class Steward:
    """The containers that the registry of ``config`` names.

    Args:
        config: the registry, and when a container counts as crash-looping.
        engine: of this host. The steward closes it.
        monotonic_s: seconds of a clock that only goes forward.
    """

    def __init__(
        self,
        config: AgentConfig,
        engine: ContainerEngine,
        *,
        monotonic_s: Callable[[], float] = time.monotonic,
        wall: Callable[[], datetime] = now,
    ) -> None:
        self.engine = engine
        self._containers = {each.name: each.container for each in config.runtimes if each.container is not None}
        self._restarts = config.crash_loop_restarts
        self._window_s = config.crash_loop_window_s
        self._monotonic_s = monotonic_s
        self._wall = wall
        self._seen: dict[str, tuple[Observation, ...]] = {}
        self._ids: dict[str, str] = {}

    @classmethod
    def of_host(cls, config: AgentConfig, *, base_url: str | None = None) -> Steward:
        """With the Docker engine of this host, which is asked only when something is looked at."""
        listed = [each.container for each in config.runtimes if each.container is not None]
        return cls(config, DockerEngine(listed, base_url=base_url))

    def id_of(self, runtime: str) -> str | None:
        """The id of the runtime's container at the last look that found it; None where none did."""
        return self._ids.get(self._containers.get(runtime, ""))

    async def state_of(self, runtime: str) -> ContainerState | None:
        """The state of the runtime's container, for ``with_container``; None where the registry names none."""
        container = self._containers.get(runtime)
        return None if container is None else await self.look(container)

    async def look(self, container: str) -> ContainerState:
        """What the container is like now, crash-looping included. Bounded, and never raises: unknown is a state."""
        try:
            state = await self.engine.inspect(container)
        except ContainerFailure as failure:
            status = "missing" if failure.fault == "missing" else "unknown"
            state = ContainerState(name=container, read_at=now_rfc3339(), status=status, error=failure.detail)
        if state.id is not None:
            self._ids[container] = state.id
        return replace(state, crash_looping=self._crash_looping(state))

    async def perform(self, runtime: str, act: Act) -> ActOutcome:
        """Begin, stop or restart the container of a runtime, for an operator. Never raises; bounded.

        Done means seen: it is looked at again afterwards.
        """
        container = self._containers.get(runtime)
        if container is None:
            return _refused(Reason.NO_CONTAINER, f"the registry names no container for {runtime}")
        before = await self.look(container)
        if act != "stop" and before.crash_looping is not None:
            words = f"{container} is crash-looping: {before.crash_looping}; it is not started until that is repaired"
            return _refused(Reason.CRASH_LOOPING, words)
        if before.status == "missing":
            return _refused(Reason.CONTAINER_ENGINE, f"the container {container} does not exist")
        if before.status == "unknown":
            return _refused(Reason.CONTAINER_ENGINE, before.error)
        try:
            words = await self._do(act, container, before)
        except ContainerFailure as failure:
            return _refused(failure.reason, f"{act} of {container}: {failure.detail}")
        return await self._seen_after(act, container, words)

    async def close(self) -> None:
        """Give up the connection to the engine."""
        await self.engine.close()

    async def _do(self, act: Act, container: str, before: ContainerState) -> str:
        """Ask the engine for what ``act`` takes, and say what was done."""
        match act:
            case "stop":
                if before.status in ("exited", "created", "dead"):
                    return "was stopped already"
                if before.status == "paused":
                    # A frozen process cannot end when it is told to.
                    await self.engine.unpause(container)
                await self.engine.stop(container)
                return "stopped"
            case "restart":
                if before.status == "paused":
                    await self.engine.unpause(container)
                await self.engine.restart(container)
                return "restarted"
            case "begin":
                if before.status == "running":
                    return "was running already"
                if before.status == "paused":
                    await self.engine.unpause(container)
                    return "goes on after a pause"
                await self.engine.start(container)
                return "begun"

    async def _seen_after(self, act: Act, container: str, words: str) -> ActOutcome:
        after = await self.look(container)
        if after.status == "unknown":
            return _refused(Reason.CONTAINER_ENGINE, f"{container}: {words}, but what it is like now: {after.error}")
        if act == "stop":
            # One that was to be removed when it stops is gone by now.
            if after.status in ("exited", "created", "dead", "removing", "missing"):
                return ActOutcome(done=True, detail=f"{container}: {words}")
            return _refused(Reason.CONTAINER_ENGINE, f"{container} is {after.status} after it was stopped")
        if after.crash_looping is not None:
            return _refused(Reason.CRASH_LOOPING, f"{container} is crash-looping: {after.crash_looping}")
        if after.status == "running":
            return ActOutcome(done=True, detail=f"{container}: {words}")
        return _refused(Reason.CONTAINER_ENGINE, f"{words}, and {trouble(after) or after.status}")

    def _crash_looping(self, state: ContainerState) -> str | None:
        """Take a look into account, and say in words whether it loops. An unknown state changes nothing."""
        now_s = self._monotonic_s()
        if state.status == "missing":
            return None
        seen = self._seen.get(state.name, ())
        if state.restart_count is not None:
            if not seen or seen[-1].id != state.id:
                seen = self._made_within_window(state, now_s)
            newest = Observation(now_s, state.restart_count, state.status, state.id or "")
            seen = remember(seen, newest, restarts=self._restarts, window_s=self._window_s)
            self._seen[state.name] = seen
        found = crash_loop(seen, restarts=self._restarts, window_s=self._window_s, now_s=now_s)
        return None if found is None else found.words

    def _made_within_window(self, state: ContainerState, now_s: float) -> tuple[Observation, ...]:
        """At the first look at a container: one that was made within the window had not been restarted then."""
        try:
            made = datetime.fromisoformat(state.created_at or "")
            age_s = (self._wall() - made).total_seconds()
        except (ValueError, TypeError):
            return ()  # no time, or one without a zone: nothing is known of before
        if not 0 <= age_s <= self._window_s:
            return ()
        return (Observation(now_s - age_s, 0, "created", state.id or ""),)


def _refused(reason: Reason, detail: str) -> ActOutcome:
    return ActOutcome(done=False, reason=reason, detail=detail)
