"""What one agent is told: its host, its devices, its runtimes and its clocks."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from gpukeeper.events.ids import TOKEN_PATTERN

#: After its grace: how long attempts that were stopped may take to end their jobs and give their slots back.
ABANDON_S = 35.0
#: How long saying goodbye may take while the log is away: silence tells the same, only later.
GOODBYE_S = 5.0
#: From the end of its grace to the end of an agent's process, at most; closing connections and drivers is the rest.
#: Whoever ends the process by force waits this long first.
STOP_MARGIN_S = ABANDON_S + GOODBYE_S + 10.0

Token = Annotated[str, msgspec.Meta(pattern=TOKEN_PATTERN)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=2_592_000)]
Ratio = Annotated[float, msgspec.Meta(gt=0, le=1)]


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of every configuration record: an unknown key is an error, never ignored."""


class DeviceConfig(Config, frozen=True, kw_only=True):
    """One device of this host, declared rather than found, or a found one with settings of its own."""

    #: A GPU's UUID as NVML gives it (``GPU-…``, ``MIG-…``), or a name of your own for static and cpu devices.
    id: Token
    #: ``nvml`` is read live; ``cpu`` is the host's memory; ``static`` is what you declare, counted by reservations.
    source: Literal["nvml", "cpu", "static"] = "nvml"
    #: What kind of placement the device stands for. A static device may stand for either.
    kind: Literal["gpu", "cpu"] | None = None
    #: For static devices: the capacity. For others: an upper limit on what may be used.
    total_mb: Annotated[int, msgspec.Meta(gt=0)] | None = None
    #: How many jobs may run at once.
    slots: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1
    #: Memory that is never given out.
    headroom_mb: Annotated[int, msgspec.Meta(ge=0)] = 0


class RuntimeConfig(Config, frozen=True, kw_only=True):
    """One entry of the host's registry. What is not listed is never touched."""

    name: Token
    provider: Literal["llamacpp", "ollama"]
    #: Base URL, such as ``http://127.0.0.1:11434``.
    url: str
    #: The devices it runs on, by id; all devices of the host when empty.
    devices: tuple[Token, ...] = ()
    #: The model must sit in VRAM to at least this share before a job may start.
    min_vram_ratio: Ratio = 0.99
    #: How long an Ollama model stays resident after a job; -1 keeps it until unloaded.
    keep_alive_s: Annotated[int, msgspec.Meta(ge=-1, le=2_592_000)] = 300
    #: Let jobs run whose need nobody declared or reported. Unknown is otherwise refused.
    allow_unknown_need: bool = False


class AgentConfig(Config, frozen=True, kw_only=True):
    """Everything one agent needs to know."""

    host: Token
    site: Token = "main"
    devices: tuple[DeviceConfig, ...] = ()
    runtimes: tuple[RuntimeConfig, ...] = ()
    #: Find NVML devices that are not declared above.
    find_devices: bool = True
    #: Use an Ollama on 127.0.0.1:11434 when no runtime is declared.
    find_runtimes: bool = True
    heartbeat_s: Seconds = 5.0
    #: How long running jobs may take to finish after SIGTERM.
    stop_grace_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 30.0
    #: A reading of a device that takes longer is `unknown`.
    reading_timeout_s: Seconds = 5.0
