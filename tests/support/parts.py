"""Programs of a site as real processes: started, killed, frozen, ended, started again."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpukeeper.cli import deathsignal

#: Far more than any end takes: it only matters for a test that fails.
_END_WITHIN_S = 60.0


class Part:
    """One program, with its output in ``<folder>/<name>.log``. It ends when the tests' own process does."""

    def __init__(self, name: str, argv: Sequence[str], folder: Path, *, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._argv = tuple(argv)
        self._log = folder / f"{name}.log"
        self._env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert not self.running, f"{self.name} runs already"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", deathsignal.__file__, str(os.getpid()), *self._argv],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} was never started"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def freeze(self) -> None:
        """Let it stand still: its sockets stay open and nothing answers."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    async def kill(self) -> None:
        """End it as a crash does."""
        assert self._process is not None
        self._process.kill()
        await self.end()

    async def stop(self) -> int:
        """Ask it to end, and wait until it has."""
        self.signal(signal.SIGTERM)
        return await self.end()

    async def end(self) -> int:
        """Wait for its end; the exit status.

        Raises:
            AssertionError: it did not end; with the last of its output.
        """
        assert self._process is not None
        try:
            return await asyncio.to_thread(self._process.wait, _END_WITHIN_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} does not end; its output:\n{self.log[-4000:]}") from None

    def clear(self) -> None:
        """Leave nothing behind, whatever state it is in."""
        if self.running:
            assert self._process is not None
            self._process.kill()
            self._process.wait()


def children(pid: int) -> dict[int, str]:
    """The living children of a process, with their command lines."""
    answer = subprocess.run(
        ["ps", "-axww", "-o", "pid=,ppid=,stat=,command="], capture_output=True, check=True, timeout=10
    )
    found: dict[int, str] = {}
    for line in os.fsdecode(answer.stdout).splitlines():
        own, parent, state, command = line.split(None, 3)
        if int(parent) == pid and not state.startswith("Z"):
            found[int(own)] = command
    return found
