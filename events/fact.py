"""The base of every payload: a frozen, keyword-only record with an explicit tag."""

from __future__ import annotations

from typing import ClassVar

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A frozen value inside facts. It holds no cycles, so the collector need not look.

    Fields of newer versions are ignored when decoded, and kept in the stored bytes.
    """


class Fact(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that happened. ``TYPE`` is its tag: it never changes and is never used for something else."""

    TYPE: ClassVar[str] = ""
