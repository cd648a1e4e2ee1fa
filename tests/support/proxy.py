"""A network between client and server that can be cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class Network:
    """Passes bytes between clients and one server on loopback."""

    def __init__(self, upstream_port: int) -> None:
        self.port = 0
        #: Cut everything once this many more bytes have come from the server; None = never.
        self.bytes_until_cut: int | None = None
        self.cuts = 0
        #: What a client sends from these bytes on never reaches the server; None = everything does.
        self.withhold: bytes | None = None
        #: Set when something was withheld.
        self.withheld = asyncio.Event()
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

    def _withholds(self, chunk: bytes) -> bool:
        if self.withhold is not None and self.withhold in chunk:
            self.withheld.set()
        return self.withheld.is_set()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counts: bool) -> None:
        try:
            while chunk := await reader.read(16_384):
                if not counts and self._withholds(chunk):
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
