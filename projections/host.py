"""Hosts and the runtimes in their registries."""

from __future__ import annotations

import msgspec


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


class Host(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One host, by the agent instance that speaks for it."""

    name: str
    seq: int
    instance_id: str = ""
    boot_id: str = ""
    version: str = ""
    joined_ns: int = 0
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
