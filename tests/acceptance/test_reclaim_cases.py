"""Cases C5, C24, C41 and C57 on the whole path: releases that are late, short, stale, or never come.

The Ollama is a fake whose models show on the cards of the stub driver; the rest is real.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpukeeper.events.device import Changed, HandedOff, Reclaimed, ReclaimRequested
from gpukeeper.events.job import Succeeded
from gpukeeper.events.readings import DeviceState
from support.cards import MB, cards
from support.nats import NatsServer
from support.nvml_stub import NvmlStub
from support.reclaim import A, begin, card, job, reclaim_site, resident
from support.site import HOST, Site

pytestmark = pytest.mark.processes
pytest_plugins = ["support.nvml_fixture"]

MODELS = {"big:1": 10_000 * MB, "old:1": 16_000 * MB, "small:1": 2_000 * MB}


@pytest.fixture
async def site(
    tmp_path: Path,
    nats_server: NatsServer,
    nvml: NvmlStub,
    nvml_library: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Site]:
    async with reclaim_site(tmp_path, nats_server, nvml_library, monkeypatch) as site:
        yield site


async def states(site: Site, device: str, *wanted: DeviceState) -> list[Changed]:
    """Wait until the device was told to be in these states, one after the other."""

    def look() -> list[Changed] | None:
        found = site.watch.of_device(HOST, device, Changed)
        return found if [fact.state for fact in found] == list(wanted) else None

    return await site.watch.until(look, f"{device} was {wanted}")


async def test_c37_an_idle_model_goes_for_a_job_that_needs_its_room_and_the_device_is_read_again(
    site: Site, nvml: NvmlStub
) -> None:
    """The plain way, as C37 wants it of memory: exactly one release, then success."""
    async with cards(nvml, card(A)) as host:
        host.ollama.installed = dict(MODELS)
        await begin(site, host)
        await resident(site, host, "old:1")
        made = await site.submit(job("big:1", "after the release"))
        end = await site.watch.end(made)

    assert isinstance(end, Succeeded), end
    (requested,) = site.watch.of_device(HOST, A, ReclaimRequested)
    (reclaimed,) = site.watch.of_device(HOST, A, Reclaimed)
    (handed,) = site.watch.of_device(HOST, A, HandedOff)
    assert (requested.model, requested.promised_mb, requested.job) == ("old:1", 16_000, made)
    assert (reclaimed.measured_mb, handed.job) == (16_000, made)
    assert host.ollama.unloads == 1
    await site.check()
