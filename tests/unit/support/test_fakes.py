"""The fakes as processes: they take faults and give counters over HTTP."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gpukeeper.agents.config import RuntimeConfig
from gpukeeper.agents.runtimes.port import RuntimeFailure
from gpukeeper.agents.runtimes.registry import build
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import Work


@asynccontextmanager
async def started(module: str, folder: Path) -> AsyncGenerator[str]:
    port_file = folder / "port"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    arguments = ("-m", module, "--port-file", str(port_file))
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, env=env, cwd=folder)
    try:
        async with asyncio.timeout(20):
            while not port_file.exists():
                await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{int(port_file.read_text())}"
    finally:
        process.terminate()
        async with asyncio.timeout(20):
            assert await process.wait() == 0


@pytest.mark.processes
@pytest.mark.parametrize(
    ("module", "provider", "model", "path"),
    [
        ("support.ollama", "ollama", "m:8b", "/api/generate"),
        ("support.llamacpp_fake", "llamacpp", "fake", "/completion"),
    ],
)
async def test_a_fake_in_another_process_takes_faults_and_counts(
    tmp_path: Path, module: str, provider: Any, model: str, path: str
) -> None:
    async with started(module, tmp_path) as url, aiohttp.ClientSession(url, trust_env=False) as control:
        runtime = build(RuntimeConfig(name="r", provider=provider, url=url))
        async with control.post("/_fake/faults", json={"path": path, "kind": "empty", "times": 1}) as taken:
            assert taken.status == 200

        with pytest.raises(RuntimeFailure) as caught:
            await anext(runtime.run(model, "generate", Work(prompt="x"), on_cpu=False))
        items = [item async for item in runtime.run(model, "generate", Work(prompt="x"), on_cpu=False)]
        async with control.get("/_fake/counters") as answer:
            counters = await answer.json()
        await runtime.close()

    assert caught.value.reason is Reason.RUNTIME_EMPTY_REPLY
    assert items
    assert counters["requests"][path] == 2
