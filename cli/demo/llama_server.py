"""A real llama.cpp server as a process of its own.

Run as ``python -m gpukeeper.cli.demo.llama_server --model F --port-file P``. The server comes from the wheel
``xllamacpp`` and serves loopback only, until the process is told to stop. Once it listens, its port is in P.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="llama_server", description="A llama.cpp server on loopback.")
    parser.add_argument("--model", required=True, type=Path, help="a GGUF file")
    parser.add_argument("--alias", help="the name it is served under (default: the file's name)")
    parser.add_argument("--port", type=int, default=0, help="0 lets the system choose")
    parser.add_argument("--port-file", type=Path, help="where the port is written once it listens")
    parser.add_argument("--slots", type=int, default=1, help="requests at once")
    parser.add_argument("--context", type=int, default=4096, help="tokens for each slot")
    parser.add_argument("--max-tokens", type=int, default=256, help="for requests that do not say how many")
    parser.add_argument("--no-slots-endpoint", action="store_true", help="do not tell what the slots are doing")
    parser.add_argument("--parent", type=int, help="end when this process is no longer the parent")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Serve until SIGTERM or SIGINT, or until ``--parent`` is gone."""
    options = parse_args(arguments)
    # Blocked before the server starts its threads, so that only the wait below sees them.
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    server = start(options)
    if options.port_file is not None:
        publish_port(options.port_file, int(str(server.listening_address).rsplit(":", 1)[-1]))
    while signal.sigtimedwait(signals, 1.0) is None:
        if options.parent is not None and os.getppid() != options.parent:
            break
    # The server's destructor waits for requests in flight, which a stopped demonstration must not do.
    os._exit(0)


def start(options: argparse.Namespace) -> Any:
    """A server that listens, as the object that keeps it alive."""
    import xllamacpp

    library: Any = xllamacpp
    params = library.CommonParams()
    params.model.path = str(options.model)
    params.model_alias = {options.alias or options.model.stem}
    params.hostnames = ["127.0.0.1"]
    params.port = options.port
    params.n_parallel = options.slots
    params.n_ctx = options.context * options.slots
    params.n_predict = options.max_tokens
    params.embedding = True
    params.pooling_type = library.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    params.endpoint_slots = not options.no_slots_endpoint
    params.warmup = False
    params.ui = False
    params.fit_params = False
    # More threads than slots only compete: the model is tiny.
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    params.n_threads_http = options.slots + 4
    return library.Server(params)


def publish_port(path: Path, port: int) -> None:
    """Write ``port`` so that a reader sees all of it or no file."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(f"{port}\n")
    partial.replace(path)


if __name__ == "__main__":
    main()
