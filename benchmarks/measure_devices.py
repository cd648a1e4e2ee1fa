"""What looking at the GPUs and the runtimes of a large host costs."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from bench_site import TESTS, process, until_file
from figures import Figure, at_most

from gpukeeper.agents.config import RuntimeConfig
from gpukeeper.agents.devices.nvml import NvmlSource
from gpukeeper.agents.runtimes.registry import build

GPUS = 8
_PROCESSES = 5
_BETWEEN_S = 1.0
#: No script that the test stub answers from comes close to this.
_LIMIT_S = 30.0


#: The provider of each runtime, and the module of its fake.
RUNTIMES: tuple[tuple[Literal["comfyui", "llamacpp", "ollama", "vllm"], str], ...] = (
    ("ollama", "support.ollama"),
    ("ollama", "support.ollama"),
    ("comfyui", "support.comfyui_fake"),
    ("vllm", "support.vllm_fake"),
    ("llamacpp", "support.llamacpp_fake"),
)


def measure_devices(folder: Path, *, seconds: float) -> list[Figure]:
    """CPU of a process that reads eight GPUs and looks at five runtimes every second, the tests' stub of the driver
    included and the runtimes, which are processes of their own, not.

    In a process of its own, as the driver's library is looked for once in a process's life. Without a C compiler there
    is no stub, and no figure.
    """
    if shutil.which("cc") is None:
        return []
    with ExitStack() as runtimes:
        ports: list[Path] = []
        for number, (_, module) in enumerate(RUNTIMES):
            ports.append(folder / f"runtime{number}.port")
            argv = [sys.executable, "-m", module, "--port-file", str(ports[-1])]
            env = {"PYTHONPATH": str(TESTS), "PYTHONSAFEPATH": "1"}
            runtimes.enter_context(process(argv, env=env, log=folder / f"runtime{number}.log"))
        made = subprocess.run(
            [sys.executable, str(Path(__file__)), str(folder), str(seconds), *map(str, ports)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(TESTS), *sys.path))},
            capture_output=True,
            text=True,
            check=True,
            timeout=seconds * 3 + 60,
        )
    share, look_ms = map(float, made.stdout.split())
    what = f"{GPUS} NVML GPUs with {_PROCESSES} processes each and {len(RUNTIMES)} runtimes"
    note = f"{what}, once a second; one look takes {look_ms:.1f} ms"
    return [at_most("device_readings", share, "% of a core", 3.0, note=note)]


async def _read(seconds: float, port_files: list[Path]) -> tuple[float, float]:
    """The share of a core in percent, and how long one look at everything takes, in ms."""
    providers = [
        build(RuntimeConfig(name=f"r{number}", provider=provider, url=f"http://127.0.0.1:{await until_file(port)}"))
        for number, ((provider, _), port) in enumerate(zip(RUNTIMES, port_files, strict=True))
    ]
    source = NvmlSource(now=lambda: datetime.now(UTC), limit_s=_LIMIT_S)
    devices = await source.find()
    assert len(devices) == GPUS, source.problem()
    loop = asyncio.get_running_loop()
    took: list[float] = []
    began, used_before = loop.time(), time.process_time()
    for turn in range(round(seconds / _BETWEEN_S)):
        await asyncio.sleep(max(0.0, began + turn * _BETWEEN_S - loop.time()))
        look_began = time.perf_counter()
        readings, looks = await asyncio.gather(
            asyncio.gather(*(source.read(device) for device in devices)),
            asyncio.gather(*(provider.look() for provider in providers)),
        )
        took.append(time.perf_counter() - look_began)
        assert {reading.state for reading in readings} == {"healthy"}, readings
        assert all(look.healthy for look in looks), looks
    await asyncio.sleep(max(0.0, began + seconds - loop.time()))
    share = 100 * (time.process_time() - used_before) / (loop.time() - began)
    await source.close()
    for provider in providers:
        await provider.close()
    return share, 1000 * sorted(took)[len(took) // 2]


def main(folder: Path, seconds: float, port_files: list[Path]) -> None:
    # The tests' folder is on the path of this process only.
    from support.nvml_stub import MB, SCRIPT_VARIABLE, Gpu, NvmlStub, compile_stub, load_stub

    load_stub(compile_stub(folder))
    stub = NvmlStub(folder)
    # PIDs that are there, so that their containers are looked for too.
    processes = " ".join(f"{os.getpid() if n == 0 else n}:{100 * MB}:none" for n in range(_PROCESSES))
    stub.host(*(Gpu(uuid=f"GPU-{n}", compute=processes, utilization=37) for n in range(GPUS)))
    os.environ[SCRIPT_VARIABLE] = str(stub.script)
    share, look_ms = asyncio.run(_read(seconds, port_files))
    sys.stdout.write(f"{share} {look_ms}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), [Path(each) for each in sys.argv[3:]])
