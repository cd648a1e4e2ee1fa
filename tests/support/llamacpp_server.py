"""A real llama.cpp server in a process of its own, with a tiny model written a moment before."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from gpukeeper.cli.demo.tiny_model import write_tiny_model

START_TIMEOUT_S = 30.0


class LlamaServer:
    """A running server: ``url``, the ``model`` it serves, and its ``pid``."""

    def __init__(self, url: str, model: str, pid: int) -> None:
        self.url = url
        self.model = model
        self.pid = pid


@asynccontextmanager
async def llama_server(
    folder: Path, *, model: str = "tiny", slots: int = 1, layers: int = 1, extra: tuple[str, ...] = ()
) -> AsyncGenerator[LlamaServer]:
    """Start a server for a model called ``model`` and stop it at the end.

    More ``layers`` make it slower for each token; ``extra`` goes to the command line of the server.
    """
    file = await asyncio.to_thread(write_tiny_model, folder / f"{model}.gguf", name=model, layers=layers)
    port_file = folder / f"{model}.port"
    log = (folder / f"{model}.log").open("wb")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "gpukeeper.cli.demo.llama_server"),
            *("--model", str(file), "--port-file", str(port_file), "--slots", str(slots)),
            *("--parent", str(os.getpid())),
            *extra,
        ],
        stdout=log,
        stderr=log,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    try:
        port = await _port(process, port_file, folder / f"{model}.log")
        yield LlamaServer(f"http://127.0.0.1:{port}", model, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(process.wait, 10)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)
        log.close()


async def _port(process: subprocess.Popen[bytes], port_file: Path, log: Path) -> int:
    async with asyncio.timeout(START_TIMEOUT_S):
        while not port_file.exists():
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with {process.returncode}:\n{log.read_text()[-2000:]}")
            await asyncio.sleep(0.01)
    return int(port_file.read_text())
