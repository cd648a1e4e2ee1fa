"""How much of a runtime's catalogue goes into an event. Pure."""

from __future__ import annotations

#: An event is a message, and a message holds a mebibyte: this leaves room for the rest and for escaping.
NAMES_MAX = 2_000
BYTES_MAX = 256 * 1024


def told(names: tuple[str, ...] | None) -> tuple[tuple[str, ...] | None, str]:
    """The catalogue as it is told, and in words why it is not, where it is not.

    One that is too large is told as unknown: half of one would say that the runtime lacks what the other half has.
    """
    if names is None:
        return None, ""
    size = sum(len(name.encode("utf-8", "replace")) for name in names)
    if len(names) <= NAMES_MAX and size <= BYTES_MAX:
        return names, ""
    return None, f"it lists {len(names)} names of {size} bytes in all: too many to be told, so they count as unknown"
