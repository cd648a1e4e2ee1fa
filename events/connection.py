"""One connection to NATS, with the settings that matter and every asynchronous error surfaced."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import nats
import nats.errors
import structlog
from nats.aio.client import Client

from gpukeeper.events.client import LogClient
from gpukeeper.events.errors import ConfigError, LogUnavailable

_log = structlog.get_logger("gpukeeper.connection")


class NatsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach a site's NATS server. Secrets come from files, never from a command line."""

    servers: tuple[str, ...]
    user: str | None = None
    password: str | None = None
    token: str | None = None
    #: A JWT credentials file.
    creds_file: str | None = None
    tls_ca_file: str | None = None
    inbox_prefix: str = "_INBOX"
    connect_timeout_s: float = 5.0


class Connection:
    """A NATS client that reconnects for ever and tells its listeners when it did."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.js = client.jetstream(timeout=5)
        #: Ends when the client has closed for good.
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        #: Subjects that the server said these credentials may not publish to, in small letters.
        self.denied: set[str] = set()
        self._on_reconnect: list[Callable[[], Awaitable[None]]] = []
        self._waiting: set[asyncio.Timeout] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def connected(self) -> bool:
        return self.client.is_connected

    @asynccontextmanager
    async def while_connected(self) -> AsyncGenerator[None]:
        """Wait for an answer inside: it cannot come any more once the connection is lost.

        Raises:
            TimeoutError: the connection was lost meanwhile.
        """
        limit = asyncio.timeout(None)
        self._waiting.add(limit)
        try:
            async with limit:
                yield
        finally:
            self._waiting.discard(limit)

    def lost(self) -> None:
        """The connection is gone: end every wait for an answer over it."""
        now = asyncio.get_running_loop().time()
        for limit in self._waiting:
            if not limit.expired():
                limit.reschedule(now)

    def on_reconnect(self, listener: Callable[[], Awaitable[None]]) -> Callable[[], None]:
        """Call ``listener`` after each reconnect. Returns what ends that."""
        self._on_reconnect.append(listener)

        def forget() -> None:
            if listener in self._on_reconnect:
                self._on_reconnect.remove(listener)

        return forget

    async def close(self) -> None:
        """Close the client. May be called twice."""
        if not self.client.is_closed:
            await self.client.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def reconnected(self) -> None:
        """The client is back: run the listeners beside it, so that its reader never waits for them."""
        _log.info("nats_reconnected", server=self.client.connected_url and self.client.connected_url.netloc)
        for listener in tuple(self._on_reconnect):
            task = asyncio.ensure_future(listener())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


#: How long the client may take to close when it never connected.
_ABANDON_S = 0.25


class _NoServer(Exception):
    """Every server was tried once, and this is why the last one would not do."""


async def connect(settings: NatsSettings, *, name: str) -> Connection:
    """Connect, or fail once each server has been tried, within ``connect_timeout_s`` and a second.

    Raises:
        LogUnavailable: no server answered, or it refused the credentials; the error says which.
        ConfigError: a file that the settings name cannot be used.
    """
    connection: Connection | None = None
    failures = 0

    async def on_error(error: Exception) -> None:
        nonlocal failures
        text = str(error) or type(error).__name__
        if connection is None:
            # The client itself would try for ever: a first connection that fails is an answer for the user.
            failures += 1
            if failures >= len(settings.servers):
                raise _NoServer(text) from error
            return
        if subject := _denied_subject(text):
            connection.denied.add(subject)
        _log.warning("nats_error", error=text)

    async def on_disconnect() -> None:
        if connection is None:
            return
        connection.lost()
        if not connection.client.is_closed:
            _log.warning("nats_disconnected")

    async def on_reconnect() -> None:
        if connection is not None:
            await connection.reconnected()

    async def on_closed() -> None:
        if connection is not None and not connection.closed.done():
            connection.closed.set_result(None)

    options: dict[str, Any] = {
        "servers": list(settings.servers),
        "name": name,
        "allow_reconnect": True,
        "max_reconnect_attempts": -1,
        "reconnect_time_wait": 0.25,
        "connect_timeout": max(1.0, settings.connect_timeout_s / max(1, len(settings.servers))),
        "ping_interval": 10,
        "max_outstanding_pings": 3,
        "inbox_prefix": settings.inbox_prefix,
        "error_cb": on_error,
        "disconnected_cb": on_disconnect,
        "reconnected_cb": on_reconnect,
        "closed_cb": on_closed,
    }
    options |= _credentials(settings)
    shown = ", ".join(settings.servers)
    wants_tls = settings.tls_ca_file is not None or any(server.startswith("tls://") for server in settings.servers)
    client = LogClient(require_tls=wants_tls)
    try:
        async with asyncio.timeout(settings.connect_timeout_s + 1):
            await client.connect(**options)
    except (_NoServer, OSError, TimeoutError, nats.errors.Error) as error:
        await _abandon(client)
        reason = str(error) or f"no answer within {settings.connect_timeout_s + 1:g} s"
        raise LogUnavailable(f"no NATS server at {shown}: {reason}", servers=shown, reason=reason) from error
    connection = Connection(client)
    if client.is_closed:  # before there was anybody to tell
        connection.closed.set_result(None)
    return connection


async def _abandon(client: Client) -> None:
    """Close a client that never connected. After a failed TLS handshake it waits for an end that does not come."""
    try:
        async with asyncio.timeout(_ABANDON_S):
            await client.close()
    except (_NoServer, TimeoutError) as error:
        _log.debug("nats_client_abandoned", error=str(error) or type(error).__name__)


def _credentials(settings: NatsSettings) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if settings.user is not None:
        options |= {"user": settings.user, "password": settings.password or ""}
    if settings.token is not None:
        options["token"] = settings.token
    if settings.creds_file is not None:
        if find_spec("nkeys") is None:
            raise ConfigError("creds_file needs the package nkeys: pip install nkeys", field="creds_file")
        if not Path(settings.creds_file).is_file():
            raise ConfigError(f"creds_file: there is no file {settings.creds_file}", field="creds_file")
        options["user_credentials"] = settings.creds_file
    if settings.tls_ca_file is not None:
        try:
            options["tls"] = ssl.create_default_context(cafile=settings.tls_ca_file)
        except OSError as error:  # ssl's own errors are of this kind too
            raise ConfigError(f"tls_ca_file {settings.tls_ca_file}: {error}", field="tls_ca_file") from error
    return options


def _denied_subject(text: str) -> str | None:
    """The subject of a refused publish, in small letters as the client gives it."""
    lowered = text.lower()
    if "permissions violation for publish" not in lowered:
        return None
    _, _, rest = lowered.partition('"')
    return rest.partition('"')[0] or None
