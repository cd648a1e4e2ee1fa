"""The fixtures ``site`` and ``card``: a site whose host has one card of the stub driver.

For test modules that say ``pytest_plugins = ["support.nvml_fixture", "support.card_fixture"]``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.card_site import CARD, EMPTY_MB, GRACE_S, TOTAL_MB
from support.cards import offer_driver
from support.nats import NatsServer
from support.nvml_stub import Gpu, NvmlStub
from support.shared_cards import SharedCards
from support.site import Site, site_in


@pytest.fixture
async def site(
    tmp_path: Path,
    nats_server: NatsServer,
    nvml: NvmlStub,
    nvml_library: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Site]:
    """A site whose host finds the GPUs that the stub of the driver lists."""
    offer_driver(nvml_library, monkeypatch)
    async with site_in(tmp_path, nats_server.settings()) as site:
        site.devices = []
        site.sections["agent"] |= {"find_devices": True, "idle_grace_s": GRACE_S}
        yield site


@pytest.fixture
def card(nvml: NvmlStub) -> SharedCards:
    return SharedCards(nvml, Gpu(uuid=CARD, memory=(TOTAL_MB, EMPTY_MB)))
