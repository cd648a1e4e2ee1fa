"""Servers that the whole run shares; each test gets an account of its own on them."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator

import pytest
from hypothesis import HealthCheck, settings

from gpukeeper.events.connection import Connection, NatsSettings, connect
from support.nats import NatsCluster, NatsServer

# How long an example takes says more about the machine than about the code.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One NATS server with JetStream. Tests that kill a server start their own."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def nats_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsCluster]:
    """Three NATS servers as a cluster. A test that kills one starts it again before it ends."""
    cluster = NatsCluster(tmp_path_factory.mktemp("cluster"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def nats_settings(nats_server: NatsServer) -> NatsSettings:
    """How to reach an empty account on the shared server."""
    return nats_server.settings()


@pytest.fixture
async def connection(nats_settings: NatsSettings) -> AsyncIterator[Connection]:
    """A connection to an empty account on the shared server."""
    opened = await connect(nats_settings, name="tests")
    yield opened
    await opened.close()


def pytest_configure() -> None:
    """Started in the background, this process ignores SIGINT, and so would every program that a test interrupts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
