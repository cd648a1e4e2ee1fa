"""``HOST NAME`` or ``HOST/NAME`` on a command line. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gpukeeper.cli.errors import WrongUsage
from gpukeeper.events.ids import require_token


class PlaceName(msgspec.Struct, frozen=True):
    """A device or a runtime of a host, and what stood after it."""

    host: str
    name: str
    #: A model, where one was named.
    model: str | None = None

    def __str__(self) -> str:
        return f"{self.host}/{self.name}"


def place_name(words: Sequence[str], what: str, *, takes_model: bool = False) -> PlaceName:
    """Read ``HOST NAME``, ``HOST/NAME`` and, where a model may follow, ``HOST NAME MODEL`` and ``HOST/NAME MODEL``.

    Args:
        what: ``DEVICE`` or ``RUNTIME``, for the sentence of an error.

    Raises:
        WrongUsage: too few words or too many.
        InvalidId: a name that none can have.
    """
    # A model may hold a slash, a host may not: the first word decides.
    names = [*words[0].split("/", 1), *words[1:]] if words else []
    if not 2 <= len(names) <= (3 if takes_model else 2):
        shape = f"HOST {what}" + (" [MODEL]" if takes_model else "")
        raise WrongUsage(f"name one {what.lower()}: {shape}, or HOST/{what}" + (" [MODEL]" if takes_model else ""))
    host, name = require_token(names[0], "HOST"), require_token(names[1], what)
    return PlaceName(host, name, names[2] if len(names) == 3 else None)


def host_and_device(host: str | None, device: str | None) -> tuple[str | None, str | None]:
    """``--host`` and ``--device``, where the device may be given as ``HOST/DEVICE``.

    Raises:
        WrongUsage: the two name different hosts.
    """
    if device is None or "/" not in device:
        return host, device
    named, _, name = device.partition("/")
    if host not in (None, named):
        raise WrongUsage(f"--device {device}: is not on --host {host}")
    return named, name
