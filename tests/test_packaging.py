"""What is built holds every module."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_a_wheel_holds_every_module(tmp_path: Path) -> None:
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--wheel-dir",
            str(tmp_path),
            str(ROOT),
        ],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("gpukeeper-*.whl")
    links = [link for link in (ROOT / "src" / "gpukeeper").iterdir() if link.is_symlink()]
    modules = {
        f"gpukeeper/{link.name}/{path.relative_to(link.resolve())}"
        for link in links
        for path in link.resolve().rglob("*.py")
    }

    held = set(zipfile.ZipFile(wheel).namelist())

    assert modules
    assert modules - held == set()
    assert "gpukeeper/py.typed" in held
