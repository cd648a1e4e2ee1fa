"""Attempts on a host with several GPUs, read through the real binding of NVML, and one Ollama for all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpukeeper.agents.config import DeviceConfig, RuntimeConfig
from gpukeeper.agents.runtimes.ollama import Ollama
from gpukeeper.events.job import Failed, PlacementVerified, Succeeded
from gpukeeper.events.reasons import Reason
from support.nvml_stub import Gpu, NvmlStub
from support.ollama import FakeOllama
from support.rig import rig

pytest_plugins = ["support.nvml_fixture"]

A = "GPU-aaaaaaaa-0000-0000-0000-000000000001"
B = "GPU-bbbbbbbb-0000-0000-0000-000000000002"
C = "GPU-cccccccc-0000-0000-0000-000000000003"
TOTAL_MB = 24_564


def loads_onto(nvml: NvmlStub, taker: str | None) -> Callable[[int], None]:
    """What Ollama puts into VRAM goes to this GPU, whatever was claimed."""

    def show(vram_bytes: int) -> None:
        used_mb = {gpu: vram_bytes // (1 << 20) if gpu == taker else 300 for gpu in (A, B, C)}
        nvml.host(*(Gpu(uuid=gpu, memory=(TOTAL_MB, TOTAL_MB - used)) for gpu, used in used_mb.items()))

    return show


@pytest.mark.parametrize(
    ("devices", "taker", "passes"),
    [((), A, True), ((), B, True), ((A, B), B, True), ((A, B), C, False), ((), None, False)],
)
async def test_a_model_is_looked_for_on_every_gpu_that_its_runtime_may_use(
    nvml: NvmlStub, devices: tuple[str, ...], taker: str | None, passes: bool
) -> None:
    cards = [DeviceConfig(id=gpu) for gpu in (A, B, C)]
    async with FakeOllama() as fake:
        fake.on_vram = loads_onto(nvml, taker)
        fake.on_vram(0)
        ollama = Ollama(RuntimeConfig(name="ollama", provider="ollama", url=fake.url, devices=devices))
        async with rig(*cards) as host:
            await (await host.attempt(ollama, device=A)).run()
        await ollama.close()

    if passes:
        (verified,) = host.of(PlacementVerified)
        assert verified.sources == f"vram: runtime; device: rise ({', '.join(devices or (A, B, C))})"
        assert len(host.of(Succeeded)) == 1
    else:
        assert [fact.reason for fact in host.of(Failed)] == [Reason.PLACEMENT_DISPUTED]
