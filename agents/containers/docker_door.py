"""Blocking calls to a Docker engine, and their failures in the words of the port. Runs in threads only.

The package ``docker`` is loaded with the first call: hosts without containers need not wait for it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import docker
import msgspec
import requests
from docker import errors
from docker.constants import MINIMUM_DOCKER_API_VERSION
from docker.utils import version_lt

from gpukeeper.agents.containers.port import ContainerFailure

T = TypeVar("T")

#: What the program inside a container gets its mark by (``environment`` of an exec) came with this one.
API_MIN = "1.25"
_WORDS_CHARS_MAX = 1000
_UNIX = "unix://"
#: The constructor takes whole seconds; every call sets its own.
_ROUNDED_S = 5


class _Version(msgspec.Struct, frozen=True):
    ApiVersion: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,4}\.[0-9]{1,4}$")]
    Version: str = "of an unknown version"


class Door:
    """One connection to the engine, used by one thread at a time. Opened by the first call, and again after a failure.

    Args:
        base_url: such as ``unix:///var/run/docker.sock`` or ``tcp://127.0.0.1:2375``.
        answer_s: how long connecting, and each answer, may take.
    """

    def __init__(self, base_url: str, *, answer_s: float) -> None:
        self._base_url = base_url
        self._answer_s = answer_s
        self._client: Any = None

    def ask(self, work: Callable[[Any], T], *, more_s: float = 0.0) -> T:
        """``work`` with an open ``docker.APIClient``. ``more_s`` is added to the time that each answer may take.

        Raises:
            ContainerFailure: whatever went wrong.
        """
        try:
            self._knock()
            if self._client is None:
                self._client = self._open()
            self._client.timeout = self._answer_s + more_s
            return work(self._client)
        except (errors.DockerException, requests.RequestException, OSError) as error:
            # A refusal is an answer; after anything else the connection may be in any state.
            if not isinstance(error, errors.APIError):
                self.close()
            raise translated(error, self._base_url) from error

    def close(self) -> None:
        """Close the connection. The next call opens another."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _knock(self) -> None:
        """See whether anybody listens: the socket says what ails it, and the package leaves it open on failure."""
        if not self._base_url.startswith(_UNIX):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knocking:
            knocking.settimeout(self._answer_s)
            knocking.connect(self._base_url.removeprefix(_UNIX))

    def _open(self) -> Any:
        """A client that speaks the engine's own version of the API."""
        # Without a version the constructor asks for it, and leaves its connection open where that fails.
        asking: Any = docker.APIClient(self._base_url, version=MINIMUM_DOCKER_API_VERSION, timeout=_ROUNDED_S)
        try:
            asking.timeout = self._answer_s
            said = _converted(asking.version(api_version=False)).ApiVersion
        finally:
            asking.close()
        if version_lt(said, API_MIN):
            raise ContainerFailure("too_old", f"the engine's API is {said}; {API_MIN} or newer is needed")
        return docker.APIClient(self._base_url, version=said, timeout=_ROUNDED_S)


def version_words(client: Any) -> str:
    """The engine's version and that of its API."""
    return f"{_converted(client.version()).Version} (API {client.api_version})"


def translated(error: Exception, base_url: str) -> ContainerFailure:
    """The failure that an error of the package, of its transport, or of the socket stands for."""
    match error:
        case errors.NotFound():
            return ContainerFailure("missing", _explained(error))
        case errors.APIError() if error.status_code == 403:
            return ContainerFailure("denied", f"the engine at {base_url} does not allow it: {_explained(error)}")
        case errors.APIError():
            return ContainerFailure("refused", _explained(error))
        case requests.JSONDecodeError():
            return ContainerFailure("bad_reply", f"what answers at {base_url} is no container engine: {_shown(error)}")
        case requests.Timeout() | TimeoutError():
            return ContainerFailure("slow", f"the engine at {base_url} does not answer in time")
        case PermissionError():
            words = f"no permission to use {base_url}: whoever runs the agent must be in the socket's group"
            return ContainerFailure("denied", words)
        case OSError() if not isinstance(error, requests.RequestException):
            return ContainerFailure("absent", f"no container engine at {base_url}: {error.strerror or _shown(error)}")
        case requests.ConnectionError():
            return ContainerFailure("absent", f"the connection to the engine at {base_url} ended: {_shown(error)}")
        case _:
            return ContainerFailure("bad_reply", f"the engine at {base_url}: {_shown(error)}")


def _explained(error: errors.APIError) -> str:
    words = error.explanation
    return _shown(words if isinstance(words, str) and words else error)


def _shown(words: object) -> str:
    """One line, bounded."""
    text = " ".join(str(words).split())
    return text if len(text) <= _WORDS_CHARS_MAX else text[: _WORDS_CHARS_MAX - 1] + "…"


def _converted(answer: object) -> _Version:
    try:
        return msgspec.convert(answer, _Version)
    except msgspec.ValidationError as error:
        raise ContainerFailure("bad_reply", f"what answers is no container engine: {error}") from error
