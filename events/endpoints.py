"""Where a URL leads: which machine, and which port there. Pure."""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit

import msgspec

_PORTS = {"http": 80, "https": 443}
#: All names of the machine that the URL is used on.
THIS_MACHINE = "localhost"


class Endpoint(msgspec.Struct, frozen=True):
    """One listening server, as far as a URL tells."""

    host: str
    port: int

    @property
    def is_local(self) -> bool:
        """Whether it is on the machine that uses the URL: the same text names another server on another machine."""
        return self.host == THIS_MACHINE


def endpoint_of(url: str) -> Endpoint | None:
    """The server behind ``url``; None where it names none. Spellings of one server are alike."""
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return None
    host = (parts.hostname or "").rstrip(".")
    if not host or port is None:
        return None
    return Endpoint(THIS_MACHINE if _is_local(host) else host, port)


def _is_local(host: str) -> bool:
    if host == THIS_MACHINE or host.endswith("." + THIS_MACHINE):
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
