"""`gpuq demo` shows a whole site at work, says what is wrong, and leaves nothing behind, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpukeeper.cli.demo import run
from gpukeeper.cli.demo.narration import Narration
from gpukeeper.cli.exitcodes import Exit
from gpukeeper.events.errors import ConfigError
from support.clisite import read_until, start, stop

pytestmark = pytest.mark.processes


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A demo that runs, with a temporary folder of its own to look into."""
    # A site of the user's own is not touched.
    process = start("demo", env={"TMPDIR": str(tmp_path), "GPUQ_NATS_URL": "nats://127.0.0.1:9"})
    yield process
    stop(process)


def left_behind(folder: Path) -> list[str]:
    """Files below ``folder``, and processes that speak of it."""
    found = [str(path) for path in folder.iterdir()]
    if sys.platform == "linux":
        lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
        found += [line.decode(errors="replace") for line in lines if str(folder).encode() in line]
    return found


def test_the_demo_shows_every_step_and_all_is_as_it_should_be(demo: subprocess.Popen[bytes], tmp_path: Path) -> None:
    said, _ = demo.communicate(timeout=60)
    text = said.decode()

    assert demo.returncode == Exit.OK, text
    assert "[WRONG]" not in text
    assert text.count("[ok]") >= 12
    assert "rejected: need.vram_mb = '51200': more than any device has even when empty" in text
    assert "they ran in this order: demo-a, demo-urgent, demo-b, demo-c" in text
    assert "they are the same, byte for byte" in text
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", ["gpuq demo:", "== 2."])
def test_a_demo_that_is_interrupted_leaves_nothing_behind(
    demo: subprocess.Popen[bytes], tmp_path: Path, when: str, number: signal.Signals
) -> None:
    read_until(demo, when)
    demo.send_signal(number)
    demo.send_signal(number)  # impatience changes nothing
    demo.communicate(timeout=60)

    assert demo.returncode == Exit.INTERRUPTED
    assert left_behind(tmp_path) == []


def test_a_demo_whose_site_dies_fails_and_leaves_nothing_behind(demo: subprocess.Popen[bytes], tmp_path: Path) -> None:
    read_until(demo, "== 1.")
    (llama,) = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if path.exists() and f"{tmp_path}".encode() in path.read_bytes() and b"llama_server" in path.read_bytes()
    ]
    os.kill(llama, signal.SIGKILL)
    said, _ = demo.communicate(timeout=60)

    assert demo.returncode not in (Exit.OK, Exit.INTERRUPTED), said.decode()
    assert left_behind(tmp_path) == []


def test_a_missing_extra_is_one_sentence_with_the_command() -> None:
    with pytest.raises(ConfigError, match=r"^the demo needs no_such_module: pip install 'gpukeeper\[demo\]'$"):
        run.require_extra(("json", "no_such_module"))


def test_what_is_not_as_it_should_be_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    narration = Narration()
    narration.check("two and two are four", holds=True)
    narration.check("two and two are five", holds=False)

    assert narration.wrong == ["two and two are five"]
    assert "[WRONG] two and two are five" in capsys.readouterr().out
