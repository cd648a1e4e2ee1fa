"""Which NATS server a command talks to, and as whom."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from gpukeeper.cli.credentials import FILE_NAME, NoCredentials, load_credentials
from gpukeeper.cli.siteconfig import NatsConfig
from gpukeeper.events.connection import NatsSettings
from gpukeeper.events.errors import ConfigError

Role = Literal["site", "producer"]
SECRET_BYTES_MAX = 65_536


def nats_settings(nats: NatsConfig, data: Path, *, role: Role = "site") -> NatsSettings:
    """How to reach the site's server.

    1. The configured one, with the configured login, whichever ``role`` that is.
    2. The one that ``gpuq up`` started over the data folder ``data``, as ``role``.

    Raises:
        ConfigError: a file with a secret cannot be read or is empty.
        NoCredentials: no server is configured, and none was ever up over ``data``.
        CredentialsUnreadable: ``site.json`` is not ours to read, or damaged.
    """
    if nats.url is not None:
        return NatsSettings(
            servers=tuple(url.strip() for url in nats.url.split(",")),
            user=nats.user,
            password=_secret("nats.password_file", nats.password_file),
            token=_secret("nats.token_file", nats.token_file),
            creds_file=nats.creds_file,
            tls_ca_file=nats.tls_ca,
            inbox_prefix=nats.inbox_prefix or "_INBOX",
            connect_timeout_s=nats.connect_timeout_s,
        )
    credentials = load_credentials(data)
    if credentials.url is None:
        raise NoCredentials(f"{data / FILE_NAME} names no server: none was ever up over this data folder")
    login = credentials.login if role == "site" else credentials.producer
    return NatsSettings(
        servers=(credentials.url,),
        user=login.user,
        password=login.password,
        inbox_prefix=login.inbox_prefix,
        connect_timeout_s=nats.connect_timeout_s,
    )


def _secret(key: str, path: str | None) -> str | None:
    """The first line of a file, without its end."""
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            content = file.read(SECRET_BYTES_MAX)
        secret = content.decode("utf-8").split("\n", 1)[0].rstrip("\r")
    except OSError as error:
        raise ConfigError(f"{key}: {path}: {error.strerror}", key=key) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key}: {path}: not UTF-8", key=key) from error
    if not secret:
        raise ConfigError(f"{key}: {path}: its first line is empty", key=key)
    return secret
