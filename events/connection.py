"""One connection to NATS, with the settings that matter and every asynchronous error surfaced."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import nats
import nats.errors
import structlog
from nats.aio.client import Client

from gpukeeper.events.errors import LogUnavailable

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
        #: Subjects that the server said these credentials may not publish to.
        self.denied: set[str] = set()
        self._on_reconnect: list[Callable[[], Awaitable[None]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def connected(self) -> bool:
        return self.client.is_connected

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
            task = asyncio.ensure_future(_logged(listener))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


async def _logged(listener: Callable[[], Awaitable[None]]) -> None:
    await listener()


async def connect(settings: NatsSettings, *, name: str) -> Connection:
    """Connect, or fail within ``connect_timeout_s``.

    Raises:
        LogUnavailable: no server answered, or it refused the credentials.
    """
    holder: list[Connection] = []

    async def on_error(error: Exception) -> None:
        text = str(error)
        if holder and (subject := _denied_subject(text)):
            holder[0].denied.add(subject)
        _log.warning("nats_error", error=text or type(error).__name__)

    async def on_disconnect() -> None:
        if holder and not holder[0].client.is_closed:
            _log.warning("nats_disconnected")

    async def on_reconnect() -> None:
        if holder:
            await holder[0].reconnected()

    async def on_closed() -> None:
        if holder and not holder[0].closed.done():
            holder[0].closed.set_result(None)

    options: dict[str, Any] = {
        "servers": list(settings.servers),
        "name": name,
        "allow_reconnect": True,
        "max_reconnect_attempts": -1,
        "reconnect_time_wait": 0.25,
        "connect_timeout": settings.connect_timeout_s,
        "ping_interval": 10,
        "max_outstanding_pings": 3,
        "inbox_prefix": settings.inbox_prefix,
        "error_cb": on_error,
        "disconnected_cb": on_disconnect,
        "reconnected_cb": on_reconnect,
        "closed_cb": on_closed,
    }
    if settings.user is not None:
        options |= {"user": settings.user, "password": settings.password or ""}
    if settings.token is not None:
        options["token"] = settings.token
    if settings.creds_file is not None:
        options["user_credentials"] = settings.creds_file
    if settings.tls_ca_file is not None:
        options["tls"] = ssl.create_default_context(cafile=settings.tls_ca_file)
    shown = ", ".join(settings.servers)
    client = Client()
    try:
        # The client itself would try for ever: a first connection that fails is an answer for the user.
        async with asyncio.timeout(settings.connect_timeout_s + 1):
            first: dict[str, Any] = options | {"max_reconnect_attempts": 1}
            await client.connect(**first)
    except (OSError, TimeoutError, nats.errors.Error) as error:
        await client.close()
        reason = str(error) or type(error).__name__
        raise LogUnavailable(f"no NATS server at {shown}: {reason}", servers=shown, reason=reason) from error
    client.options["max_reconnect_attempts"] = -1
    connection = Connection(client)
    holder.append(connection)
    return connection


def _denied_subject(text: str) -> str | None:
    lowered = text.lower()
    if "permissions violation for publish" not in lowered:
        return None
    _, _, rest = text.partition('"')
    return rest.partition('"')[0] or None
