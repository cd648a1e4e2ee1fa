"""Hosts and the runtimes in their registries."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from gpukeeper.events.modelnames import canonical
from gpukeeper.events.runtime import ActWanted, Suspect

#: A pin of everything that the runtime holds.
ALL = "*"


def pin_of(model: str | None) -> str:
    """The pin of ``model``, under the shortest of its names; of everything where it is None."""
    return ALL if model is None else canonical(model)


def is_pinned(pins: Collection[str], model: str | None) -> bool:
    """Whether these pins keep ``model``. What is released as a whole stays where anything of it is pinned."""
    if not pins:
        return False
    return model is None or ALL in pins or canonical(model) in pins


class ActWish(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An operator's wish to begin, stop or restart. ``seq`` is the sequence of the `act_wanted` fact."""

    seq: int
    act: str
    actor: str
    reason: str = ""


class Suspicion(msgspec.Struct, frozen=True, array_like=True):
    """A model that did not sit where it should, and on which device."""

    model: str
    device: str
    why: str

    @property
    def reason(self) -> str:
        """The code that the words begin with."""
        return self.why.partition(":")[0]


def act_wish(seq: int, fact: ActWanted) -> ActWish:
    """The wish that stands at ``seq``."""
    return ActWish(seq, fact.act, fact.actor, fact.reason)


def why_suspect(fact: Suspect) -> str:
    """The suspicion in words."""
    return f"{fact.reason}: {fact.detail}"


class Runtime(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One registered runtime."""

    name: str
    seq: int
    provider: str = ""
    url: str = ""
    devices: tuple[str, ...] = ()
    loads_models: bool = False
    healthy: bool = False
    #: None where the runtime did not say what it has.
    models: tuple[str, ...] | None = None
    detail: str = ""
    #: Why no work goes there, where a placement check failed.
    suspect: str | None = None
    #: The model that was checked, and the device.
    suspect_model: str = ""
    suspect_device: str = ""
    releases: str = "none"
    idle_grace_s: float = 300.0
    container: str | None = None
    #: Models that stay until they are unpinned; :data:`ALL` is whatever it holds.
    pins: tuple[str, ...] = ()
    #: What operators want done with its container, and its agent has not answered.
    wishes: tuple[ActWish, ...] = ()
    #: Models that it may fetch when they are missing, as shell patterns.
    pull: tuple[str, ...] = ()

    @property
    def suspicion(self) -> Suspicion | None:
        if self.suspect is None:
            return None
        return Suspicion(self.suspect_model, self.suspect_device, self.suspect)


class Host(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One host, by the agent instance that speaks for it."""

    name: str
    seq: int
    instance_id: str = ""
    boot_id: str = ""
    version: str = ""
    joined_ns: int = 0
    #: Sequence of the `joined` fact.
    joined_seq: int = 0
    #: The agent left on purpose, or never joined.
    left: bool = True
    devices: tuple[str, ...] = ()
    runtimes: tuple[str, ...] = ()
    registry: tuple[Runtime, ...] = ()

    def runtime(self, name: str) -> Runtime | None:
        for runtime in self.registry:
            if runtime.name == name:
                return runtime
        return None
