"""The fixture ``docker_engine``: for test modules that say ``pytest_plugins = ["support.docker_fixture"]``."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.dockerd import BUSYBOX, DockerDaemon
from support.require import skip_or_fail


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[DockerDaemon]:
    """A running engine; the test is skipped (in CI: fails) where none can be started."""
    if shutil.which("dockerd") is None:
        skip_or_fail("no dockerd: install docker.io")
    if not any(Path(path).exists() for path in BUSYBOX):
        skip_or_fail("no busybox: install busybox-static")
    if os.geteuid() != 0:
        skip_or_fail("dockerd needs root")
    # A socket's path may have about a hundred characters: pytest's own folders are too deep.
    daemon = DockerDaemon(Path(tempfile.mkdtemp(prefix="gpuq-docker-")))
    try:
        try:
            daemon.start()
        except AssertionError as error:
            skip_or_fail(f"dockerd does not start here: {error}")
        yield daemon
    finally:
        daemon.stop()
