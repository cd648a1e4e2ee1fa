"""When two names mean one model. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from gpukeeper.events.readings import ResidentModel

_LATEST = ":latest"
_GGUF = ".gguf"


def canonical(name: str) -> str:
    """The shortest name of the same model.

    ``qwen3:latest`` is ``qwen3``, and a GGUF file is called as its file name without folders and ending.
    """
    name = name.strip()
    if name.lower().endswith(_GGUF):
        return name.replace("\\", "/").rsplit("/", 1)[-1][: -len(_GGUF)]
    return name.removesuffix(_LATEST)


def same_model(one: str, other: str) -> bool:
    """Whether both names mean one model."""
    return one == other or canonical(one) == canonical(other)


def find_resident(resident: Iterable[ResidentModel], model: str) -> ResidentModel | None:
    """The row of ``model``, under whichever of its names, or None."""
    return next((row for row in resident if same_model(row.model, model)), None)


def all_names(name: str) -> tuple[str, ...]:
    """``name`` and its canonical form, for catalogues that are searched literally."""
    short = canonical(name)
    return (name,) if short == name else (name, short)
