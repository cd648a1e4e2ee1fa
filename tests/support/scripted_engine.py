"""A container engine that says what a test says."""

from __future__ import annotations

from collections.abc import Sequence

from gpukeeper.agents.containers.port import ContainerFailure, ContainerState, Exec, Status


class ScriptedEngine:
    """One container, as a test says; acts are written down and change nothing by themselves."""

    def __init__(self) -> None:
        self.status: Status = "running"
        self.restart_count = 0
        self.created_at = "2020-01-01T00:00:00Z"
        self.id = "c1"
        self.failure: ContainerFailure | None = None
        self.acts: list[str] = []
        #: The status that the container has after an act; as before where none is named.
        self.after: dict[str, Status] = {}

    async def version(self) -> str:
        return "scripted"

    async def inspect(self, name: str) -> ContainerState:
        if self.failure is not None:
            raise self.failure
        return ContainerState(
            name=name,
            read_at="2026-01-01T12:00:00Z",
            status=self.status,
            id=self.id,
            restart_count=self.restart_count,
            created_at=self.created_at,
            exit_code=1,
        )

    async def _act(self, act: str) -> None:
        self.acts.append(act)
        self.status = self.after.get(act, self.status)

    async def start(self, name: str) -> None:
        await self._act("start")

    async def stop(self, name: str) -> None:
        await self._act("stop")

    async def restart(self, name: str) -> None:
        await self._act("restart")

    async def pause(self, name: str) -> None:
        await self._act("pause")

    async def unpause(self, name: str) -> None:
        await self._act("unpause")

    async def exec(self, name: str, command: Sequence[str]) -> Exec:
        raise ContainerFailure("refused", "nothing is scripted")

    async def file_bytes(self, name: str, path: str) -> int | None:
        return None

    async def close(self) -> None:
        return
