"""When two names mean one model. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from gpukeeper.events.readings import ResidentModel

_LATEST = ":latest"
_GGUF = ".gguf"


def canonical(name: str) -> str:
    """The shortest name of the same model.

    ``qwen3:latest`` is ``qwen3``, and a GGUF file is called as its file name without folders and ending.
    """
    name = name.strip()
    if name.lower().endswith(_GGUF):
        return _file(name)[: -len(_GGUF)]
    return name.removesuffix(_LATEST)


def same_model(one: str, other: str) -> bool:
    """Whether both names mean one model."""
    return one == other or canonical(one) == canonical(other)


def find_resident(resident: Iterable[ResidentModel], model: str) -> ResidentModel | None:
    """The row of ``model``, under whichever of its names, or None."""
    return next((row for row in resident if same_model(row.model, model)), None)


def all_names(name: str) -> tuple[str, ...]:
    """The names of the same model from long to short, for catalogues that are searched literally."""
    file = _file(name) if name.lower().endswith(_GGUF) else name
    return tuple(dict.fromkeys((name, file, canonical(name))))


def matches(patterns: Iterable[str], model: str) -> bool:
    """Whether a name of ``model`` matches one of these shell patterns: ``qwen3:*`` also means ``qwen3``."""
    names = {model, canonical(model)}
    names |= {f"{name}{_LATEST}" for name in tuple(names) if ":" not in name.rsplit("/", 1)[-1]}
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)


def _file(path: str) -> str:
    return path.replace("\\", "/").rsplit("/", 1)[-1]
