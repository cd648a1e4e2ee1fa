"""What a runtime did wrong, as failures of the closed list of reasons. Nothing here asks anybody."""

from __future__ import annotations

import errno
import os

import aiohttp

from gpukeeper.agents.runtimes.port import RuntimeFailure
from gpukeeper.events.reasons import Reason

EXCERPT_CHARS_MAX = 500

#: What runtimes say, in lower case, when they are up but full. Other answers of status 503 are plain errors.
_FULL = ("server busy", "maximum pending requests", "no slot available", "too many requests")


def empty(path: str) -> RuntimeFailure:
    """The failure that an answer without a body stands for."""
    return RuntimeFailure(Reason.RUNTIME_EMPTY_REPLY, f"{path}: status 200 with an empty body", status=200)


def refused(path: str, status: int, excerpt: str) -> RuntimeFailure:
    """The failure that an answer other than 200 stands for."""
    full = status == 429 or (status == 503 and any(words in excerpt.lower() for words in _FULL))
    reason = Reason.RUNTIME_BUSY if full else Reason.RUNTIME_ERROR
    return RuntimeFailure(reason, f"{path}: status {status}: {excerpt or 'no body'}", status=status)


def translated(error: aiohttp.ClientError, path: str, base_url: str) -> RuntimeFailure:
    """The failure that an error of the transport stands for."""
    match error:
        case aiohttp.ClientConnectorError():
            words = _system_words(error.os_error)
            return RuntimeFailure(Reason.RUNTIME_UNREACHABLE, f"{base_url} cannot be reached: {words}")
        case aiohttp.ConnectionTimeoutError():
            return RuntimeFailure(Reason.RUNTIME_UNREACHABLE, f"{base_url} cannot be reached: connecting took too long")
        case aiohttp.ClientResponseError(message=message):
            # Raised for what is no HTTP: a status other than 200 is an answer, and no error of aiohttp here.
            return RuntimeFailure(
                Reason.RUNTIME_CUT, f"{path}: the answer is malformed: {shown(message.encode('utf-8', 'replace'))}"
            )
        case aiohttp.ClientConnectionError() | aiohttp.ClientPayloadError():
            words = _shown_words(error)
            return RuntimeFailure(Reason.RUNTIME_CUT, f"{path}: the connection ended in mid-answer: {words}")
        case _:
            return RuntimeFailure(Reason.RUNTIME_BAD_REPLY, f"{path}: {_shown_words(error)}")


def _system_words(error: OSError) -> str:
    """What the system says: asyncio's own text has the call and the address in Python's notation."""
    number = error.errno
    return os.strerror(number) if number is not None and number in errno.errorcode else _shown_words(error)


def _shown_words(error: Exception) -> str:
    return shown(str(error).encode("utf-8", "replace")) or type(error).__name__


def shown(body: bytes) -> str:
    """The beginning of ``body`` for people: one line, bounded, whatever the bytes are."""
    text = " ".join(body[: EXCERPT_CHARS_MAX * 4].decode("utf-8", "replace").split())
    return text if len(text) <= EXCERPT_CHARS_MAX else text[: EXCERPT_CHARS_MAX - 1] + "…"
