"""The NATS server of one machine: prepared, started, proven ready, stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import nats
import nats.errors
from nats.aio.client import Client

from gpukeeper.cli.credentials import Credentials, ensure_credentials, save_credentials
from gpukeeper.cli.datafolder import make_private, write_private
from gpukeeper.cli.natsbinary import ServerBinary
from gpukeeper.cli.natsconfig import LISTEN_HOST, SITE_ACCOUNT, ServerPaths, server_config
from gpukeeper.cli.processes import BoundedLog, Child, command_line
from gpukeeper.cli.siteconfig import ServerSection
from gpukeeper.events.errors import GpukeeperError

USUAL_PORT = 4222
#: How long a server may take to stop, from SIGTERM and again from SIGKILL.
STOP_GRACE_S = 15.0
_LOOK_AGAIN_S = 0.02
_CONNECT_S = 2


class ServerFailed(GpukeeperError):
    """The NATS server did not start. Trying again the same way will not help."""

    code = "server_failed"


class ServerNotReady(GpukeeperError):
    """The NATS server ended, or was not ready in time."""

    code = "server_not_ready"
    retryable = True


class _Ports(msgspec.Struct, frozen=True):
    """What the server writes about itself."""

    nats: tuple[str, ...]


class _StreamNames(msgspec.Struct, frozen=True):
    """One page of an answer of JetStream."""

    total: int = 0
    streams: tuple[str, ...] | None = None


class NatsServer:
    """One server over one data folder, which the caller holds (:func:`gpukeeper.cli.datafolder.hold`).

    Use :meth:`prepare`, start :attr:`argv` as a child, then :meth:`wait_ready`; or :meth:`start` and
    :meth:`stop` for all of it.
    """

    def __init__(self, data: Path, settings: ServerSection, *, site: str, binary: ServerBinary) -> None:
        self._data = data
        self._settings = settings
        self._site = site
        self._binary = binary
        self._child: Child | None = None
        self._credentials: Credentials | None = None
        self.paths = ServerPaths(folder=data / "nats")

    @property
    def argv(self) -> list[str]:
        """How to start it. No secret among them."""
        return [str(self._binary.path), "-c", str(self.paths.config)]

    async def prepare(self) -> Credentials:
        """Stop a server that an earlier run left behind, choose a port, write the configuration.

        Raises:
            ServerFailed: the configured port is taken, or what was left behind will not end.
            FolderUnusable, CredentialsUnreadable: see there.
        """
        for folder in (self._data, self.paths.folder, self.paths.ports, self.paths.store):
            make_private(folder)
        await self._stop_leftover()
        for old in self.paths.ports.glob("*.ports"):
            old.unlink()
        self._credentials = credentials = ensure_credentials(self._data, site=self._site)
        self._write_config(credentials, port=choose_port(self._settings.port, last_url=credentials.url))
        return credentials

    async def wait_ready(self, child: Child) -> Credentials:
        """Wait until ``child`` serves JetStream with every stream on disk; keep its URL in ``site.json``.

        A restart gets the same port: clients know no other.

        Raises:
            ServerNotReady: it ended, or took longer than ``start_timeout_s``.
            ServerFailed: it refuses its own logins, or could not read a stream back. A new and empty stream
                in the place of one that is on disk would be a log that starts over in silence.
        """
        deadline = time.monotonic() + self._settings.start_timeout_s
        assert self._credentials is not None, "prepare() comes first"
        port = await self._port_of(child, deadline)
        kept = msgspec.structs.replace(self._credentials, url=f"nats://{LISTEN_HOST}:{port}")
        while True:
            streams = await self._streams_served(kept)
            if streams is not None:
                break
            await self._not_yet(child, deadline)
        lost = sorted(streams_on_disk(self.paths.store) - streams)
        if lost:
            raise ServerFailed(
                f"the server could not read back {', '.join(lost)} in {self.paths.store}: restore the folder "
                f"from a backup, or move it away to start over. The server said: {_last_words(child)}",
                streams=lost,
            )
        save_credentials(self._data, kept)
        self._write_config(kept, port=port)
        return kept

    async def start(self, log: BoundedLog) -> Credentials:
        """Prepare, start and wait until ready. What was started is stopped again where this fails.

        Raises:
            ServerNotReady, ServerFailed, FolderUnusable, CredentialsUnreadable: see :meth:`prepare` and
                :meth:`wait_ready`.
        """
        await self.prepare()
        self._child = await Child.start(self.argv, log=log)
        try:
            return await self.wait_ready(self._child)
        except BaseException:
            await self.stop()
            raise

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Stop what :meth:`start` started. May be called twice.

        Raises:
            ProcessStuck: it did not end.
        """
        child, self._child = self._child, None
        if child is not None:
            await child.stop(grace_s)

    @property
    def pid(self) -> int | None:
        """The process that :meth:`start` started, until it is stopped."""
        return None if self._child is None else self._child.pid

    def _write_config(self, credentials: Credentials, *, port: int) -> None:
        text = server_config(
            self.paths,
            credentials,
            port=port,
            max_payload_mb=self._settings.max_payload_mb,
            sync_interval=self._settings.sync_interval,
        )
        write_private(self.paths.config, text.encode())

    async def _stop_leftover(self) -> None:
        """A server whose parent was killed, where the system has no death signal or it hung."""
        pid = _read_pid(self.paths.pid)
        if pid is None or not self._is_ours(pid):
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + STOP_GRACE_S
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                return
            while self._is_ours(pid) and time.monotonic() < deadline:
                await asyncio.sleep(_LOOK_AGAIN_S)
            if not self._is_ours(pid):
                return
        raise ServerFailed(f"process {pid}, a server left behind, does not end", pid=pid)

    def _is_ours(self, pid: int) -> bool:
        # Process ids are used again: only one that was started with our configuration is ours to stop.
        return str(self.paths.config) in (command_line(pid) or "")

    async def _port_of(self, child: Child, deadline: float) -> int:
        """The port that this very process listens on: another server may have the one we asked for."""
        while True:
            try:
                ports = msgspec.json.decode(self.paths.ports_file(child.pid).read_bytes(), type=_Ports)
                port = urlsplit(ports.nats[0]).port
            except (FileNotFoundError, msgspec.DecodeError):  # not there yet, or half written
                port = None
            if port is not None:
                return port
            await self._not_yet(child, deadline)

    async def _not_yet(self, child: Child, deadline: float) -> None:
        if child.ended:
            code = await child.wait()
            raise ServerNotReady(f"nats-server ended with status {code}: {_last_words(child)}", status=code)
        if time.monotonic() > deadline:
            raise ServerNotReady(
                f"nats-server was not ready within {self._settings.start_timeout_s:g} s "
                f"(server.start_timeout_s): {_last_words(child)}"
            )
        await asyncio.sleep(_LOOK_AGAIN_S)

    async def _streams_served(self, credentials: Credentials) -> frozenset[str] | None:
        """The names of the streams, or None where the server does not answer yet."""
        client = Client()
        try:
            await client.connect(
                credentials.url or "",
                user=credentials.user,
                password=credentials.password,
                connect_timeout=_CONNECT_S,
                allow_reconnect=False,
                max_reconnect_attempts=0,
                error_cb=_told_by_exception,
            )
            return await _stream_names(client)
        except nats.errors.Error as error:
            if "authorization" in str(error).lower():
                raise ServerFailed(f"the server refuses its own login: {error}") from error
            return None
        except OSError:
            return None
        finally:
            await client.close()


async def _stream_names(client: Client) -> frozenset[str]:
    """The names of all streams, page by page."""
    names: set[str] = set()
    while True:
        question = msgspec.json.encode({"offset": len(names)})
        answer = await client.request("$JS.API.STREAM.NAMES", question, timeout=_CONNECT_S)
        page = msgspec.json.decode(answer.data, type=_StreamNames)
        new = set(page.streams or ()) - names
        names |= new
        if not new or len(names) >= page.total:
            return frozenset(names)


async def _told_by_exception(error: Exception) -> None:
    """The client would log what the caller gets as an exception anyway."""


def choose_port(wanted: int | None, *, last_url: str | None) -> int:
    """The port to ask for; -1 lets the server choose.

    1. One that is wanted must be free.
    2. The last one, so that producers need not be told again.
    3. The usual one.
    4. Any.

    Raises:
        ServerFailed: the wanted port is taken.
    """
    if wanted is not None:
        if wanted in (0, -1):
            return -1
        if not is_free(wanted):
            raise ServerFailed(f"port {wanted} (server.port) is taken on {LISTEN_HOST}", port=wanted)
        return wanted
    last = urlsplit(last_url).port if last_url else None
    return next((port for port in (last, USUAL_PORT) if port and is_free(port)), -1)


def is_free(port: int) -> bool:
    """Whether a server could listen on ``port`` of the loopback address now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LISTEN_HOST, port))
        except OSError:
            return False
    return True


def streams_on_disk(store: Path) -> frozenset[str]:
    """The names of the streams that the server keeps in ``store``, for the account of the site."""
    return frozenset(path.parent.name for path in store.glob(f"jetstream/{SITE_ACCOUNT}/streams/*/meta.inf"))


def _read_pid(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (FileNotFoundError, ValueError):
        return None


def _last_words(child: Child) -> str:
    return " | ".join(child.log.tail()[-5:]) or "nothing"
