"""The logins of the server that ``gpuq up`` owns, made once and kept in ``site.json`` of the data folder."""

from __future__ import annotations

import secrets
from pathlib import Path

import msgspec

from gpukeeper.cli.datafolder import write_private
from gpukeeper.events.errors import GpukeeperError

FILE_NAME = "site.json"
SITE_INBOX = "_INBOX"
#: The producer hears replies to itself and nothing else: an own prefix, so that nobody's replies leak to it.
PRODUCER_INBOX = "_INBOX_producer"
_PASSWORD_BYTES = 32


class Login(msgspec.Struct, frozen=True, kw_only=True):
    """One NATS user. ``inbox_prefix`` goes to the client: replies are allowed under it only."""

    user: str
    password: str
    inbox_prefix: str

    def __repr__(self) -> str:
        return f"Login(user={self.user!r}, password=..., inbox_prefix={self.inbox_prefix!r})"


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """What ``site.json`` holds. ``url`` is where the server listened last; None before its first start."""

    site: str
    url: str | None
    user: str
    password: str
    producer: Login

    @property
    def login(self) -> Login:
        """The user that may do everything."""
        return Login(user=self.user, password=self.password, inbox_prefix=SITE_INBOX)

    def __repr__(self) -> str:
        return f"Credentials(site={self.site!r}, url={self.url!r}, user={self.user!r}, password=...)"


class NoCredentials(GpukeeperError):
    """No ``gpuq up`` has run with this data folder."""

    code = "no_credentials"


class CredentialsUnreadable(GpukeeperError):
    """``site.json`` cannot be read."""

    code = "credentials_unreadable"


def load_credentials(folder: Path) -> Credentials:
    """Read ``site.json``.

    Raises:
        NoCredentials: there is none.
        CredentialsUnreadable: it is not ours to read, or not what was written.
    """
    path = folder / FILE_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=Credentials)
    except FileNotFoundError as error:
        raise NoCredentials(f"{path} does not exist: no `gpuq up` has run with this data folder") from error
    except OSError as error:
        raise CredentialsUnreadable(f"{path}: {error.strerror}", path=str(path)) from error
    except msgspec.DecodeError as error:
        raise CredentialsUnreadable(
            f"{path}: {error}. Remove it, and the next `gpuq up` makes new logins", path=str(path)
        ) from error


def save_credentials(folder: Path, credentials: Credentials) -> None:
    """Write ``site.json`` for its owner only."""
    write_private(folder / FILE_NAME, msgspec.json.format(msgspec.json.encode(credentials)) + b"\n")


def ensure_credentials(folder: Path, *, site: str) -> Credentials:
    """The logins of ``folder``, made now where there are none.

    Raises:
        CredentialsUnreadable: the file is there and cannot be read.
    """
    try:
        found = load_credentials(folder)
    except NoCredentials:
        found = Credentials(
            site=site,
            url=None,
            user="site",
            password=secrets.token_urlsafe(_PASSWORD_BYTES),
            producer=Login(
                user="producer",
                password=secrets.token_urlsafe(_PASSWORD_BYTES),
                inbox_prefix=PRODUCER_INBOX,
            ),
        )
    kept = msgspec.structs.replace(found, site=site)
    save_credentials(folder, kept)  # also where it was there: a mode that lets others read is set right
    return kept
