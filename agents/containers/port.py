"""What a container engine offers, what it says about a container, and how it fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from gpukeeper.events.errors import GpukeeperError
from gpukeeper.events.reasons import Reason

#: The engine's own words, and two of ours: ``missing``, no container has that name; ``unknown``, nobody could say.
Status = Literal["created", "running", "paused", "restarting", "removing", "exited", "dead", "missing", "unknown"]

#: What kind of failure it was. ``absent``: no engine there; ``denied``: no rights; ``too_old``: its API;
#: ``slow``: no answer in time; ``missing``: no such container; ``unlisted``: the registry does not name it;
#: ``refused``: the engine's own words; ``bad_reply``: not what its protocol says.
Fault = Literal["absent", "denied", "too_old", "slow", "missing", "unlisted", "refused", "bad_reply"]


class ContainerFailure(GpukeeperError):
    """A container engine did not do what was asked.

    Fields: ``reason`` from the closed list, ``fault`` for code, ``detail`` in words.
    """

    code = "container_failure"

    def __init__(self, fault: Fault, detail: str, *, reason: Reason = Reason.CONTAINER_ENGINE) -> None:
        super().__init__(f"{reason}: {detail}", reason=reason, fault=fault, detail=detail)
        self.reason = reason
        self.fault: Fault = fault
        self.detail = detail


class ContainerState(msgspec.Struct, frozen=True, kw_only=True):
    """One look at one container. ``None`` is unknown. Times are RFC 3339 in UTC."""

    name: str
    read_at: str
    status: Status
    #: The engine's id: another container of the same name has another.
    id: str | None = None
    #: How often the engine started it again by itself since somebody last started it.
    restart_count: int | None = None
    created_at: str | None = None
    started_at: str | None = None
    exit_code: int | None = None
    oom_killed: bool | None = None
    #: What its own health check says, where it has one: ``starting``, ``healthy``, ``unhealthy``.
    health: str | None = None
    #: Why it did not start, as the engine said it; or why the state is unknown.
    error: str = ""
    #: Why it counts as crash-looping; None where it does not, as far as known.
    crash_looping: str | None = None


class Exec(Protocol):
    """A program that was started inside a container, with its input and output."""

    async def write(self, data: bytes) -> None:
        """Send ``data`` to its standard input.

        Raises:
            ContainerFailure: it has ended, or the engine went away.
        """
        ...

    async def line(self) -> bytes | None:
        """The next line of its standard output without its end, or None at the end. One caller at a time.

        Raises:
            ContainerFailure: a line is too long, or the engine went away.
        """
        ...

    @property
    def complaint(self) -> str:
        """The last of what it wrote to standard error, in one bounded line."""
        ...

    async def exit_code(self) -> int | None:
        """What it ended with; None while it runs, or where nobody can say any more. Never raises."""
        ...

    async def kill(self) -> bool:
        """End it and all that it started, within a few seconds. Returns whether that is proven. Never raises.

        May be called again.
        """
        ...

    async def ended(self) -> bool:
        """Whether it is proven to have ended. Never raises."""
        ...


class ContainerEngine(Protocol):
    """The engine of this host. Every call is bounded, and acts only on containers that the registry names.

    Raises:
        ContainerFailure: from every method that does not say otherwise.
    """

    async def version(self) -> str:
        """The engine in words, such as ``20.10.24 (API 1.41) at /var/run/docker.sock``."""
        ...

    async def inspect(self, name: str) -> ContainerState:
        """What the container is like now. ``crash_looping`` is left to those who look several times."""
        ...

    async def start(self, name: str) -> None:
        """Start it. No error where it runs."""
        ...

    async def stop(self, name: str) -> None:
        """Stop it, by force after the engine's grace. No error where it does not run."""
        ...

    async def restart(self, name: str) -> None:
        """Stop it and start it."""
        ...

    async def pause(self, name: str) -> None:
        """Freeze its processes. They keep their memory, on every device."""
        ...

    async def unpause(self, name: str) -> None:
        """Let them go on."""
        ...

    async def exec(self, name: str, command: Sequence[str]) -> Exec:
        """Start ``command`` inside the running container."""
        ...

    async def file_bytes(self, name: str, path: str) -> int | None:
        """The size of a file inside the container; None where there is no such file."""
        ...

    async def close(self) -> None:
        """Give up connections. May be called twice. Never raises."""
        ...
