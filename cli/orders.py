"""What an operator typed, as a command for the log. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from gpukeeper.cli.errors import WrongUsage
from gpukeeper.cli.placenames import PlaceName, place_name
from gpukeeper.events import operator
from gpukeeper.events.fact import Fact
from gpukeeper.events.ids import require_token

Verb = Literal["drain", "resume", "reclaim", "pin", "unpin", "begin", "stop", "restart"]

_ON_DEVICES: tuple[Verb, ...] = ("drain", "resume", "reclaim")
_ON_MODELS: tuple[Verb, ...] = ("pin", "unpin")


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One command about one device or runtime."""

    verb: Verb
    place: PlaceName
    fact: Fact

    @property
    def what(self) -> str:
        """``drain box/gpu0``, for sentences."""
        return f"{self.verb} {self.place}"

    @property
    def on_device(self) -> bool:
        return self.verb in _ON_DEVICES


def order(
    verb: Verb,
    words: Sequence[str],
    *,
    reason: str = "",
    runtime: str | None = None,
    model: str | None = None,
    vram_mb: int | None = None,
) -> Order:
    """Read the words that name the place.

    Args:
        words: as :func:`gpukeeper.cli.placenames.place_name` reads them.
        runtime: for ``reclaim``: only this one.
        model: for ``reclaim``: only this one of that runtime.
        vram_mb: for ``reclaim``: how much is wanted; all that can be had where it is None.

    Raises:
        WrongUsage, InvalidId: the words name no place, or a model is named without its runtime.
    """
    what = "DEVICE" if verb in _ON_DEVICES else "RUNTIME"
    place = place_name(words, what, takes_model=verb in _ON_MODELS)
    if model is not None and runtime is None:
        raise WrongUsage("--model: name its runtime too, with --runtime")
    fact: Fact
    match verb:
        case "drain":
            fact = operator.Drain(host=place.host, device=place.name, reason=reason)
        case "resume":
            fact = operator.Resume(host=place.host, device=place.name, reason=reason)
        case "reclaim":
            fact = operator.Reclaim(
                host=place.host,
                device=place.name,
                runtime=None if runtime is None else require_token(runtime, "--runtime"),
                model=model,
                vram_mb=vram_mb,
                reason=reason,
            )
        case "pin":
            fact = operator.Pin(host=place.host, runtime=place.name, model=place.model, reason=reason)
        case "unpin":
            fact = operator.Unpin(host=place.host, runtime=place.name, model=place.model, reason=reason)
        case _:
            fact = operator.RuntimeAct(host=place.host, runtime=place.name, act=verb, reason=reason)
    return Order(verb=verb, place=place, fact=fact)
