"""What one agent is told: its host, its devices, its runtimes and its clocks."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from gpukeeper.events.ids import TOKEN_PATTERN
from gpukeeper.events.spec import Residency

#: The longest that a slot is kept for a runtime that is not proven to have stopped.
STOP_PROOF_S_MAX = 30.0
#: After its grace: how long attempts that were stopped may take to end their jobs and give their slots back.
ABANDON_S = 35.0
#: How long saying goodbye may take while the log is away: silence tells the same, only later.
GOODBYE_S = 5.0
#: From the end of its grace to the end of an agent's process, at most; closing connections and drivers is the rest.
#: Whoever ends the process by force waits this long first.
STOP_MARGIN_S = ABANDON_S + GOODBYE_S + 10.0

#: Docker's own rule for the names of containers.
CONTAINER_PATTERN = r"^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,127}$(?!\n)"

#: How the analysis engine is usually started, with the files where images have them.
KATAGO_COMMAND = ("katago", "analysis", "-config", "/app/analysis.cfg", "-model", "/app/model.bin.gz")

#: A petabyte: more is no memory but a slip of the unit.
MEGABYTES_MAX = 1_000_000_000

Token = Annotated[str, msgspec.Meta(pattern=TOKEN_PATTERN)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=2_592_000)]
Ratio = Annotated[float, msgspec.Meta(gt=0, le=1)]


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of every configuration record: an unknown key is an error, never ignored."""


class DeviceConfig(Config, frozen=True, kw_only=True):
    """One device of this host, declared rather than found, or a found one with settings of its own."""

    #: A GPU's UUID as NVML gives it (``GPU-…``, ``MIG-…``), ``AMD-`` and its unique_id or PCI address as `gpuq doctor`
    #: shows it, or a name of your own for static and cpu devices.
    id: Token
    #: ``nvml`` and ``amdgpu`` are read live; ``cpu`` is the host's memory; ``static`` is what you declare, counted by
    #: reservations.
    source: Literal["nvml", "amdgpu", "cpu", "static"] = "nvml"
    #: What kind of placement the device stands for. A static device may stand for either.
    kind: Literal["gpu", "cpu"] | None = None
    #: For static devices: the capacity. For others: an upper limit on what may be used.
    total_mb: Annotated[int, msgspec.Meta(gt=0, le=MEGABYTES_MAX)] | None = None
    #: How many jobs may run at once.
    slots: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1
    #: Memory that is never given out.
    headroom_mb: Annotated[int, msgspec.Meta(ge=0, le=MEGABYTES_MAX)] = 0


class RuntimeConfig(Config, frozen=True, kw_only=True):
    """One entry of the host's registry. What is not listed is never touched."""

    name: Token
    provider: Literal["comfyui", "container", "huggingface", "katago", "llamacpp", "ollama", "vllm"]
    #: Base URL, such as ``http://127.0.0.1:11434``; empty for runtimes that are reached through their container.
    url: str = ""
    #: The Docker container that it runs in, by name: it may be begun, stopped and restarted by operators.
    container: Annotated[str, msgspec.Meta(pattern=CONTAINER_PATTERN)] | None = None
    #: What starts KataGo's analysis engine inside its container.
    command: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = KATAGO_COMMAND
    #: The devices it runs on, by id; all devices of the host when empty.
    devices: tuple[Token, ...] = ()
    #: The model must sit in VRAM to at least this share before a job may start.
    min_vram_ratio: Ratio = 0.99
    #: How long an Ollama model stays resident after a job; -1 keeps it until unloaded.
    keep_alive_s: Annotated[int, msgspec.Meta(ge=-1, le=2_592_000)] = 300
    #: Let jobs run whose need nobody declared or reported. Unknown is otherwise refused.
    allow_unknown_need: bool = False
    #: How much VRAM it takes with its model loaded, for servers that do not say (vLLM, Hugging Face): its one model
    #: counts as that large and as all in VRAM, which the device's own reading must then bear out.
    holds_mb: Annotated[int, msgspec.Meta(gt=0, le=MEGABYTES_MAX)] | None = None
    #: gpukeeper is the only client: where the runtime does not say whether it works, no job of ours there means idle.
    sole_client: bool = False
    #: How long it must have been idle without a break before its memory may be taken back; the agent's where None.
    idle_grace_s: Annotated[float, msgspec.Meta(ge=0, le=2_592_000)] | None = None
    #: How it lets go of memory, where there is a choice: ``auto`` is the provider's safest, ``none`` forbids it;
    #: vLLM can sleep (1: weights go to the host's memory, 2: they are dropped); a container can stop or pause.
    release: Literal["auto", "none", "sleep1", "sleep2", "stop", "pause"] = "auto"
    #: How long a release may take until the device shows it.
    release_timeout_s: Seconds = 60.0
    #: What happens to a model after a job that does not say.
    residency: Residency = "keep"
    #: Ask the runtime to refuse rather than to spill to the CPU, where it can be asked (Ollama).
    refuse_spill: bool = False
    #: Models that may be fetched when they are missing, as shell patterns (``qwen3:*``); none otherwise.
    pull: tuple[str, ...] = ()
    #: Where it keeps its models on this host, for the look at the disk before a fetch; where Ollama usually does, when
    #: empty.
    models_folder: str = ""


class AgentConfig(Config, frozen=True, kw_only=True):
    """Everything one agent needs to know."""

    host: Token
    site: Token = "main"
    devices: tuple[DeviceConfig, ...] = ()
    runtimes: tuple[RuntimeConfig, ...] = ()
    #: Find NVIDIA and AMD GPUs that are not declared above; an integrated AMD part only where it is the only GPU.
    find_devices: bool = True
    #: Use an Ollama on 127.0.0.1:11434 when no runtime is declared.
    find_runtimes: bool = True
    heartbeat_s: Seconds = 5.0
    #: How long running jobs may take to finish after SIGTERM.
    stop_grace_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 30.0
    #: A slot stays taken this long after a stop was asked for, unless the runtime is proven to have stopped before.
    stop_proof_s: Annotated[float, msgspec.Meta(gt=0, le=STOP_PROOF_S_MAX)] = STOP_PROOF_S_MAX
    #: After a run that took longer, the placement of its model is looked at again.
    recheck_after_s: Seconds = 60.0
    #: A reading of a device that takes longer is `unknown`.
    reading_timeout_s: Seconds = 5.0
    #: How long a runtime must have been idle without a break before its memory may be taken back.
    idle_grace_s: Annotated[float, msgspec.Meta(ge=0, le=2_592_000)] = 300.0
    #: A fetch must leave this much of the disk free.
    pull_leaves_disk_mb: Annotated[int, msgspec.Meta(ge=0, le=MEGABYTES_MAX)] = 10_240
    #: A container that restarts this often within the window is crash-looping.
    crash_loop_restarts: Annotated[int, msgspec.Meta(ge=2, le=1_000)] = 3
    crash_loop_window_s: Seconds = 600.0

    def idle_grace_of(self, runtime: RuntimeConfig) -> float:
        """How long this runtime must have been idle, in seconds."""
        return self.idle_grace_s if runtime.idle_grace_s is None else runtime.idle_grace_s
