"""Operators at a site of real processes: commands of `gpuq`, each a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from support.site import Site


class Said(NamedTuple):
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.out)


async def gpuq(site: Site, *argv: str) -> Said:
    """Run one command against ``site``, as the configuration of its scheduler names it."""
    return await gpuq_with(site.folder / "scheduler.toml", site.data, *argv)


async def gpuq_with(config: Path, data: Path, *argv: str) -> Said:
    """Run one command with this configuration and this data folder."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "gpukeeper.cli.main", *argv, "--config", str(config), "--data", str(data)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "COLUMNS": "400"},
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return Said(process.returncode, out.decode(), err.decode())
