"""GPUs of the stub driver that several runtimes of a test hold memory on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from msgspec.structs import replace

from support.nvml_stub import MB, Gpu, NvmlStub


class SharedCards:
    """What the driver shows: of each GPU's free memory, as it was made, what the owners have left."""

    def __init__(self, nvml: NvmlStub, *gpus: Gpu) -> None:
        self._nvml = nvml
        self._gpus = gpus
        self._held_mb: Counter[tuple[str, str]] = Counter()
        self._pids: dict[tuple[str, str], int] = {}
        #: Whether the driver shows changes at once. One that is late shows them when it is set again.
        self._prompt = True
        self._show()

    @property
    def prompt(self) -> bool:
        return self._prompt

    @prompt.setter
    def prompt(self, prompt: bool) -> None:
        self._prompt = prompt
        self._show()

    def free_mb(self, uuid: str) -> int:
        """What is free there, whether the driver shows it or not."""
        (gpu,) = (gpu for gpu in self._gpus if gpu.uuid == uuid)
        assert isinstance(gpu.memory, tuple)
        return gpu.memory[1] - sum(mb for (device, _), mb in self._held_mb.items() if device == uuid)

    def hold(self, owner: str, mb: int, *, on: str, pid: int | None = None) -> None:
        """From now on ``owner`` holds so much there, in this process where the driver shall list it."""
        self._held_mb[on, owner] = mb
        if pid is not None:
            self._pids[on, owner] = pid
        self._show()

    def follow(self, owner: str, *, on: str) -> Callable[[int], None]:
        """What a fake calls with the bytes that it holds there."""
        return lambda held: self.hold(owner, held // MB, on=on)

    def _show(self) -> None:
        if self._prompt:
            self._nvml.host(*(self._left(gpu) for gpu in self._gpus))

    def _left(self, gpu: Gpu) -> Gpu:
        if not isinstance(gpu.memory, tuple):
            return gpu
        return replace(gpu, memory=(gpu.memory[0], self.free_mb(gpu.uuid)), compute=self._processes(gpu))

    def _processes(self, gpu: Gpu) -> str | None:
        """What the driver lists: as the GPU was made, unless some owner's process was named."""
        named = {owner: pid for (uuid, owner), pid in self._pids.items() if uuid == gpu.uuid}
        if not named:
            return gpu.compute
        held = {pid: self._held_mb[gpu.uuid, owner] * MB for owner, pid in named.items()}
        return " ".join(f"{pid}:{size}:none" for pid, size in held.items() if size)
