"""Which resident models the jobs of this agent rest on, from when each was seen to be there until its claim ends.

A load for one job may take away what another was just proven to have: a runtime replaces a model that is asked for with
other options, and takes what no request has reached yet for idle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec

from gpukeeper.events.modelnames import canonical


class Use(msgspec.Struct, frozen=True):
    """A resident model that a job of ours rests on."""

    runtime: str
    #: By its shortest name.
    model: str
    options: str
    #: Its request is on the way: from now on the runtime itself knows that the model is in use.
    asked: bool = False


class Uses:
    """The uses of one agent, by claim. Single-threaded: its fields change only between awaits."""

    def __init__(self) -> None:
        self._uses: dict[int, Use] = {}
        #: Set, and replaced, at every change.
        self._changed = asyncio.Event()

    def begin(self, epoch: int, runtime: str, model: str, options: str, *, asked: bool = False) -> None:
        """The job of ``epoch`` rests on this model's being there as it is."""
        self._uses[epoch] = Use(runtime, canonical(model), options, asked)
        self._tell()

    def end(self, epoch: int) -> None:
        """Its claim is over."""
        if self._uses.pop(epoch, None) is not None:
            self._tell()

    def _tell(self) -> None:
        told, self._changed = self._changed, asyncio.Event()
        told.set()

    def has(self, runtime: str, model: str, *, but: int) -> bool:
        """Whether some other job rests on the model."""
        return any(use.model == canonical(model) for use in self._others(runtime, but))

    def with_other_options(self, runtime: str, model: str, options: str, *, but: int) -> bool:
        """Whether some other job rests on the model as it was loaded with other options, which a load would replace."""
        name = canonical(model)
        return any(use.model == name and use.options != options for use in self._others(runtime, but))

    def awaits_request(self, runtime: str, model: str, *, but: int) -> bool:
        """Whether some other job's model is there and its request has not reached it: it looks idle to the runtime,
        which may throw it out for any other model."""
        return any(use.model != canonical(model) and not use.asked for use in self._others(runtime, but))

    async def until_asked(self, runtime: str, model: str, *, but: int) -> None:
        """Wait while a load of ``model`` could take away what awaits its request.

        Who waits holds the turn, so nobody else's load begins meanwhile; what is waited for needs that turn no more.
        """
        while self.awaits_request(runtime, model, but=but):
            await self._changed.wait()

    def _others(self, runtime: str, but: int) -> Iterator[Use]:
        return (use for epoch, use in self._uses.items() if epoch != but and use.runtime == runtime)
