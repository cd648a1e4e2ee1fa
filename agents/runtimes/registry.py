"""From the registry of a host to its providers."""

from __future__ import annotations

from gpukeeper.agents.config import AgentConfig, RuntimeConfig
from gpukeeper.agents.containers.steward import Steward
from gpukeeper.agents.runtimes import ollama_wire
from gpukeeper.agents.runtimes.attempts import LOOK_TIMEOUT_S, attempt
from gpukeeper.agents.runtimes.comfyui import ComfyUI
from gpukeeper.agents.runtimes.container import PlainContainer
from gpukeeper.agents.runtimes.http import RuntimeHttp
from gpukeeper.agents.runtimes.huggingface import HuggingFace
from gpukeeper.agents.runtimes.katago import KataGo
from gpukeeper.agents.runtimes.llamacpp import LlamaCpp
from gpukeeper.agents.runtimes.ollama import Ollama
from gpukeeper.agents.runtimes.port import Provider, RuntimeFailure
from gpukeeper.agents.runtimes.vllm import Vllm
from gpukeeper.events.errors import ConfigError

OLLAMA_URL = "http://127.0.0.1:11434"


def build(config: RuntimeConfig, *, look_timeout_s: float = LOOK_TIMEOUT_S, steward: Steward | None = None) -> Provider:
    """The provider of one entry of the registry.

    Args:
        config: the entry.
        look_timeout_s: how long one look may take in all.
        steward: of the host's containers, for those that are reached through one. Whoever made it closes it.

    Raises:
        ConfigError: its ``url`` is none; or it is reached through a container, and none is named.
    """
    match config.provider:
        case "comfyui":
            return ComfyUI(config, look_timeout_s=look_timeout_s)
        case "huggingface":
            return HuggingFace(config, look_timeout_s=look_timeout_s)
        case "llamacpp":
            return LlamaCpp(config, look_timeout_s=look_timeout_s)
        case "ollama":
            return Ollama(config, look_timeout_s=look_timeout_s)
        case "vllm":
            return Vllm(config, look_timeout_s=look_timeout_s)
        case "katago":
            return KataGo(config, *_contained(config, steward))
        case "container":
            return PlainContainer(config, *_contained(config, steward), look_timeout_s=look_timeout_s)


def _contained(config: RuntimeConfig, steward: Steward | None) -> tuple[Steward, str]:
    if config.container is None or steward is None:
        missing = "container" if config.container is None else "way to the container engine"
        raise ConfigError(f"runtime {config.name}: no {missing}, and provider {config.provider} needs one")
    return steward, config.container


async def find_runtimes(config: AgentConfig, *, ollama_url: str = OLLAMA_URL) -> tuple[RuntimeConfig, ...]:
    """The registry of a host: what is declared, else an Ollama at its usual place, if one answers now.

    An Ollama that is started later is found by asking again. Never raises for one that does not answer.
    """
    if config.runtimes or not config.find_runtimes:
        return config.runtimes
    http = RuntimeHttp(ollama_url)
    try:
        answer = await attempt(http.get("/api/version", ollama_wire.version_decoder), "/api/version", LOOK_TIMEOUT_S)
    finally:
        await http.close()
    if isinstance(answer, RuntimeFailure):
        return ()
    return (RuntimeConfig(name="ollama", provider="ollama", url=ollama_url),)
