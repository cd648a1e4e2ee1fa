"""How much room is left where a runtime keeps its models."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from gpukeeper.agents.config import RuntimeConfig

MB = 1_048_576
#: Where an Ollama keeps its models when it runs as a service.
_SERVICE = Path("/usr/share/ollama/.ollama/models")


def free_disk_mb(config: RuntimeConfig) -> int | None:
    """What is free for models of this runtime, in MB of 2^20 bytes; None where that could not be read. Blocks."""
    folder = models_folder(config)
    try:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        return shutil.disk_usage(folder).free // MB
    except OSError:
        return None


def models_folder(config: RuntimeConfig) -> Path:
    """Where the runtime keeps its models: as configured, else where an Ollama on this host does."""
    if config.models_folder:
        return Path(config.models_folder)
    if told := os.environ.get("OLLAMA_MODELS"):
        return Path(told)
    try:
        if _SERVICE.exists():
            return _SERVICE
    except OSError:
        return _SERVICE  # it is there, and this user may not look into it
    return Path("~/.ollama/models").expanduser()
