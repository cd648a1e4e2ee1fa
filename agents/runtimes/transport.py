"""What is needed of aiohttp to ask a runtime: nothing is sent twice, nothing that arrived is lost, nothing hangs."""

from __future__ import annotations

import asyncio
import select
from functools import partial

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.tracing import Trace

#: Far more than any runtime sends in one line of a head.
_HEAD_LINE_BYTES_MAX = 64 * 1024


def open_session(*, connect_timeout_s: float, keep_alive_s: float) -> aiohttp.ClientSession:
    """A session for one runtime, to be opened inside the running loop and closed by the caller.

    Only connecting is bounded. No proxy, password or cookie comes from anywhere, and names are resolved as the
    system does, whatever else is installed.
    """
    return aiohttp.ClientSession(
        connector=_Connector(keep_alive_s),
        timeout=aiohttp.ClientTimeout(total=None, connect=connect_timeout_s, sock_read=None),
        headers={"Accept": "application/json", "Accept-Encoding": "identity"},
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
        middlewares=(_once,),
        max_line_size=_HEAD_LINE_BYTES_MAX,
        max_field_size=_HEAD_LINE_BYTES_MAX,
    )


class Body:
    """The body of one answer, piece by piece as it arrives."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._content = response.content
        self._taken_bytes = 0
        self._error: Exception | None = None

    async def take(self) -> bytes:
        """The next piece; empty at the end.

        Raises:
            aiohttp.ClientError: the connection broke, after all that had arrived was taken.
        """
        if self._error is not None:
            raise self._error
        try:
            piece = await self._content.readany()
        except aiohttp.ClientError as error:
            piece = self._left_over()
            if not piece:
                raise
            self._error = error
        except RuntimeError as error:
            # aiohttp says so where the connection was lost a moment before it is read from.
            raise aiohttp.ClientPayloadError(str(error)) from error
        self._taken_bytes += len(piece)
        return piece

    def _left_over(self) -> bytes:
        """What arrived before an error: a reader that was busy would not get it from aiohttp."""
        if self._content.total_bytes == self._taken_bytes:
            return b""
        self._content.set_exception(None)  # pyright: ignore[reportArgumentType] (as it was before the error)
        return self._content.read_nowait()


class _Connector(aiohttp.TCPConnector):
    """Connections that are kept alive. One that the server has closed meanwhile is never written to.

    aiohttp drops those of whose end the loop has heard. The system may know what the loop has not read yet.
    """

    def __init__(self, keep_alive_s: float) -> None:
        super().__init__(keepalive_timeout=keep_alive_s, limit=0, resolver=aiohttp.ThreadedResolver())
        self._used: set[ResponseHandler] = set()

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        while True:
            connection = await super().connect(req, traces, timeout)
            protocol = connection.protocol
            if protocol is not None and protocol not in self._used:
                if (closed := protocol.closed) is not None:
                    self._used.add(protocol)
                    closed.add_done_callback(partial(self._forget, protocol))
                return connection
            if not _has_something_to_read(connection):
                return connection
            connection.close()

    def _forget(self, protocol: ResponseHandler, closed: asyncio.Future[None]) -> None:
        self._used.discard(protocol)
        if not closed.cancelled():
            closed.exception()  # read, so that asyncio does not report it: the request that needs it fails itself


def _has_something_to_read(connection: Connection) -> bool:
    """Whether an idle connection has been closed, or says what nobody asked for."""
    transport = connection.transport
    if transport is None:
        return True
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(poll.poll(0))


async def _once(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """Keep aiohttp from sending a GET again where a connection broke, which it does for two kinds of errors.

    It never sends a POST again, and nothing where no connection could be made.
    """
    try:
        response = await handler(request)
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
        raise
    except aiohttp.ServerDisconnectedError as error:
        words = error.message if isinstance(error.message, str) else "Server disconnected in the head of its answer"
        raise aiohttp.ClientConnectionError(words) from error
    except aiohttp.ClientOSError as error:
        raise aiohttp.ClientConnectionError(str(error)) from error
    _end_with_connection(response)
    return response


def _end_with_connection(response: aiohttp.ClientResponse) -> None:
    """Fail the body when its connection ends first: after a malformed chunk, aiohttp would wait for more for ever."""
    connection = response.connection
    if connection is None or connection.protocol is None:
        return  # all of it is there
    content = response.content
    closed = connection.protocol.closed
    if closed is None:
        _fail(content)
        return
    fail = partial(_fail, content)
    closed.add_done_callback(fail)

    def whole() -> None:
        closed.remove_done_callback(fail)

    content.on_eof(whole)


def _fail(content: aiohttp.StreamReader, _: object = None) -> None:
    if not content.is_eof() and content.exception() is None:
        content.set_exception(aiohttp.ClientPayloadError("the body is malformed or incomplete"))
