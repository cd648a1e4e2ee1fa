"""A site for the tests of the command line, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.clisite import CliSite


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CliSite]:
    """A running site with a real and a scripted runtime. Tests that stop parts of it start their own."""
    running = CliSite(tmp_path_factory.mktemp("clisite"))
    try:
        running.start()
        yield running
    finally:
        running.stop()
