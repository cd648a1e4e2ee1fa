"""What models took when they were loaded, learned from the loads of before."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from gpukeeper.events.modelnames import canonical
from gpukeeper.events.runtime import ModelLoaded

#: Loads that are remembered of one model: an old version of it must not count for ever.
LOADS_MAX = 8
#: Models that are remembered of one host; those that were loaded longest ago are forgotten.
MODELS_MAX = 256


class LearnedLoad(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The last measured loads of one model, with one set of load options, in one runtime of one host."""

    host: str
    runtime: str
    #: By its shortest name.
    model: str
    load_options: str
    #: MB of each load, the newest last; at least one.
    loads_mb: tuple[int, ...]


class Learned:
    """Folds `model_loaded` facts. Bounded for each host apart, so that a host's own part is the same in every fold."""

    def __init__(self, loads: Iterable[LearnedLoad] = ()) -> None:
        #: By host, then by runtime, model and options; what was loaded last stands last.
        self._hosts: dict[str, dict[tuple[str, str, str], LearnedLoad]] = {}
        for load in loads:
            self._put(load)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Learned) and self._hosts == other._hosts

    __hash__ = None  # type: ignore[assignment]  (it changes)

    def apply(self, fact: ModelLoaded) -> None:
        """Fold one load. One that was not measured, or showed nothing, teaches nothing."""
        if fact.vram_mb is None or fact.vram_mb <= 0:
            return
        model = canonical(fact.model)
        known = self._hosts.get(fact.host, {}).get((fact.runtime, model, fact.load_options))
        loads_mb = (*(known.loads_mb if known is not None else ()), fact.vram_mb)[-LOADS_MAX:]
        self._put(
            LearnedLoad(
                host=fact.host,
                runtime=fact.runtime,
                model=model,
                load_options=fact.load_options,
                loads_mb=loads_mb,
            )
        )

    def peak_mb(self, host: str, runtime: str, model: str, load_options: str = "") -> int | None:
        """The most that a remembered load took, in MB, under whichever of the model's names; None without one."""
        known = self._hosts.get(host, {}).get((runtime, canonical(model), load_options))
        return None if known is None else max(known.loads_mb)

    def state(self, host: str | None = None) -> list[LearnedLoad]:
        """All of it, or one host's part, to be given to a new :class:`Learned`. Equal folds, equal states."""
        hosts = sorted(self._hosts) if host is None else [host]
        return [load for each in hosts for load in self._hosts.get(each, {}).values()]

    def _put(self, load: LearnedLoad) -> None:
        models = self._hosts.setdefault(load.host, {})
        key = (load.runtime, load.model, load.load_options)
        models.pop(key, None)
        models[key] = load
        if len(models) > MODELS_MAX:
            del models[next(iter(models))]
