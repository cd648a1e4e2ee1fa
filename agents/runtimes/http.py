"""One thin layer over httpx that speaks of failures in the closed list of reasons.

Connecting takes a few seconds at most. Reading has no limit of its own: a caller has a deadline and
cancels its task, which closes the connection. Sizes are bounded. Nothing is sent twice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx
import msgspec

from gpukeeper.agents.runtimes.port import RuntimeFailure
from gpukeeper.events.errors import ConfigError
from gpukeeper.events.reasons import Reason

T = TypeVar("T")

CONNECT_TIMEOUT_S = 3.0
WRITE_TIMEOUT_S = 60.0
#: Shorter than the 5 s after which llama.cpp closes an idle connection: none is reused while it is closing.
KEEP_ALIVE_S = 4.0
REPLY_BYTES_MAX = 64 * 1024 * 1024
LINE_BYTES_MAX = 16 * 1024 * 1024
FINISH_TIMEOUT_S = 0.25
STREAM_BYTES_MAX = 512 * 1024 * 1024
EXCERPT_CHARS_MAX = 500
_ERROR_BODY_BYTES_MAX = 64 * 1024
_ERROR_BODY_TIMEOUT_S = 2.0

#: What runtimes say, in lower case, when they are up but full. Other answers of status 503 are plain errors.
_FULL = ("server busy", "maximum pending requests", "no slot available", "too many requests")


class _ErrorObject(msgspec.Struct):
    message: str


class _ErrorBody(msgspec.Struct):
    error: Any = None


_encoder = msgspec.json.Encoder()
_error_decoder = msgspec.json.Decoder(_ErrorBody)


class RuntimeHttp:
    """Requests to one runtime over connections that are kept alive."""

    def __init__(self, base_url: str) -> None:
        try:
            url = httpx.URL(base_url.rstrip("/"))
        except (httpx.InvalidURL, TypeError) as error:
            raise ConfigError(f"runtime url {base_url!r}: {error}", url=base_url) from error
        if url.scheme not in ("http", "https") or not url.host:
            raise ConfigError(f"runtime url {base_url!r}: must look like http://127.0.0.1:11434", url=base_url)
        self.base_url = str(url)
        self._urls: dict[str, httpx.URL] = {}
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(connect=CONNECT_TIMEOUT_S, read=None, write=WRITE_TIMEOUT_S, pool=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEEP_ALIVE_S),
            headers={"Accept": "application/json", "Accept-Encoding": "identity"},
            trust_env=False,
            follow_redirects=False,
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def get(self, path: str, decoder: msgspec.json.Decoder[T]) -> T:
        """The decoded answer to a GET.

        Raises:
            RuntimeFailure: no connection, an error status, an empty, cut or foreign answer.
        """
        return decode(await self._whole("GET", path, None), decoder, path)

    async def post(self, path: str, body: dict[str, Any], decoder: msgspec.json.Decoder[T]) -> T:
        """The decoded answer to a POST of ``body`` as JSON. Raises as :meth:`get` does."""
        return decode(await self._whole("POST", path, body), decoder, path)

    @asynccontextmanager
    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[Lines]:
        """The lines of a streamed answer to a POST. Leaving before their end closes the connection.

        Raises:
            RuntimeFailure: as :meth:`get`; reading the lines raises too.
        """
        async with self._open("POST", path, body) as response:
            yield Lines(response, path)

    async def _whole(self, method: str, path: str, body: dict[str, Any] | None) -> bytes:
        pieces: list[bytes] = []
        size = 0
        async with self._open(method, path, body) as response:
            async for piece in response.aiter_raw():
                pieces.append(piece)
                size += len(piece)
                if size > REPLY_BYTES_MAX:
                    raise RuntimeFailure(
                        Reason.RUNTIME_BAD_REPLY, f"{path}: an answer of more than {REPLY_BYTES_MAX} bytes"
                    )
        return b"".join(pieces)

    @asynccontextmanager
    async def _open(self, method: str, path: str, body: dict[str, Any] | None) -> AsyncGenerator[httpx.Response]:
        """An answer of status 200 whose body is still to be read; leaving early closes the connection."""
        response: httpx.Response | None = None
        try:
            response = await self._client.send(self._request(method, path, body), stream=True)
            if response.status_code != 200:
                raise refused(path, response.status_code, await _excerpt(response))
            yield response
        except httpx.HTTPError as error:
            raise translated(error, path, self.base_url) from error
        finally:
            if response is not None:
                await response.aclose()

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Request:
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = httpx.URL(self.base_url + path)
        if body is None:
            return self._client.build_request(method, url)
        return self._client.build_request(
            method, url, content=_encoder.encode(body), headers={"Content-Type": "application/json"}
        )


class Lines:
    """The lines of one answer, without their ends, skipping empty ones.

    Lines end at LF only: other separators of Unicode are text.
    """

    def __init__(self, response: httpx.Response, path: str) -> None:
        self._pieces = response.aiter_raw()
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
        piece = await anext(self._pieces, None)
        if piece is None:
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
                async for _ in self._pieces:
                    pass
        except (TimeoutError, httpx.HTTPError):
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


def empty(path: str) -> RuntimeFailure:
    """The failure that an answer without a body stands for."""
    return RuntimeFailure(Reason.RUNTIME_EMPTY_REPLY, f"{path}: status 200 with an empty body", status=200)


def refused(path: str, status: int, excerpt: str) -> RuntimeFailure:
    """The failure that an answer other than 200 stands for."""
    full = status == 429 or (status == 503 and any(words in excerpt.lower() for words in _FULL))
    reason = Reason.RUNTIME_BUSY if full else Reason.RUNTIME_ERROR
    return RuntimeFailure(reason, f"{path}: status {status}: {excerpt or 'no body'}", status=status)


def translated(error: httpx.HTTPError, path: str, base_url: str) -> RuntimeFailure:
    """The failure that an error of the transport stands for."""
    words = str(error) or type(error).__name__
    match error:
        case httpx.ConnectError() | httpx.ConnectTimeout() | httpx.PoolTimeout():
            return RuntimeFailure(Reason.RUNTIME_UNREACHABLE, f"{base_url} cannot be reached: {words}")
        case httpx.NetworkError() | httpx.RemoteProtocolError() | httpx.TimeoutException():
            return RuntimeFailure(Reason.RUNTIME_CUT, f"{path}: the connection ended in mid-answer: {words}")
        case _:
            return RuntimeFailure(Reason.RUNTIME_BAD_REPLY, f"{path}: {words}")


def shown(body: bytes) -> str:
    """The beginning of ``body`` for people: one line, bounded, whatever the bytes are."""
    text = " ".join(body[: EXCERPT_CHARS_MAX * 4].decode("utf-8", "replace").split())
    return text if len(text) <= EXCERPT_CHARS_MAX else text[: EXCERPT_CHARS_MAX - 1] + "…"


async def _excerpt(response: httpx.Response) -> str:
    """The beginning of an error's body. What does not arrive in time is left out: the status counts."""
    body = b""
    try:
        async with asyncio.timeout(_ERROR_BODY_TIMEOUT_S):
            async for piece in response.aiter_raw():
                body += piece
                if len(body) > _ERROR_BODY_BYTES_MAX:
                    break
    except (httpx.HTTPError, TimeoutError) as error:
        return f"{shown(body)} (the rest did not arrive: {type(error).__name__})".strip()
    return shown(_words_of(body))


def _words_of(body: bytes) -> bytes:
    """The sentence inside ``{"error": "..."}`` or ``{"error": {"message": "..."}}``, else all of it."""
    try:
        said = _error_decoder.decode(body).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body
    return body if said is None else error_words(said).encode()


def error_words(error: object) -> str:
    """What an ``error`` field says: a string, or an object with a ``message``."""
    if isinstance(error, str):
        return error
    try:
        return msgspec.convert(error, _ErrorObject).message
    except msgspec.ValidationError:
        return msgspec.json.encode(error).decode()
