"""What a host tells of itself: bounded, and never at the cost of its heartbeats."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

import msgspec
import pytest
import pytest_asyncio

from gpukeeper.agents.catalogue import BYTES_MAX, NAMES_MAX, told
from gpukeeper.agents.config import DeviceConfig, RuntimeConfig
from gpukeeper.agents.runtimes.ollama import Ollama
from gpukeeper.agents.surveyor import Surveyor
from gpukeeper.events import subjects
from gpukeeper.events.codec import decode
from gpukeeper.events.memory import MemoryLog
from gpukeeper.events.readings import Heartbeat
from gpukeeper.events.runtime import HealthChanged
from support.nvml_stub import Gpu, NvmlStub
from support.ollama import FakeOllama
from support.rig import HOST, Rig, rig

pytest_plugins = ["support.nvml_fixture"]


@pytest_asyncio.fixture
async def fake() -> AsyncGenerator[FakeOllama]:
    async with FakeOllama() as server:
        yield server


@pytest_asyncio.fixture
async def host() -> AsyncGenerator[Rig]:
    async with rig() as made:
        yield made


@pytest_asyncio.fixture
async def ollama(fake: FakeOllama) -> AsyncGenerator[Ollama]:
    provider = Ollama(RuntimeConfig(name="ollama", provider="ollama", url=fake.url))
    yield provider
    await provider.close()


def surveyor_of(host: Rig, ollama: Ollama, beats: MemoryLog) -> Surveyor:
    return Surveyor(host.room, host.config, beats, {"ollama": ollama}, lambda: ())


async def newest_beat(beats: MemoryLog) -> Heartbeat:
    stored = await beats.last(subjects.beat(HOST))
    assert stored is not None
    beat = decode(stored).data
    assert isinstance(beat, Heartbeat)
    return beat


async def test_a_heartbeat_leaves_the_catalogue_to_the_log(host: Rig, ollama: Ollama) -> None:
    beats = MemoryLog(now_ns=time.time_ns)
    surveyor = surveyor_of(host, ollama, beats)
    await surveyor.announce()
    await surveyor.beat()

    (look,) = (await newest_beat(beats)).runtimes
    assert (look.healthy, look.models) == (True, None)
    told_models = host.of(HealthChanged)[-1].models
    assert told_models is not None
    assert {"m:8b", "qwen3"} <= set(told_models)


@pytest.mark.parametrize("count", [NAMES_MAX, 50_000])
async def test_a_catalogue_that_is_too_large_is_told_as_unknown_and_not_as_a_part_of_it(
    host: Rig, fake: FakeOllama, ollama: Ollama, count: int
) -> None:
    fake.installed = {f"model-{number}:8b": 1 for number in range(count)}
    surveyor = surveyor_of(host, ollama, MemoryLog(now_ns=time.time_ns))
    await surveyor.announce()

    health = host.of(HealthChanged)[-1]
    assert health.healthy
    if count == NAMES_MAX:
        assert health.models is not None
        assert len(health.models) == NAMES_MAX
    else:
        assert health.models is None
        assert "count as unknown" in health.detail


@pytest.mark.parametrize(
    ("names", "is_told"),
    [
        (("m",) * NAMES_MAX, True),
        (("m",) * (NAMES_MAX + 1), False),
        (("x" * BYTES_MAX,), True),
        (("x" * (BYTES_MAX + 1),), False),
        (("é" * BYTES_MAX,), False),
    ],
)
def test_what_is_told_of_a_catalogue_is_bounded_in_number_and_size(names: tuple[str, ...], is_told: bool) -> None:
    models, why = told(names)

    assert (models, bool(why)) == ((names, False) if is_told else (None, True))


async def test_news_that_the_log_refuses_for_good_end_neither_the_looks_nor_the_heartbeats(
    host: Rig, fake: FakeOllama, ollama: Ollama
) -> None:
    beats = MemoryLog(now_ns=time.time_ns)
    host.config = msgspec.structs.replace(host.config, heartbeat_s=0.001)
    surveyor = surveyor_of(host, ollama, beats)
    await surveyor.announce()
    host.log.refused.add(subjects.runtime(HOST, "ollama"))
    fake.installed = {"another:8b": 1}
    running = asyncio.create_task(surveyor.run())
    try:
        async with asyncio.timeout(20):
            while await beats.last_seq() < 5 and not running.done():
                await asyncio.sleep(0)
    finally:
        running.cancel()
        await asyncio.wait({running})

    assert running.cancelled()


async def test_what_is_wrong_with_the_devices_is_logged_when_it_changes(
    nvml: NvmlStub, ollama: Ollama, capsys: pytest.CaptureFixture[str]
) -> None:
    nvml.host()
    async with rig(DeviceConfig(id="GPU-1")) as host:
        surveyor = surveyor_of(host, ollama, MemoryLog(now_ns=time.time_ns))
        await surveyor.announce()
        first = await surveyor.devices_changed()
        said = capsys.readouterr().out
        nvml.host(Gpu(uuid="GPU-1"))
        then = await surveyor.devices_changed()
        said_then = capsys.readouterr().out

    assert (first, then) == (False, True)
    assert said.count("GPU-1: declared, not found") == 1
    assert said_then.count("none any more") == 1
