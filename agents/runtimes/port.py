"""What every provider of a runtime offers, and how it fails."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

import msgspec

from gpukeeper.agents.config import RuntimeConfig
from gpukeeper.events.errors import GpukeeperError
from gpukeeper.events.readings import Activity, Releases, ResidentModel, RuntimeReading
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import JobResult, Task, Work


class RuntimeFailure(GpukeeperError):
    """A runtime did not do what was asked.

    Fields: ``reason`` from the closed list, ``detail`` in words, ``status`` the HTTP status if there was one.
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


class PullProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a fetch is, as the runtime says it."""

    status: str
    completed_bytes: int | None = None
    total_bytes: int | None = None


class Signs(msgspec.Struct, frozen=True, kw_only=True):
    """What a runtime shows of its work on one model at one moment. What it does not show is unknown."""

    #: Whether it works for anybody, where it says so.
    activity: Activity = "unknown"
    #: Whether it holds the model; None where it did not say.
    resident: bool | None = None
    #: A mark that is another one once the last request for the model has ended, and is left alone while one is under
    #: way; None where it has none. It speaks of requests: what was still computed for one whose client has left shows
    #: in it only where the request had begun to answer.
    last_end: str | None = None


class Provider(Protocol):
    """One registered runtime.

    Every call is bounded: connecting by a few seconds, reading by the caller, who cancels at the deadline.
    """

    @property
    def config(self) -> RuntimeConfig:
        """The registry entry this provider stands for."""
        ...

    @property
    def loads_models(self) -> bool:
        """Whether :meth:`load` can bring in a model that is not resident: a llama.cpp server cannot."""
        ...

    @property
    def releases(self) -> Releases:
        """What :meth:`release` can give back, as configured: nothing, one model at a time, or all that it holds."""
        ...

    @property
    def pulls(self) -> bool:
        """Whether :meth:`pull` can fetch a model that is missing."""
        ...

    @property
    def reports_vram(self) -> bool:
        """Whether readings say how much of a model is in VRAM. If not, what the process holds is asked."""
        ...

    async def look(self) -> RuntimeReading:
        """Read health, activity, residency and the catalogue, within a few seconds in all.

        Never raises: what failed is ``None`` and ``error``.
        """
        ...

    async def residency(self) -> RuntimeReading:
        """Read only what it holds now, in as few requests as that takes: the look before every admission.

        Activity and catalogue are unknown in such a reading. Never raises, like :meth:`look`.
        """
        ...

    def find(self, reading: RuntimeReading, model: str) -> ResidentModel | None:
        """The row of ``model`` in a reading of this runtime, under whichever of its names. Pure."""
        ...

    async def model_bytes(self, model: str) -> int | None:
        """How large the runtime says the model is, or None where it does not say."""
        ...

    def load_options(self, work: Work) -> str:
        """Those of the job's options that belong to the loaded model, in one canonical text; empty where none. Pure.

        Two jobs with different ones cannot share one load.
        """
        ...

    async def load(self, model: str, *, on_cpu: bool, work: Work | None = None) -> None:
        """Make ``model`` resident without doing any of a job's work.

        ``work`` gives the options that belong to a loaded model (Ollama's ``num_ctx`` and the like): without
        them the run would load it once more, after the placement was verified.

        Raises:
            RuntimeFailure: the runtime refused or could not.
        """
        ...

    def run(
        self, model: str, task: Task, work: Work, *, on_cpu: bool, keep_alive_s: int | None = None
    ) -> AsyncGenerator[Token | Done]:
        """Do the work: zero or more :class:`Token`, then exactly one :class:`Done`.

        ``on_cpu`` says where the placement was verified, as for :meth:`load`: a run that names another place would
        load the model once more.

        A token with an empty text is progress that is not part of the answer, such as thinking.

        Closing the iterator early closes the connection, which is how the runtime is told to stop.

        Raises:
            RuntimeFailure: an error, an answer that is not the protocol's, an empty one, or one that was cut.
        """
        ...

    async def release(self, model: str | None) -> None:
        """Ask it to let go of ``model``, or of all that it holds where that is None.

        Returning means that the wish was accepted, not that memory is free: the device's reading shows that.

        Raises:
            RuntimeFailure: it refused or could not be asked.
        """
        ...

    def pull(self, model: str) -> AsyncGenerator[PullProgress]:
        """Fetch ``model``. Ends when it is there.

        Raises:
            RuntimeFailure: with the runtime's own words.
        """
        ...

    async def signs(self, model: str) -> Signs:
        """Look for what shows whether a request for ``model`` is under way, within a few seconds.

        Asked while a run goes on, and again after it was told to stop: the difference may prove that it has ended.
        Never raises: what could not be read is unknown.
        """
        ...

    async def close(self) -> None:
        """Give up connections. May be called twice."""
        ...
