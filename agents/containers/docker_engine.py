"""The Docker engine of this host, under the contract of ``port.ContainerEngine``.

Every container has two threads of its own, one for looks and one for acts: a call that hangs (an engine that cannot
stop a container whose driver is stuck) keeps no other container's calls waiting, and is not waited for longer than
its limit.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
import structlog
from ulid import ULID

from gpukeeper.agents.containers.docker_exec import DockerExec, Running, open_stream
from gpukeeper.agents.containers.port import ContainerFailure, ContainerState, Exec, Status
from gpukeeper.agents.devices.lane import Lane, LaneClosed, LaneStuck
from gpukeeper.events.clock import now_rfc3339

if TYPE_CHECKING:
    from gpukeeper.agents.containers.docker_door import Door

_log = structlog.get_logger("gpukeeper.containers")

T = TypeVar("T")

DEFAULT_URL = "unix:///var/run/docker.sock"
ANSWER_S = 3.0
#: Starting waits for the driver's hooks, which take long on a machine that has just come up.
START_S = 60.0
#: How long a container may take to end by itself before the engine ends it.
STOP_GRACE_S = 10
_STOP_MARGIN_S = 20.0
_CLOSE_S = 1.0
_ENGINE = ""
_STATUSES: dict[str, Status] = {
    "created": "created",
    "running": "running",
    "paused": "paused",
    "restarting": "restarting",
    "removing": "removing",
    "exited": "exited",
    "dead": "dead",
}
_MARK = "GPUKEEPER_RUN"
#: Ends every process that carries the mark, which children inherit. Needs ``sh`` and ``grep`` in the image.
_KILL_SCRIPT = (
    f'for d in /proc/[0-9]*; do if grep -qs "{_MARK}=$0" "$d/environ"; then kill -KILL "${{d#/proc/}}"; fi; done'
)


class _Health(msgspec.Struct, frozen=True):
    Status: str | None = None


class _State(msgspec.Struct, frozen=True):
    Status: str
    ExitCode: int | None = None
    OOMKilled: bool | None = None
    Error: str = ""
    StartedAt: str | None = None
    Health: _Health | None = None


class _Inspected(msgspec.Struct, frozen=True):
    Id: str
    State: _State
    RestartCount: int | None = None
    Created: str | None = None


class _Prepared(msgspec.Struct, frozen=True):
    Id: Annotated[str, msgspec.Meta(pattern="^[0-9a-zA-Z]{1,128}$")]


class _ExecState(msgspec.Struct, frozen=True):
    Running: bool
    ExitCode: int | None = None


class _FileStat(msgspec.Struct, frozen=True):
    size: int


def engine_url(environ: Mapping[str, str]) -> str:
    """Where the engine is: ``$DOCKER_HOST``, else the usual socket."""
    return environ.get("DOCKER_HOST") or DEFAULT_URL


class DockerEngine:
    """Acts on the containers ``listed``, and on no other.

    Args:
        listed: the names that the registry gives.
        base_url: of the engine; ``$DOCKER_HOST`` or the usual socket where None.
        answer_s: how long a look may take.
    """

    def __init__(self, listed: Iterable[str], *, base_url: str | None = None, answer_s: float = ANSWER_S) -> None:
        self._listed = frozenset(listed)
        self._base_url = base_url or engine_url(os.environ)
        self._answer_s = answer_s
        self._lanes: dict[tuple[str, str], tuple[Lane, list[Door]]] = {}
        self._api_version = ""

    async def version(self) -> str:
        def ask(client: Any) -> str:
            from gpukeeper.agents.containers.docker_door import version_words

            return version_words(client)

        return f"{await self._call(_ENGINE, ask)} at {self._base_url}"

    async def inspect(self, name: str) -> ContainerState:
        answer = await self._look(name, lambda client: client.inspect_container(name))
        return read_state(name, answer, now_rfc3339())

    async def start(self, name: str) -> None:
        await self._act(name, lambda client: client.start(name), START_S)

    async def stop(self, name: str) -> None:
        limit_s = STOP_GRACE_S + _STOP_MARGIN_S
        await self._act(name, lambda client: client.stop(name, timeout=STOP_GRACE_S), limit_s)

    async def restart(self, name: str) -> None:
        limit_s = STOP_GRACE_S + START_S
        await self._act(name, lambda client: client.restart(name, timeout=STOP_GRACE_S), limit_s)

    async def pause(self, name: str) -> None:
        await self._act(name, lambda client: client.pause(name), self._answer_s)

    async def unpause(self, name: str) -> None:
        await self._act(name, lambda client: client.unpause(name), self._answer_s)

    async def file_bytes(self, name: str, path: str) -> int | None:
        def ask(client: Any) -> Any:
            stream, stat = client.get_archive(name, path)
            stream.close()
            return stat

        try:
            stat = await self._look(name, ask)
        except ContainerFailure as failure:
            if failure.fault == "missing":
                return None
            raise
        size = _converted(stat, _FileStat, name).size
        return size if size > 0 else None

    async def exec(self, name: str, command: Sequence[str]) -> Exec:
        mark = str(ULID())
        prepared = await self._prepare(name, command, {_MARK: mark})

        async def look() -> Running | None:
            return await self._exec_state(name, prepared)

        async def end() -> None:
            await self._end_marked(name, mark)

        try:
            async with _limit(self._answer_s, f"starting a program in {name}"):
                reader, writer = await open_stream(self._base_url, prepared, self._api_version)
        except BaseException:
            # Nobody knows whether it has begun.
            await _as_far_as_it_goes(end())
            raise
        return DockerExec(reader, writer, look=look, end=end)

    async def close(self) -> None:
        lanes, self._lanes = self._lanes, {}
        await asyncio.gather(*(self._give_up(lane, doors) for lane, doors in lanes.values()))

    # --- one door for each container and purpose

    async def _look(self, name: str, work: Callable[[Any], T]) -> T:
        return await self._call(self._named(name), work)

    async def _act(self, name: str, work: Callable[[Any], object], limit_s: float) -> None:
        await self._call(self._named(name), work, purpose="act", limit_s=limit_s)

    def _named(self, name: str) -> str:
        """``name``, if the registry has it. The only way to any container leads through here.

        Raises:
            ContainerFailure: it is not listed, and so never touched.
        """
        if name not in self._listed:
            raise ContainerFailure("unlisted", f"the container {name} is not in this host's registry: never touched")
        return name

    async def _call(
        self,
        name: str,
        work: Callable[[Any], T],
        *,
        purpose: Literal["look", "act"] = "look",
        limit_s: float | None = None,
    ) -> T:
        limit_s = self._answer_s if limit_s is None else limit_s
        if (name, purpose) not in self._lanes:
            self._lanes[name, purpose] = (Lane(f"docker {purpose} {name}"), [])
        lane, doors = self._lanes[name, purpose]

        def ask() -> T:
            from gpukeeper.agents.containers.docker_door import Door

            if not doors:
                doors.append(Door(self._base_url, answer_s=self._answer_s))
            return doors[0].ask(work, more_s=limit_s)

        try:
            return await lane.call(ask, limit_s=limit_s)
        except LaneStuck as stuck:
            raise ContainerFailure("slow", f"the engine at {self._base_url}: {stuck.message}") from stuck
        except LaneClosed as closed:
            raise ContainerFailure("absent", "the connection to the engine was given up") from closed

    async def _give_up(self, lane: Lane, doors: list[Door]) -> None:
        def close() -> None:
            for door in doors:
                door.close()

        try:
            await lane.call(close, limit_s=_CLOSE_S)
        except LaneStuck:
            return  # the thread is a daemon: it ends with the process, and its connection too
        await lane.close(limit_s=_CLOSE_S)

    # --- programs

    async def _prepare(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> str:
        def ask(client: Any) -> tuple[Any, str]:
            answer = client.exec_create(name, list(command), stdin=True, environment=dict(environment))
            return answer, client.api_version

        answer, self._api_version = await self._look(name, ask)
        return _converted(answer, _Prepared, name).Id

    async def _exec_state(self, name: str, exec_id: str) -> Running | None:
        try:
            answer = await self._look(name, lambda client: client.exec_inspect(exec_id))
        except ContainerFailure as failure:
            if failure.fault == "missing":
                return None
            raise
        said = _converted(answer, _ExecState, name)
        return Running(running=said.Running, exit_code=said.ExitCode)

    async def _end_marked(self, name: str, mark: str) -> None:
        exec_id = await self._prepare(name, ("sh", "-c", _KILL_SCRIPT, mark), {})
        async with _limit(self._answer_s, "ending a program"):
            reader, writer = await open_stream(self._base_url, exec_id, self._api_version)
            try:
                await reader.read()
            finally:
                writer.close()


def read_state(name: str, answer: object, read_at: str) -> ContainerState:
    """What ``docker inspect`` says of one container.

    Raises:
        ContainerFailure: the answer is not what the protocol says.
    """
    said = _converted(answer, _Inspected, name)
    state = said.State
    known: Status | None = _STATUSES.get(state.Status)
    return ContainerState(
        name=name,
        read_at=read_at,
        status=known or "unknown",
        id=said.Id,
        restart_count=said.RestartCount,
        created_at=said.Created,
        started_at=state.StartedAt,
        exit_code=None if known in ("created", "running", "paused") and not state.Error else state.ExitCode,
        oom_killed=state.OOMKilled,
        health=None if state.Health is None or state.Health.Status in (None, "none") else state.Health.Status,
        error=state.Error if known else f"the engine calls its state {state.Status!r}",
    )


@asynccontextmanager
async def _limit(limit_s: float, doing: str) -> AsyncGenerator[None]:
    """At most ``limit_s`` seconds, or :class:`ContainerFailure`."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError as late:
        raise ContainerFailure("slow", f"{doing} took longer than {limit_s:g} s") from late


async def _as_far_as_it_goes(ending: Awaitable[None]) -> None:
    try:
        await ending
    except ContainerFailure as failure:
        _log.warning("program_not_ended", why=failure.detail)


def _converted(answer: object, kind: type[T], name: str) -> T:
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:
        raise ContainerFailure("bad_reply", f"what the engine says of {name} cannot be read: {error}") from error
