"""A program inside a container, spoken to over the raw stream of the Docker Engine API ("attach" in its reference).

The package ``docker`` hands out the socket from behind its own read buffer, which may already hold the first of the
program's output, and it can only be read by blocking. So this one conversation is held directly.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import msgspec
import structlog

from gpukeeper.agents.containers.port import ContainerFailure

_log = structlog.get_logger("gpukeeper.containers")

LINE_BYTES_MAX = 16 * 1024 * 1024
_PIECE_BYTES = 64 * 1024
_HEAD_BYTES_MAX = 64 * 1024
_COMPLAINT_BYTES = 4096
_KILL_TIMEOUT_S = 5.0
_LOOK_AGAIN_S = 0.05
_STDERR = 2


class Running(msgspec.Struct, frozen=True):
    """What the engine says of an exec: whether it runs, and what it ended with."""

    running: bool
    exit_code: int | None = None


async def open_stream(
    base_url: str, exec_id: str, api_version: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Start the exec that was prepared, and return its raw stream.

    Raises:
        ContainerFailure: the engine refused, in its own words; or it cannot be reached.
    """
    parts = urlsplit(base_url)
    try:
        if parts.scheme == "unix":
            reader, writer = await asyncio.open_unix_connection(parts.path)
        elif parts.scheme in ("tcp", "http") and parts.hostname and parts.port:
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        else:
            raise ContainerFailure("refused", f"programs inside containers need a plain socket, not {base_url}")
    except OSError as error:
        raise ContainerFailure("absent", f"no container engine at {base_url}: {error.strerror or error}") from error
    body = b'{"Detach":false,"Tty":false}'
    head = (
        f"POST /v{api_version}/exec/{exec_id}/start HTTP/1.1\r\nHost: docker\r\nContent-Type: application/json\r\n"
        f"Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    try:
        writer.write(head.encode() + body)
        await _upgraded(reader)
    except BaseException:
        await _shut(writer)
        raise
    return reader, writer


async def _upgraded(reader: asyncio.StreamReader) -> None:
    """Read the head of the engine's answer; what follows is the program's."""
    try:
        answer = await reader.readuntil(b"\r\n\r\n")
        if answer.split(b" ", 2)[1:2] in ([b"101"], [b"200"]):
            return
        words = " ".join((await reader.read(_HEAD_BYTES_MAX)).decode("utf-8", "replace").split())
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise ContainerFailure("bad_reply", f"the program was not started: {error}") from error
    raise ContainerFailure("refused", f"the program was not started: {words or answer[:100]!r}")


class DockerExec:
    """One started program, under the contract of ``port.Exec``.

    Args:
        reader, writer: its raw stream.
        look: asks the engine about it; None where the engine knows it no more.
        end: sends SIGKILL to it and to all that it started, from inside the container.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        look: Callable[[], Awaitable[Running | None]],
        end: Callable[[], Awaitable[None]],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._look = look
        self._end = end
        self._ready: deque[bytes] = deque()
        self._rest = b""
        self._open = True
        self._complaint = b""
        self._gone: Running | None = None

    @property
    def complaint(self) -> str:
        return " ".join(self._complaint.decode("utf-8", "replace").split())

    async def write(self, data: bytes) -> None:
        try:
            self._writer.write(data)
            await self._writer.drain()
        except (OSError, RuntimeError) as error:
            raise ContainerFailure("refused", f"its input is closed: {error}") from error

    async def line(self) -> bytes | None:
        while not self._ready:
            if not self._open:
                return None
            await self._read()
        return self._ready.popleft()

    async def exit_code(self) -> int | None:
        await self.ended()
        return None if self._gone is None else self._gone.exit_code

    async def ended(self) -> bool:
        if self._gone is not None:
            return True
        try:
            seen = await self._look()
        except ContainerFailure as failure:
            _log.warning("exec_not_seen", why=failure.detail)
            return False
        if seen is None:
            # The engine forgets it with its container.
            self._gone = Running(running=False)
        elif not seen.running:
            self._gone = seen
        return self._gone is not None

    async def kill(self) -> bool:
        await _shut(self._writer)
        self._open = False
        try:
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                if not await self.ended():
                    await self._end()
                while not await self.ended():
                    await asyncio.sleep(_LOOK_AGAIN_S)
        except TimeoutError:
            _log.error("exec_not_ended", waited_s=_KILL_TIMEOUT_S)
        except ContainerFailure as failure:
            _log.error("exec_not_ended", why=failure.detail)
        return self._gone is not None

    async def _read(self) -> None:
        """Take one frame: a head (stream, three zeros, length in four bytes, big-endian), and its piece of output."""
        try:
            head = await self._reader.readexactly(8)
            left = int.from_bytes(head[4:], "big")
            while left:
                piece = await self._reader.readexactly(min(left, _PIECE_BYTES))
                left -= len(piece)
                self._take(head[0], piece)
        except asyncio.IncompleteReadError:
            self._open = False
            if self._rest.strip():
                self._ready.append(self._rest)
            self._rest = b""
        except OSError as error:
            raise ContainerFailure("absent", f"the connection to the engine ended: {error}") from error

    def _take(self, stream: int, piece: bytes) -> None:
        if stream == _STDERR:
            self._complaint = (self._complaint + piece)[-_COMPLAINT_BYTES:]
            return
        *lines, self._rest = (self._rest + piece).split(b"\n")
        self._ready.extend(line for line in lines if line.strip())
        if len(self._rest) > LINE_BYTES_MAX:
            raise ContainerFailure("bad_reply", f"a line of more than {LINE_BYTES_MAX} bytes")


async def _shut(writer: asyncio.StreamWriter) -> None:
    writer.close()
    try:
        await writer.wait_closed()
    except OSError:
        return  # it was broken before; closing was all that was wanted
