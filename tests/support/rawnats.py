"""Publishing what no client library would: the bytes go to the server as they are."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit

from gpukeeper.events.connection import NatsSettings

_WITHIN_S = 10.0


async def publish_raw(settings: NatsSettings, subject: bytes, body: bytes, *, headers: bytes | None = None) -> None:
    """Publish, and wait until the server has taken it. ``headers`` are bytes too, and need not be a header block."""
    address = urlsplit(settings.servers[0])
    options = {"verbose": False, "headers": True, "protocol": 1, "user": settings.user, "pass": settings.password}
    if headers is None:
        line = b"PUB %s %d" % (subject, len(body))
    else:
        line = b"HPUB %s %d %d" % (subject, len(headers), len(headers) + len(body))
    async with asyncio.timeout(_WITHIN_S):
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        await reader.readline()
        connect = b"CONNECT " + json.dumps(options).encode()
        writer.write(b"\r\n".join((connect, line, (headers or b"") + body, b"PING", b"")))
        await reader.readuntil(b"PONG\r\n")
        writer.close()
        await writer.wait_closed()
