"""Facts about one host: its agent came or went."""

from __future__ import annotations

from typing import ClassVar

from gpukeeper.events.fact import Fact


class Joined(Fact, frozen=True, kw_only=True):
    """An agent speaks for the host now; claims of any earlier instance are not its own."""

    TYPE: ClassVar[str] = "gpuq.host.joined.v1"

    host: str
    boot_id: str
    instance_id: str
    version: str
    pid: int
    devices: tuple[str, ...]
    runtimes: tuple[str, ...]


class Left(Fact, frozen=True, kw_only=True):
    """The agent stopped on purpose."""

    TYPE: ClassVar[str] = "gpuq.host.left.v1"

    host: str
    instance_id: str
    detail: str = ""
