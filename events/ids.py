"""Ids that become subject tokens, validated at the edge, and job ids made from a place in the log."""

from __future__ import annotations

import re

from gpukeeper.events.errors import InvalidId

#: For decoders and JSON Schema. In Python ``$`` also matches before a last line feed, which is no part of a token.
TOKEN_PATTERN = r"^[A-Za-z0-9_-]{1,64}$(?!\n)"  # noqa: S105 - a part of a subject, no secret
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")
TOKEN_CHARS_MAX = 64
_OTHER = re.compile(r"[^A-Za-z0-9_-]")

TOKEN_RULE = "1 to 64 of A-Z a-z 0-9 _ -"  # noqa: S105


def is_token(value: str) -> bool:
    """Whether ``value`` may stand as one token of a subject."""
    return _TOKEN.fullmatch(value) is not None


def require_token(value: str, field: str) -> str:
    """Return ``value``, or raise :class:`InvalidId` naming ``field``."""
    if not is_token(value):
        shown = value if len(value) <= 80 else value[:77] + "..."
        raise InvalidId(f"{field}: {shown!r} must be {TOKEN_RULE}", field=field, value=shown)
    return value


def cleaned_token(value: str) -> str:
    """``value`` where it is a token, else what may be shown and stored in its place: other characters as ``_``, cut."""
    return value if is_token(value) else _OTHER.sub("_", value[:TOKEN_CHARS_MAX]) or "_"


def job_id_at(seq: int, stored_ns: int) -> str:
    """The handle of a submission that chose none: the second it was stored in, and its sequence in hex.

    Both are facts of the log, so every scheduler derives the same id for the same submission.
    """
    return f"{stored_ns // 1_000_000_000}-{seq & 0xFFFFFFFF:08x}"
