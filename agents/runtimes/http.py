"""One thin layer over aiohttp that speaks of failures in the closed list of reasons.

Connecting takes a few seconds at most. Sending and reading have no limit of their own: a caller has a deadline
and cancels its task, which closes the connection. Sizes are bounded. Nothing is sent twice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from typing import Any, TypeVar

import aiohttp
import msgspec
from yarl import URL

from gpukeeper.agents.runtimes.failures import empty, refused, shown, translated
from gpukeeper.agents.runtimes.port import RuntimeFailure
from gpukeeper.agents.runtimes.transport import Body, open_session
from gpukeeper.events.errors import ConfigError
from gpukeeper.events.reasons import Reason

T = TypeVar("T")

CONNECT_TIMEOUT_S = 3.0
#: Much shorter than the 5 s after which llama.cpp closes an idle connection: none is reused while it is closing, also
#: where this machine is busy.
KEEP_ALIVE_S = 2.0
REPLY_BYTES_MAX = 64 * 1024 * 1024
LINE_BYTES_MAX = 16 * 1024 * 1024
FINISH_TIMEOUT_S = 0.25
STREAM_BYTES_MAX = 512 * 1024 * 1024
_ERROR_BODY_BYTES_MAX = 64 * 1024
_ERROR_BODY_TIMEOUT_S = 2.0
#: A larger body is handed over as a file, which aiohttp writes piece by piece: other tasks run in between.
_BODY_AT_ONCE_BYTES_MAX = 256 * 1024


class _ErrorObject(msgspec.Struct):
    message: str
    #: More of it, as ComfyUI tells what is wrong with a graph.
    details: Any = None


class _ErrorBody(msgspec.Struct):
    error: Any = None


_JSON = {"Content-Type": "application/json"}
_encoder = msgspec.json.Encoder()
_error_decoder = msgspec.json.Decoder(_ErrorBody)


class RuntimeHttp:
    """Requests to one runtime over connections that are kept alive."""

    def __init__(self, base_url: str) -> None:
        try:
            url = URL(base_url.rstrip("/"))
        except ValueError as error:
            raise ConfigError(f"runtime url {base_url!r}: {error}", url=base_url) from error
        if url.scheme not in ("http", "https") or not url.host:
            raise ConfigError(f"runtime url {base_url!r}: must look like http://127.0.0.1:11434", url=base_url)
        self.base_url = str(url)
        self._urls: dict[str, URL] = {}
        #: Opened by the first request, as a session belongs to the loop that runs then.
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def close(self) -> None:
        """Close every connection. An answer that is being read fails."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str, decoder: msgspec.json.Decoder[T]) -> T:
        """The decoded answer to a GET.

        Raises:
            RuntimeFailure: no connection, an error status, an empty, cut or foreign answer.
        """
        return decode(await self._whole("GET", path, None), decoder, path)

    async def post(self, path: str, body: dict[str, Any], decoder: msgspec.json.Decoder[T]) -> T:
        """The decoded answer to a POST of ``body`` as JSON. Raises as :meth:`get` does."""
        return decode(await self._whole("POST", path, body), decoder, path)

    async def tell(self, path: str, body: dict[str, Any]) -> None:
        """POST ``body`` as JSON and return when it is answered with status 200, whatever the answer says."""
        async with self._open("POST", path, body) as response:
            await Lines(response, path).finish()

    async def text(self, path: str) -> str:
        """The answer to a GET as text; bytes that are not UTF-8 are shown as such. Raises as :meth:`get` does."""
        return (await self._whole("GET", path, None)).decode("utf-8", "replace")

    @asynccontextmanager
    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[Lines]:
        """The lines of a streamed answer to a POST. Leaving before their end closes the connection.

        Raises:
            RuntimeFailure: as :meth:`get`; reading the lines raises too.
        """
        async with self._open("POST", path, body) as response:
            yield Lines(response, path)

    async def check(self, path: str) -> None:
        """Return when a GET is answered with status 200, whatever the body. Raises as :meth:`get` does."""
        async with self._open("GET", path, None):
            pass

    async def _whole(self, method: str, path: str, body: dict[str, Any] | None) -> bytes:
        pieces: list[bytes] = []
        size = 0
        async with self._open(method, path, body) as response:
            content = Body(response)
            while piece := await content.take():
                pieces.append(piece)
                size += len(piece)
                if size > REPLY_BYTES_MAX:
                    raise RuntimeFailure(
                        Reason.RUNTIME_BAD_REPLY, f"{path}: an answer of more than {REPLY_BYTES_MAX} bytes"
                    )
        return b"".join(pieces)

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """An answer of status 200 whose body is still to be read; leaving early closes the connection."""
        response: aiohttp.ClientResponse | None = None
        try:
            response = await self._send(method, path, body)
            if response.status != 200:
                raise refused(path, response.status, await _excerpt(response))
            yield response
        except aiohttp.ClientError as error:
            raise translated(error, path, self.base_url) from error
        finally:
            if response is not None:
                response.close()

    async def _send(self, method: str, path: str, body: dict[str, Any] | None) -> aiohttp.ClientResponse:
        if self._closed:
            raise RuntimeError(f"{path}: asked after the connections to {self.base_url} were closed")
        if self._session is None:
            self._session = open_session(connect_timeout_s=CONNECT_TIMEOUT_S, keep_alive_s=KEEP_ALIVE_S)
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = URL(self.base_url + path)
        if body is None:
            return await self._session.request(method, url, allow_redirects=False)
        data = _encoder.encode(body)
        return await self._session.request(
            method,
            url,
            data=data if len(data) <= _BODY_AT_ONCE_BYTES_MAX else BytesIO(data),
            headers=_JSON,
            allow_redirects=False,
        )


class Lines:
    """The lines of one answer, without their ends, skipping empty ones.

    Lines end at LF only: other separators of Unicode are text.
    """

    def __init__(self, response: aiohttp.ClientResponse, path: str) -> None:
        self._body = Body(response)
        self._path = path
        self._ready: deque[bytes] = deque()
        self._rest = b""
        self._size = 0
        self._ended = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while not self._ready:
            if self._ended:
                raise StopAsyncIteration
            await self._read()
        return self._ready.popleft()

    async def _read(self) -> None:
        piece = await self._body.take()
        if not piece:
            self._ended = True
            if self._size == 0:
                raise empty(self._path)
            lines, self._rest = [self._rest], b""
        else:
            self._size += len(piece)
            *lines, self._rest = (self._rest + piece).split(b"\n")
        self._ready.extend(line for line in lines if line.strip())
        if len(self._rest) > LINE_BYTES_MAX or self._size > STREAM_BYTES_MAX:
            raise RuntimeFailure(
                Reason.RUNTIME_BAD_REPLY,
                f"{self._path}: more than {LINE_BYTES_MAX} bytes in a line or {STREAM_BYTES_MAX} in all",
            )

    async def finish(self) -> None:
        """Read the end that follows the last record, so that the connection can be used again.

        The answer is complete by then: a server that does not end it soon costs a connection, nothing else.
        """
        try:
            async with asyncio.timeout(FINISH_TIMEOUT_S):
                while await self._body.take():
                    pass
        except (TimeoutError, aiohttp.ClientError):
            return


def decode(body: bytes, decoder: msgspec.json.Decoder[T], path: str) -> T:
    """``body`` as what ``decoder`` reads.

    Raises:
        RuntimeFailure: empty, cut short, or not what the protocol says, with the beginning of it.
    """
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        if not body.strip():
            raise empty(path) from error
        begins = shown(body)
        if "truncated" in str(error):
            raise RuntimeFailure(Reason.RUNTIME_CUT, f"{path}: the answer ends in mid-record: {begins}") from error
        raise RuntimeFailure(Reason.RUNTIME_BAD_REPLY, f"{path}: {error}: {begins}") from error
    except UnicodeDecodeError as error:
        raise RuntimeFailure(Reason.RUNTIME_BAD_REPLY, f"{path}: not UTF-8: {shown(body)}") from error


async def _excerpt(response: aiohttp.ClientResponse) -> str:
    """The beginning of an error's body. What does not arrive in time is left out: the status counts."""
    body = b""
    content = Body(response)
    try:
        async with asyncio.timeout(_ERROR_BODY_TIMEOUT_S):
            while piece := await content.take():
                body += piece
                if len(body) > _ERROR_BODY_BYTES_MAX:
                    break
    except (aiohttp.ClientError, TimeoutError) as error:
        return f"{shown(body)} (the rest did not arrive: {type(error).__name__})".strip()
    return shown(_words_of(body))


def _words_of(body: bytes) -> bytes:
    """The sentence inside ``{"error": "..."}`` or ``{"error": {"message": "..."}}``, else all of it."""
    try:
        said = _error_decoder.decode(body).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body
    return body if said is None else _said(said).encode("utf-8", "replace")


def error_words(error: object) -> str:
    """What an ``error`` field says, bounded: a string, or an object with a ``message``."""
    return shown(_said(error).encode("utf-8", "replace"))


def _said(error: object) -> str:
    if isinstance(error, str):
        return error
    try:
        said = msgspec.convert(error, _ErrorObject)
    except msgspec.ValidationError:
        return msgspec.json.encode(error).decode()
    details = said.details if isinstance(said.details, str) else ""
    return f"{said.message}: {details}" if details.strip() else said.message
