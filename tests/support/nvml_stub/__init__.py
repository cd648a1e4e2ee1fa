"""A real ``libnvidia-ml.so.1`` that answers from a script, so that pynvml and its ctypes layer run as they are.

The library is compiled once for each test session and loaded before pynvml asks for it. The loader then finds it by
its soname, as it would find the driver's: nothing in pynvml is replaced. It stays loaded for the life of the process,
and without a script it answers "driver not loaded".
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from support.require import skip_or_fail

SCRIPT_VARIABLE = "GPUQ_NVML_SCRIPT"
SONAME = "libnvidia-ml.so.1"
MB = 1 << 20

_loaded: list[ctypes.CDLL] = []


def compile_stub(folder: Path, *flags: str) -> Path:
    """Compile the stub into ``folder`` and return its path. Skips (fails in CI) where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        skip_or_fail("no C compiler: the NVML stub cannot be built")
    library = folder / SONAME
    source = Path(__file__).with_name("nvml_stub.c")
    made = subprocess.run(
        [
            *(compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", f"-Wl,-soname,{SONAME}"),
            *flags,
            *("-o", str(library), str(source)),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if made.returncode != 0:
        pytest.fail(f"the NVML stub does not compile:\n{made.stderr}", pytrace=False)
    return library


def load_stub(library: Path) -> None:
    """Load the stub into this process ahead of the driver's library, once."""
    if not _loaded:
        _loaded.append(ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL))


class Slice(msgspec.Struct, kw_only=True):
    """A MIG slice. ``memory`` is (total, free) in MB, or a return code such as ``"!3"``."""

    uuid: str
    memory: tuple[int, int] | str | None = (4864, 4860)
    instance: int = 1
    compute: str = ""
    name: str | None = None


class Gpu(msgspec.Struct, kw_only=True):
    """One GPU of a script. None leaves a line out, which NVML then answers with "Not Supported"."""

    uuid: str
    name: str = "NVIDIA GeForce RTX 4090"
    handle: str | None = None
    memory: tuple[int, int] | str | None = (24564, 23359)
    bar1: int | None = 256 * MB
    addressing: int | None = 1
    #: Percent, or a return code.
    utilization: int | str | None = None
    compute: str | None = None
    graphics: str | None = None
    mps: str | None = None
    mig: dict[int, Slice] | None = None
    #: Which call hangs (``memory``, ``handle``, …) until the FIFO is opened for writing and closed.
    hang: tuple[str, Path] | None = None


def script_lines(gpus: list[Gpu]) -> list[str]:
    """The script for a host with these GPUs."""
    lines = [f"count {len(gpus)}"]
    for index, gpu in enumerate(gpus):
        values = {
            "handle": gpu.handle,
            "uuid": gpu.uuid,
            "name": gpu.name,
            "memory": _memory(gpu.memory),
            "bar1": gpu.bar1,
            "addressing": gpu.addressing,
            "utilization": gpu.utilization,
            "compute": gpu.compute,
            "graphics": gpu.graphics,
            "mps": gpu.mps,
            "mig_mode": None if gpu.mig is None else 1,
            "mig_max": None if gpu.mig is None else 7,
        }
        for place, part in (gpu.mig or {}).items():
            values |= {
                f"mig.{place}.uuid": part.uuid,
                f"mig.{place}.name": part.name,
                f"mig.{place}.memory": _memory(part.memory),
                f"mig.{place}.instance": part.instance,
                f"mig.{place}.compute": part.compute,
            }
        if gpu.hang is not None:
            values[f"{gpu.hang[0]}.hang"] = str(gpu.hang[1])
        lines += [f"{index}.{key} {value}" for key, value in values.items() if value is not None]
    return lines


class NvmlStub:
    """Writes the script that the loaded stub answers from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "nvml-script"
        self._gates: list[Path] = []

    def host(self, *gpus: Gpu) -> None:
        """The driver is loaded and lists these GPUs, from the next call on."""
        self.write(*script_lines(list(gpus)))

    def write(self, *lines: str) -> None:
        """Replace the script as one step: a call under way reads the old or the new one."""
        draft = self.script.with_suffix(".draft")
        draft.write_text("".join(f"{line}\n" for line in lines))
        os.replace(draft, self.script)

    def gate(self, name: str = "gate") -> Path:
        """A FIFO for a call to hang on."""
        path = self.folder / name
        os.mkfifo(path)
        self._gates.append(path)
        return path

    async def open_gate(self, path: Path) -> None:
        """Let the call that hangs on ``path`` go on, once it has come to hang there."""
        await asyncio.to_thread(lambda: os.close(os.open(path, os.O_WRONLY)))

    def release_all(self) -> None:
        """Let every call go on, so that no thread outlives its test."""
        while self._gates:
            path = self._gates.pop()
            # Opened for both ends first: then no reader can block any more, whether it has come already or comes late.
            both = os.open(path, os.O_RDWR | os.O_NONBLOCK)
            path.unlink()
            os.close(both)


def _memory(value: tuple[int, int] | str | None) -> str | None:
    if isinstance(value, tuple):
        return f"{value[0] * MB} {value[1] * MB}"
    return value
