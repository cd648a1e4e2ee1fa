"""Starts programs whose output is kept in a bounded log, and that end when this process does."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from gpukeeper.cli import deathsignal
from gpukeeper.events.errors import GpukeeperError

LINE_BYTES_MAX = 16_384
#: After a program's end, output that its own children still hold open is waited for this long.
_DRAIN_S = 1.0
#: Even SIGKILL does not end a process that hangs in the kernel.
_KILL_S = 10.0


class ProcessStuck(GpukeeperError):
    """A process did not end after SIGKILL: it hangs in the kernel."""

    code = "process_stuck"


class BoundedLog:
    """Lines of one program, in ``path`` and an older generation ``path.1``, each at most ``bytes_max`` large.

    The last lines are also kept in memory. Where the file or ``echo`` cannot be written (a full disk, a closed
    terminal) the lines go on to the other, and the problem is told once: no program hangs for its log.
    """

    def __init__(
        self,
        path: Path,
        *,
        bytes_max: int = 5_000_000,
        tail_lines: int = 20,
        echo: Callable[[str], None] | None = None,
    ) -> None:
        self._path = path
        self._bytes_max = bytes_max
        self._tail: deque[str] = deque(maxlen=tail_lines)
        self._echo = echo
        self._file: IO[bytes] | None = None
        self._size = 0
        self._file_failed = False

    def write_line(self, line: bytes) -> None:
        """Keep one line, given without its end."""
        text = line.decode("utf-8", errors="replace")
        self._tail.append(text)
        self._write_file(line + b"\n")
        self._write_echo(text)

    def tail(self) -> tuple[str, ...]:
        """The last lines, oldest first."""
        return tuple(self._tail)

    def close(self) -> None:
        """Close the file. A later line opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write_file(self, line: bytes) -> None:
        try:
            if self._file is None:
                self._open()
            elif self._size + len(line) > self._bytes_max:
                self.close()
                self._path.replace(self._path.with_name(self._path.name + ".1"))
                self._open()
            assert self._file is not None
            self._file.write(line)
            self._size += len(line)
            self._file_failed = False
        except OSError as error:
            self.close()
            if not self._file_failed:
                self._file_failed = True
                self._write_echo(f"{self._path}: cannot be written: {error.strerror}")

    def _open(self) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._file = open(descriptor, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        self._size = os.fstat(descriptor).st_size

    def _write_echo(self, text: str) -> None:
        if self._echo is None:
            return
        try:
            self._echo(text)
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            self._echo = None
            self._write_file(f"the terminal cannot be written to: {error}\n".encode())


class Child:
    """One started program. Made by :meth:`start`; whoever starts it also waits for its end."""

    def __init__(self, process: asyncio.subprocess.Process, output: asyncio.Task[None], log: BoundedLog) -> None:
        self._process = process
        self._output = output
        self.log = log
        self._ended = asyncio.create_task(self._until_ended())

    @classmethod
    async def start(cls, argv: Sequence[str], *, log: BoundedLog, env: Mapping[str, str] | None = None) -> Child:
        """Start ``argv`` with its output (both streams) going to ``log``, in a session of its own.

        A session of its own keeps Ctrl-C in the terminal from reaching it: the order of stopping is the
        parent's. Call from the main thread only, as the program ends with the thread that started it.
        """
        read_end, write_end = os.pipe()
        source = os.fdopen(read_end, "rb", buffering=0)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", deathsignal.__file__, str(os.getpid())),
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                env=None if env is None else dict(env),
                start_new_session=True,
            )
        except BaseException:
            source.close()
            raise
        finally:
            os.close(write_end)
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), source
        )
        return cls(process, asyncio.create_task(_pump(reader, transport, log)), log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._ended.done()

    async def wait(self) -> int:
        """Wait for the end, unbounded; return the exit status, negative for a signal. May be called often."""
        return await asyncio.shield(self._ended)

    async def stop(self, grace_s: float, *, at_once: asyncio.Event | None = None) -> int:
        """SIGTERM, then SIGKILL after ``grace_s`` or as soon as ``at_once`` is set; return the exit status.

        Raises:
            ProcessStuck: it did not end even then.
        """
        self._signal(signal.SIGTERM)
        hurry = asyncio.create_task((at_once or asyncio.Event()).wait())
        await asyncio.wait({self._ended, hurry}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not self._ended.done():
            self._signal(signal.SIGKILL)
            await asyncio.wait({self._ended}, timeout=_KILL_S)
        if not self._ended.done():
            raise ProcessStuck(f"process {self.pid} did not end after SIGKILL", pid=self.pid)
        return self._ended.result()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            self._process.send_signal(number)

    async def _until_ended(self) -> int:
        code = await self._process.wait()
        done, _ = await asyncio.wait({self._output}, timeout=_DRAIN_S)
        if not done:
            self._output.cancel()
            await asyncio.wait({self._output})
        self.log.close()
        if done:
            self._output.result()  # what went wrong in reading its output is not lost
        return code


async def _pump(reader: asyncio.StreamReader, transport: asyncio.BaseTransport, log: BoundedLog) -> None:
    """Cut the output into lines; a line longer than the bound becomes several."""
    rest = b""
    try:
        while chunk := await reader.read(65_536):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                log.write_line(line)
            while len(rest) > LINE_BYTES_MAX:
                log.write_line(rest[:LINE_BYTES_MAX])
                rest = rest[LINE_BYTES_MAX:]
        if rest:
            log.write_line(rest)
    finally:
        transport.close()


def command_line(pid: int) -> str | None:
    """The command line of a living process, its arguments joined by spaces; None for one that has ended."""
    return _command_line_from_proc(pid) if Path("/proc/self/cmdline").exists() else _command_line_from_ps(pid)


def _command_line_from_proc(pid: int) -> str | None:
    try:
        content = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None
    # That of a zombie is empty.
    return os.fsdecode(content.rstrip(b"\0").replace(b"\0", b" ")) or None


def _command_line_from_ps(pid: int) -> str | None:
    """For systems without /proc, such as macOS."""
    answer = subprocess.run(
        ["ps", "-ww", "-o", "stat=,command=", "-p", str(pid)],  # noqa: S607 - a tool of every POSIX system
        capture_output=True,
        check=False,
        timeout=5,
    )
    state, _, command = os.fsdecode(answer.stdout).strip().partition(" ")
    return None if not state or state.startswith("Z") else command.strip() or None
