"""The part of NVML that gpukeeper uses, with types, and with one error instead of the binding's many.

Every call may hang in the driver: these methods are for the thread of a lane, never for the event loop.
"""

from __future__ import annotations

import importlib
from enum import IntEnum
from typing import Any, NamedTuple

from gpukeeper.events.errors import GpukeeperError


class Status(IntEnum):
    """The return codes of NVML that mean something to us."""

    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    DRIVER_NOT_LOADED = 9
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    GPU_NOT_FOUND = 28
    UNKNOWN = 999


class NvmlFailure(GpukeeperError):
    """NVML refused a call. ``status`` is its return code; the message is the driver's own text."""

    code = "nvml_failure"

    def __init__(self, call: str, status: int, text: str) -> None:
        super().__init__(f"{call}: {text}", call=call, status=status, text=text)
        self.status = status
        self.text = text


class Memory(NamedTuple):
    """Bytes on the device. ``used`` includes what the driver keeps for itself."""

    total: int
    free: int
    used: int


class RunningProcess(NamedTuple):
    """A process on the device. The PID is the host's, also when asked from inside a container."""

    pid: int
    used_bytes: int | None
    #: The MIG instance the process runs in, where there is one.
    gpu_instance: int | None


#: The device or the driver is gone: an answer to any question then, never the answer to one.
_NOBODY_TO_ASK = frozenset({Status.GPU_IS_LOST, Status.UNINITIALIZED, Status.DRIVER_NOT_LOADED})
_NO_INSTANCE = 0xFFFFFFFF
_MIG_ON = 1
_ADDRESSING_ATS = 2


class NvmlLibrary:
    """Typed calls. A handle is opaque and lives as long as the library stays initialised."""

    def __init__(self) -> None:
        # Imported when first needed: a host without NVIDIA hardware never loads the binding.
        self._nvml: Any = importlib.import_module("pynvml")

    def _call(self, name: str, *args: Any) -> Any:
        try:
            return getattr(self._nvml, name)(*args)
        except self._nvml.NVMLError as error:
            raise NvmlFailure(name, int(error.value), str(error)) from error
        except self._nvml.NVMLLibraryMismatchError as error:
            raise NvmlFailure(name, Status.FUNCTION_NOT_FOUND, "not offered by this driver") from error
        except UnicodeDecodeError as error:
            raise NvmlFailure(name, Status.UNKNOWN, "the driver's text is not UTF-8") from error

    def init(self) -> None:
        self._call("nvmlInit")

    def shutdown(self) -> None:
        self._call("nvmlShutdown")

    def count(self) -> int:
        return int(self._call("nvmlDeviceGetCount"))

    def handle(self, index: int) -> object:
        """By index and not by UUID: a look-up by UUID touches every GPU on its way, also one that hangs."""
        return self._call("nvmlDeviceGetHandleByIndex", index)

    def uuid(self, handle: object) -> str:
        return str(self._call("nvmlDeviceGetUUID", handle))

    def name(self, handle: object) -> str:
        return str(self._call("nvmlDeviceGetName", handle))

    def memory(self, handle: object) -> Memory:
        found = self._call("nvmlDeviceGetMemoryInfo", handle)
        return Memory(int(found.total), int(found.free), int(found.used))

    def utilization_percent(self, handle: object) -> int | None:
        """Of the time, in the driver's last sampling period, in which some kernel ran; None where it does not tell."""
        try:
            percent = int(self._call("nvmlDeviceGetUtilizationRates", handle).gpu)
        except NvmlFailure as failure:
            if failure.status in (Status.NOT_SUPPORTED, Status.FUNCTION_NOT_FOUND, Status.NO_PERMISSION):
                return None
            raise
        return percent if 0 <= percent <= 100 else None

    def has_bar1(self, handle: object) -> bool:
        """Whether the device has a window into memory of its own on the PCI bus."""
        try:
            return int(self._call("nvmlDeviceGetBAR1MemoryInfo", handle).bar1Total) > 0
        except NvmlFailure as failure:
            if failure.status in _NOBODY_TO_ASK:
                raise
            return False

    def shares_page_tables(self, handle: object) -> bool:
        """Whether the device is known to use the host's page tables (ATS), as integrated and coherent parts do."""
        try:
            return int(self._call("nvmlDeviceGetAddressingMode", handle)) == _ADDRESSING_ATS
        except NvmlFailure as failure:
            # Drivers refuse the question in several ways. None of them is a sign of an integrated part.
            if failure.status in _NOBODY_TO_ASK:
                raise
            return False

    def mig_on(self, handle: object) -> bool:
        try:
            current, _ = self._call("nvmlDeviceGetMigMode", handle)
        except NvmlFailure as failure:
            if failure.status in (Status.NOT_SUPPORTED, Status.FUNCTION_NOT_FOUND):
                return False
            raise
        return int(current) == _MIG_ON

    def slices(self, handle: object) -> list[object]:
        """The handles of the MIG slices of a GPU."""
        found: list[object] = []
        for place in range(int(self._call("nvmlDeviceGetMaxMigDeviceCount", handle))):
            try:
                found.append(self._call("nvmlDeviceGetMigDeviceHandleByIndex", handle, place))
            except NvmlFailure as failure:
                # Places without a slice are normal: they need not be filled in order.
                if failure.status not in (Status.NOT_FOUND, Status.INVALID_ARGUMENT):
                    raise
        return found

    def gpu_instance(self, slice_handle: object) -> int:
        return int(self._call("nvmlDeviceGetGpuInstanceId", slice_handle))

    def processes(self, handle: object) -> list[RunningProcess]:
        """Every process with a compute, graphics or MPS context.

        Raises:
            NvmlFailure: any of the lists could not be read. A part that has no graphics or MPS has none of these.
        """
        found = self._listed("nvmlDeviceGetComputeRunningProcesses", handle)
        for name in ("nvmlDeviceGetGraphicsRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses"):
            try:
                found += self._listed(name, handle)
            except NvmlFailure as failure:
                if failure.status not in (Status.NOT_SUPPORTED, Status.FUNCTION_NOT_FOUND):
                    raise
        return found

    def _listed(self, name: str, handle: object) -> list[RunningProcess]:
        try:
            rows = self._call(name, handle)
        except NvmlFailure as failure:
            if failure.status != Status.FUNCTION_NOT_FOUND:
                raise
            rows = self._call(f"{name}_v2", handle)  # drivers before 510
        return [_process(row) for row in rows]


def _process(row: Any) -> RunningProcess:
    # The binding turns "not available" (WSL, WDDM) into None.
    used = None if row.usedGpuMemory is None else int(row.usedGpuMemory)
    instance = int(row.gpuInstanceId)
    return RunningProcess(int(row.pid), used, None if instance == _NO_INSTANCE else instance)
