"""A network between client and server that can be cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Literal

#: What happens to the message that a trap waits for. ``withhold``: neither it nor anything later reaches the server.
#: ``lose``: it is lost with the connection. ``lose_ack``: the server takes it, and its answer is lost with the
#: connection.
Mishap = Literal["withhold", "lose", "lose_ack"]

#: What the server's answer to an append to the log begins with.
_ACK = b'{"stream":"GPUQ_LOG"'


class Trap:
    """Waits for a client to send ``marker``."""

    def __init__(self, marker: bytes, mishap: Mishap) -> None:
        self.marker = marker
        self.mishap: Mishap = mishap
        #: The marker was sent, and what should happen to it has happened.
        self.sprung = asyncio.Event()
        #: The marker has passed, and the answer has not come yet.
        self.open = False


class Network:
    """Passes bytes between clients and one server on loopback."""

    def __init__(self, upstream_port: int) -> None:
        self.port = 0
        #: Cut everything once this many more bytes have come from the server; None = never.
        self.bytes_until_cut: int | None = None
        self.cuts = 0
        self._trap: Trap | None = None
        self._upstream_port = upstream_port
        self._writers: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        """Abort every connection; what is on its way is lost."""
        self.cuts += 1
        self.bytes_until_cut = None
        for writer in self._writers:
            writer.transport.abort()

    async def pass_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, server_writer}
        self._writers |= both
        try:
            await asyncio.gather(
                self._pass(reader, server_writer, counts=False), self._pass(server_reader, writer, counts=True)
            )
        finally:
            self._writers -= both
            for one in both:
                one.transport.abort()

    def trap(self, marker: bytes, mishap: Mishap) -> Trap:
        """Let ``mishap`` happen to the next message with ``marker`` that a client sends."""
        self._trap = Trap(marker, mishap)
        return self._trap

    def _from_client(self, chunk: bytes) -> bool:
        """Whether what a client sent goes on to the server."""
        trap = self._trap
        if trap is None or (trap.marker not in chunk and not trap.open):
            return True
        trap.open = True
        if trap.mishap == "lose_ack":
            return True
        if trap.mishap == "lose":
            self._spring(trap)
        else:
            trap.sprung.set()
        return False

    def _from_server(self, chunk: bytes) -> bool:
        """Whether what the server sent goes on to the client."""
        trap = self._trap
        if trap is None or not trap.open or trap.mishap != "lose_ack":
            return True
        if _ACK in chunk:
            self._spring(trap)
        return False

    def _spring(self, trap: Trap) -> None:
        self._trap = None
        trap.sprung.set()
        self.cut()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counts: bool) -> None:
        try:
            while chunk := await reader.read(16_384):
                if not (self._from_server(chunk) if counts else self._from_client(chunk)):
                    continue
                if counts and self.bytes_until_cut is not None:
                    self.bytes_until_cut -= len(chunk)
                    if self.bytes_until_cut <= 0:
                        self.cut()
                        return
                writer.write(chunk)
                await writer.drain()
        except OSError:
            return  # cut
        writer.transport.abort()


@asynccontextmanager
async def network(upstream_port: int) -> AsyncGenerator[Network]:
    """A network to the server at ``upstream_port``, on a port of its own."""
    passing = Network(upstream_port)
    server = await asyncio.start_server(passing.pass_client, "127.0.0.1", 0)
    passing.port = server.sockets[0].getsockname()[1]
    try:
        yield passing
    finally:
        server.close()
        passing.cut()
        await server.wait_closed()
