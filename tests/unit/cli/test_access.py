"""Which server a command talks to, and as whom."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gpukeeper.cli.access import nats_settings
from gpukeeper.cli.credentials import NoCredentials, ensure_credentials, save_credentials
from gpukeeper.cli.siteconfig import NatsConfig
from gpukeeper.events.errors import ConfigError


def test_without_a_configured_server_it_is_the_one_of_the_data_folder(tmp_path: Path) -> None:
    credentials = ensure_credentials(tmp_path, site="main")
    save_credentials(tmp_path, msgspec.structs.replace(credentials, url="nats://127.0.0.1:5"))

    site = nats_settings(NatsConfig(), tmp_path)
    producer = nats_settings(NatsConfig(), tmp_path, role="producer")

    assert (site.servers, site.user, site.password) == (("nats://127.0.0.1:5",), "site", credentials.password)
    assert (producer.user, producer.inbox_prefix) == ("producer", "_INBOX_producer")
    assert producer.password == credentials.producer.password != credentials.password


def test_where_no_server_was_ever_up_the_error_says_so(tmp_path: Path) -> None:
    with pytest.raises(NoCredentials, match="no `gpuq up` has run with this data folder"):
        nats_settings(NatsConfig(), tmp_path)

    ensure_credentials(tmp_path, site="main")
    with pytest.raises(NoCredentials, match="none was ever up"):
        nats_settings(NatsConfig(), tmp_path)


def test_a_configured_server_comes_with_its_own_login_and_the_data_folder_plays_no_part(tmp_path: Path) -> None:
    (tmp_path / "p").write_text("s3cret\r\nsecond line\n")
    nats = NatsConfig(
        url="nats://a:1, nats://b:2", user="me", password_file=str(tmp_path / "p"), tls_ca="ca", inbox_prefix="_me"
    )

    settings = nats_settings(nats, tmp_path / "nowhere")

    assert settings.servers == ("nats://a:1", "nats://b:2")
    assert (settings.user, settings.password, settings.tls_ca_file) == ("me", "s3cret", "ca")
    assert (settings.inbox_prefix, settings.token, settings.creds_file) == ("_me", None, None)


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "No such file or directory"), (b"", "its first line is empty"), (b"\nx", "empty"), (b"\xff", "not UTF-8")],
)
def test_a_secret_that_cannot_be_read_is_named_by_its_key_and_file(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ConfigError, match=f"nats.token_file: {path}: .*{words}|nats.token_file: {path}: {words}"):
        nats_settings(NatsConfig(url="nats://a:1", token_file=str(path)), tmp_path)
