"""The fixture ``nvml``: for test modules that say ``pytest_plugins = ["support.nvml_fixture"]``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.nvml_stub import SCRIPT_VARIABLE, NvmlStub, compile_stub, load_stub


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled stub."""
    return compile_stub(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def nvml(nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlStub]:
    """The stub, loaded into this process; a host without GPUs until the test says otherwise."""
    load_stub(nvml_library)
    stub = NvmlStub(tmp_path)
    stub.host()
    monkeypatch.setenv(SCRIPT_VARIABLE, str(stub.script))
    yield stub
    stub.release_all()
