"""What looking at the GPUs of a large host costs."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from bench_site import TESTS
from figures import Figure, at_most

from gpukeeper.agents.devices.nvml import NvmlSource

GPUS = 8
_PROCESSES = 5
_BETWEEN_S = 1.0
#: No script that the test stub answers from comes close to this.
_LIMIT_S = 30.0


def measure_devices(folder: Path, *, seconds: float) -> list[Figure]:
    """CPU of a process that reads eight GPUs every second, the tests' stub of the driver included.

    In a process of its own, as the driver's library is looked for once in a process's life. Without a C compiler there
    is no stub, and no figure.
    """
    if shutil.which("cc") is None:
        return []
    made = subprocess.run(
        [sys.executable, str(Path(__file__)), str(folder), str(seconds)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(TESTS), *sys.path))},
        capture_output=True,
        text=True,
        check=True,
        timeout=seconds * 3 + 60,
    )
    share, look_ms = map(float, made.stdout.split())
    note = f"{GPUS} NVML GPUs with {_PROCESSES} processes each, once a second; one look takes {look_ms:.1f} ms"
    return [at_most("device_readings", share, "% of a core", 3.0, note=note)]


async def _read(seconds: float) -> tuple[float, float]:
    """The share of a core in percent, and how long one look at all GPUs takes, in ms."""
    source = NvmlSource(now=lambda: datetime.now(UTC), limit_s=_LIMIT_S)
    devices = await source.find()
    assert len(devices) == GPUS, source.problem()
    loop = asyncio.get_running_loop()
    took: list[float] = []
    began, used_before = loop.time(), time.process_time()
    for turn in range(round(seconds / _BETWEEN_S)):
        await asyncio.sleep(max(0.0, began + turn * _BETWEEN_S - loop.time()))
        look_began = time.perf_counter()
        readings = await asyncio.gather(*(source.read(device) for device in devices))
        took.append(time.perf_counter() - look_began)
        assert {reading.state for reading in readings} == {"healthy"}, readings
    await asyncio.sleep(max(0.0, began + seconds - loop.time()))
    share = 100 * (time.process_time() - used_before) / (loop.time() - began)
    await source.close()
    return share, 1000 * sorted(took)[len(took) // 2]


def main(folder: Path, seconds: float) -> None:
    # The tests' folder is on the path of this process only.
    from support.nvml_stub import MB, SCRIPT_VARIABLE, Gpu, NvmlStub, compile_stub, load_stub

    load_stub(compile_stub(folder))
    stub = NvmlStub(folder)
    # PIDs that are there, so that their containers are looked for too.
    processes = " ".join(f"{os.getpid() if n == 0 else n}:{100 * MB}:none" for n in range(_PROCESSES))
    stub.host(*(Gpu(uuid=f"GPU-{n}", compute=processes, utilization=37) for n in range(GPUS)))
    os.environ[SCRIPT_VARIABLE] = str(stub.script)
    share, look_ms = asyncio.run(_read(seconds))
    sys.stdout.write(f"{share} {look_ms}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
