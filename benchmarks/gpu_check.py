"""`make gpu-check`: our reader and our admission against a real NVIDIA driver. Needs 6 GB free on a GPU, no network.

A second process allocates 4 GB. The device's use must rise by that, the process must be listed with it, and a job that
fitted before must be denied meanwhile and fit again afterwards.
"""

from __future__ import annotations

import asyncio
import ctypes
import subprocess
import sys
import time

from gpukeeper.agents.config import AgentConfig
from gpukeeper.agents.devices.inventory import Inventory
from gpukeeper.capacity.admission import Admit, Deny, admit
from gpukeeper.capacity.device import Device
from gpukeeper.capacity.need import Need
from gpukeeper.events.clock import now
from gpukeeper.events.readings import DeviceReading

HELD_MB = 4_096
#: What a CUDA context takes beside what is allocated in it.
CONTEXT_MB_MAX = 2_048
#: Other programs on the card may take or give a little meanwhile.
TOLERANCE_MB = 256
_WITHIN_S = 20.0
_MB = 1_048_576


def hold(uuid: str) -> int:
    """The second process: allocate on the GPU of this UUID, say so, and hold it until stdin is closed."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> None:
        status = getattr(cuda, name)(*arguments)
        if status:
            raise RuntimeError(f"{name}: CUDA error {status}")

    call("cuInit", 0)
    count = ctypes.c_int()
    call("cuDeviceGetCount", ctypes.byref(count))
    for number in range(count.value):
        device = ctypes.c_int()
        call("cuDeviceGet", ctypes.byref(device), number)
        raw = (ctypes.c_ubyte * 16)()
        call("cuDeviceGetUuid", raw, device)
        if uuid.lower().removeprefix("gpu-").replace("-", "") == bytes(raw).hex():
            break
    else:
        raise RuntimeError(f"CUDA has no device {uuid}")
    context, memory = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(HELD_MB * _MB))
    print("holding", flush=True)
    sys.stdin.read()
    return 0


def judge(
    device: Device, before: DeviceReading, during: DeviceReading, after: DeviceReading, pid: int
) -> list[tuple[str, bool]]:
    """What must be so, and whether it is. Pure."""
    assert before.used_mb is not None
    assert before.free_mb is not None
    assert during.used_mb is not None
    assert after.used_mb is not None
    rise_mb = during.used_mb - before.used_mb
    left_mb = after.used_mb - before.used_mb
    uses = {use.pid: use.used_mb for use in during.processes or ()}
    need = Need(vram_mb=before.free_mb - device.headroom_mb - HELD_MB // 2, source="declared")

    def decided(reading: DeviceReading) -> Admit | Deny:
        return admit(device=device, reading=reading, reserved_mb=0, need=need, resident=False, allow_unknown_need=False)

    return [
        (
            f"use rose by {rise_mb} MB while another process held {HELD_MB} MB",
            HELD_MB - TOLERANCE_MB <= rise_mb <= HELD_MB + CONTEXT_MB_MAX + TOLERANCE_MB,
        ),
        (f"process {pid} is listed with {uses.get(pid)} MB", (uses.get(pid) or 0) >= HELD_MB),
        (f"use is back to {left_mb:+d} MB of what it was", abs(left_mb) <= TOLERANCE_MB),
        (f"a job of {need.vram_mb} MB fits before", isinstance(decided(before), Admit)),
        ("it is denied meanwhile", isinstance(decided(during), Deny)),
        ("and fits again afterwards", isinstance(decided(after), Admit)),
    ]


async def check() -> int:
    inventory = Inventory(AgentConfig(host="check"), now=now)
    try:
        devices = [device for device in await inventory.find() if device.kind == "gpu" and not device.unschedulable]
        for problem in inventory.problems():
            print(f"note: {problem}")
        readings = {device.id: await inventory.read(device.id) for device in devices}
        device = next((each for each in devices if (readings[each.id].free_mb or 0) >= HELD_MB + CONTEXT_MB_MAX), None)
        if device is None:
            print(f"no NVIDIA GPU with {HELD_MB + CONTEXT_MB_MAX} MB free was found: nothing was checked")
            return 2
        print(f"{device.id} ({device.name})")
        before = readings[device.id]
        holder = subprocess.Popen(
            [sys.executable, "-P", __file__, device.id], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert holder.stdout is not None
            said = await asyncio.wait_for(asyncio.to_thread(holder.stdout.readline), _WITHIN_S)
            if said.strip() != b"holding":
                print("the second process could not allocate: see above")
                return 1
            during = await inventory.read(device.id)
        finally:
            # Closing its stdin is what ends it.
            holder.communicate(timeout=_WITHIN_S)
        after = await _settled(inventory, device, before)
        found = judge(device, before, during, after, holder.pid)
    finally:
        await inventory.close()
    for words, holds in found:
        print(f"[{'ok' if holds else 'WRONG'}] {words}")
    return 0 if all(holds for _, holds in found) else 1


async def _settled(inventory: Inventory, device: Device, before: DeviceReading) -> DeviceReading:
    """The first reading that shows the memory back, or the last one in time."""
    give_up_at = time.monotonic() + _WITHIN_S
    while True:
        reading = await inventory.read(device.id)
        back = reading.used_mb is not None and reading.used_mb <= (before.used_mb or 0) + TOLERANCE_MB
        if back or time.monotonic() > give_up_at:
            return reading
        await asyncio.sleep(0.25)


if __name__ == "__main__":
    sys.exit(hold(sys.argv[1]) if len(sys.argv) > 1 else asyncio.run(check()))
