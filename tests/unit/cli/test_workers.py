"""The processes of a site, apart from what they run."""

from __future__ import annotations

import subprocess
import sys

_LOGS_TO_NOBODY = """
import os
from gpukeeper.cli.workers import configure_logging
import structlog
read_end, write_end = os.pipe()
os.dup2(write_end, 2)
os.close(write_end)
os.close(read_end)
configure_logging()
structlog.get_logger("x").warning("first")
structlog.get_logger("x").warning("second")
print("goes on")
"""


def test_a_part_goes_on_when_whoever_read_its_output_has_died() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", _LOGS_TO_NOBODY],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode, done.stdout) == (0, "goes on\n")
