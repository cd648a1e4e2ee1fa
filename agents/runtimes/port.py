"""What every provider of a runtime offers, and how it fails."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from gpukeeper.agents.config import RuntimeConfig
from gpukeeper.events.errors import GpukeeperError
from gpukeeper.events.readings import RuntimeReading
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import JobResult, Task, Work


class RuntimeFailure(GpukeeperError):
    """A runtime did not do what was asked.

    Fields: ``reason`` from the closed list, ``detail`` in words, ``status`` the HTTP status where there was one.
    """

    code = "runtime_failure"

    def __init__(self, reason: Reason, detail: str, *, status: int | None = None) -> None:
        super().__init__(f"{reason}: {detail}", reason=reason, detail=detail, status=status)
        self.reason = reason
        self.detail = detail
        self.status = status


class Token(msgspec.Struct, frozen=True):
    """A piece of generated text, as it arrived."""

    text: str


class Done(msgspec.Struct, frozen=True):
    """The last thing a run yields."""

    result: JobResult


class Provider(Protocol):
    """One registered runtime.

    Every call is bounded: connecting by a few seconds, reading by the deadline of the caller, who cancels the task.
    """

    @property
    def config(self) -> RuntimeConfig:
        """The registry entry this provider stands for."""
        ...

    @property
    def loads_models(self) -> bool:
        """Whether :meth:`load` can bring in a model that is not resident (a plain llama.cpp server cannot)."""
        ...

    async def look(self) -> RuntimeReading:
        """Read health, activity, residency and the catalogue. Never raises: what failed is ``None`` and ``error``."""
        ...

    async def model_bytes(self, model: str) -> int | None:
        """How large the runtime says the model is, or None where it does not say."""
        ...

    async def load(self, model: str, *, on_cpu: bool) -> None:
        """Make ``model`` resident without doing any of a job's work.

        Raises:
            RuntimeFailure: the runtime refused or could not.
        """
        ...

    def run(
        self, model: str, task: Task, work: Work, *, keep_alive_s: int | None = None
    ) -> AsyncIterator[Token | Done]:
        """Do the work: zero or more :class:`Token`, then exactly one :class:`Done`.

        Closing the iterator early closes the connection, which is how the runtime is told to stop.

        Raises:
            RuntimeFailure: error status, an answer that is not the protocol's, an empty one, or one that was cut.
        """
        ...

    async def close(self) -> None:
        """Give up connections. May be called twice."""
        ...
