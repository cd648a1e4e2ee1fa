"""The server that ``gpuq up`` owns: its logins, its rights, its files, and how it comes back."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import nats.errors
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from gpukeeper.cli.credentials import Credentials, CredentialsUnreadable, Login, NoCredentials, load_credentials
from gpukeeper.cli.natsbinary import find_server
from gpukeeper.cli.natsserver import NatsServer, ServerFailed, ServerNotReady, choose_port, streams_on_disk
from gpukeeper.cli.processes import BoundedLog, Child, command_line
from gpukeeper.cli.siteconfig import ServerSection
from support.waiting import is_running, until

pytestmark = pytest.mark.processes

BINARY = find_server(None, os.environ)


def server_in(data: Path, **settings: object) -> NatsServer:
    section = ServerSection(**{"port": 0, **settings})  # pyright: ignore[reportArgumentType]
    return NatsServer(data, section, site="main", binary=BINARY)


@asynccontextmanager
async def running(data: Path, **settings: object) -> AsyncGenerator[tuple[NatsServer, Credentials]]:
    server = server_in(data, **settings)
    data.mkdir(exist_ok=True)
    credentials = await server.start(BoundedLog(data / "log"))
    try:
        yield server, credentials
    finally:
        await server.stop()


@asynccontextmanager
async def connected(url: str | None, login: Login, errors: list[Exception] | None = None) -> AsyncGenerator[Client]:
    async def told(error: Exception) -> None:
        if errors is not None:
            errors.append(error)

    client = Client()
    try:
        await client.connect(
            url or "",
            user=login.user or None,
            password=login.password or None,
            inbox_prefix=login.inbox_prefix,
            allow_reconnect=False,
            error_cb=told,
        )
        yield client
    finally:
        await client.close()


async def subjects_in_log(client: Client) -> list[str]:
    js = client.jetstream()
    last = (await js.stream_info("GPUQ_LOG")).state.last_seq
    return [(await js.get_msg("GPUQ_LOG", seq)).subject or "" for seq in range(1, last + 1)]


@pytest.fixture
async def site(tmp_path: Path) -> AsyncGenerator[tuple[Client, Credentials]]:
    """A server with a log, and a client that may do everything."""
    async with AsyncExitStack() as stack:
        _, credentials = await stack.enter_async_context(running(tmp_path / "data"))
        client = await stack.enter_async_context(connected(credentials.url, credentials.login))
        await client.jetstream().add_stream(name="GPUQ_LOG", subjects=["gpuq.submit.*", "gpuq.ev.>"])
        yield client, credentials


async def test_a_started_server_serves_the_site_and_stops_without_a_trace(tmp_path: Path) -> None:
    async with running(tmp_path / "data") as (server, credentials):
        async with connected(credentials.url, credentials.login) as client:
            await client.jetstream().account_info()
        pid = server.pid
        assert pid is not None
        assert is_running(pid)

    assert not is_running(pid)
    assert server.pid is None


async def test_every_file_with_a_secret_is_for_its_owner_only(tmp_path: Path) -> None:
    data = tmp_path / 'a "b" \\é'
    async with running(data) as (server, credentials):
        files = [path for path in data.rglob("*") if path.is_file()]
        secrets = [credentials.password.encode(), credentials.producer.password.encode()]
        holding = {path.name for path in files if any(secret in path.read_bytes() for secret in secrets)}
        shown = command_line(server.pid or 0)

    assert holding == {"site.json", "nats.conf"}
    for path in files:
        if path.name in holding:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    for folder in (data, data / "nats", data / "nats" / "store"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
    assert not any(secret.decode() in (shown or "?") for secret in secrets)
    assert not any(secret.decode() in repr(credentials) + repr(credentials.producer) for secret in secrets)


async def test_a_site_file_that_others_could_read_is_set_right_at_the_next_start(tmp_path: Path) -> None:
    async with running(tmp_path) as (_, before):
        pass
    (tmp_path / "site.json").chmod(0o644)

    async with running(tmp_path):
        after = load_credentials(tmp_path)

    assert (after.password, after.producer) == (before.password, before.producer)
    assert stat.S_IMODE((tmp_path / "site.json").stat().st_mode) == 0o600


async def test_nobody_gets_in_without_the_right_password(site: tuple[Client, Credentials]) -> None:
    _, credentials = site
    for login in (
        Login(user="site", password="wrong", inbox_prefix="_INBOX"),
        Login(user="producer", password=credentials.password, inbox_prefix="_INBOX"),
        Login(user="", password="", inbox_prefix="_INBOX"),
    ):
        with pytest.raises(nats.errors.Error, match="Authorization"):
            async with connected(credentials.url, login):
                pass


async def test_a_producer_submits_is_acknowledged_and_deduplicated(site: tuple[Client, Credentials]) -> None:
    client, credentials = site
    async with connected(credentials.url, credentials.producer) as producer:
        js = producer.jetstream()
        first = await js.publish("gpuq.submit.me", b"{}", headers={"Nats-Msg-Id": "1"})
        again = await js.publish("gpuq.submit.me", b"{}", headers={"Nats-Msg-Id": "1"})
        await producer.publish("gpuq.submit.me", b"without waiting for an answer")
        await producer.flush()

    assert (first.seq, first.duplicate, again.seq, again.duplicate) == (1, None, 1, True)
    assert await subjects_in_log(client) == ["gpuq.submit.me", "gpuq.submit.me"]


@pytest.mark.parametrize(
    "subject",
    [
        "gpuq.ev.job.a",
        "gpuq.ev.site",
        "gpuq.cmd.me",
        "gpuq.hb.box",
        "gpuq.submit.a.b",
        "gpuq.ask.other",
        "gpuq.scheduler.status",
        "$JS.API.INFO",
        "$JS.API.CONSUMER.CREATE.GPUQ_LOG",
        "$SRV.INFO.gpuq-scheduler",
    ],
)
async def test_a_producer_cannot_write_anything_else(site: tuple[Client, Credentials], subject: str) -> None:
    client, credentials = site
    errors: list[Exception] = []
    async with connected(credentials.url, credentials.producer, errors) as producer:
        await producer.publish(subject, b"{}")
        await producer.flush()
        await until(lambda: errors, "the refusal arrives")

    assert "permissions violation for publish" in str(errors[0]).lower()
    assert await subjects_in_log(client) == []


@pytest.mark.parametrize(
    "subject", [">", "gpuq.ev.>", "gpuq.submit.*", "gpuq.ask.job", "_INBOX.>", "gpuq.out.*", "$SYS.>"]
)
async def test_a_producer_cannot_listen_to_anything_but_its_replies(
    site: tuple[Client, Credentials], subject: str
) -> None:
    _, credentials = site
    errors: list[Exception] = []
    async with connected(credentials.url, credentials.producer, errors) as producer:
        await producer.subscribe(subject)
        await producer.flush()
        await until(lambda: errors, "the refusal arrives")

    assert "permissions violation for subscription" in str(errors[0]).lower()


async def test_a_producer_cannot_read_a_stream(site: tuple[Client, Credentials]) -> None:
    _, credentials = site
    errors: list[Exception] = []
    async with connected(credentials.url, credentials.producer, errors) as producer:
        with pytest.raises(nats.errors.TimeoutError):
            await producer.request("$JS.API.STREAM.MSG.GET.GPUQ_LOG", b'{"seq":1}', timeout=0.2)
        with pytest.raises(nats.errors.TimeoutError):
            await producer.request("$JS.API.DIRECT.GET.GPUQ_LOG", b'{"seq":1}', timeout=0.2)

    assert ["permissions violation for publish" in str(error).lower() for error in errors] == [True, True]


@pytest.mark.parametrize("reply", ["gpuq.ev.job.a", "gpuq.submit.other", "$JS.API.STREAM.PURGE.GPUQ_LOG"])
async def test_a_producer_cannot_have_the_server_write_for_it_through_a_reply_subject(
    site: tuple[Client, Credentials], reply: str
) -> None:
    """The server acknowledges to any reply subject with rights of its own: the answer must not reach the log."""
    client, credentials = site
    heard: list[str] = []

    async def hear(message: object) -> None:
        heard.append(reply)

    await client.subscribe(reply, cb=hear)
    await client.flush()
    async with connected(credentials.url, credentials.producer) as producer:
        await producer.publish("gpuq.submit.me", b"{}", reply=reply)
        # Acknowledged after the one before: by then its answer has been sent as well.
        await producer.jetstream().publish("gpuq.submit.me", b"{}")
    await client.flush()

    assert await subjects_in_log(client) == ["gpuq.submit.me", "gpuq.submit.me"]
    assert heard == []


@asynccontextmanager
async def answering(client: Client, answered: asyncio.Event) -> AsyncGenerator[None]:
    """Whoever asks is answered, whatever reply subject the server hands on."""

    async def answer(message: Msg) -> None:
        await client.publish(message.reply, b'{"job":"a"}')
        await client.flush()
        answered.set()

    subscription = await client.subscribe("gpuq.ask.job", cb=answer)
    await client.flush()
    try:
        yield
    finally:
        await subscription.unsubscribe()


async def test_a_producer_asks_and_hears_the_answer(site: tuple[Client, Credentials]) -> None:
    client, credentials = site
    async with answering(client, asyncio.Event()), connected(credentials.url, credentials.producer) as producer:
        reply = await producer.request("gpuq.ask.job", b"{}", timeout=5)

    assert reply.data == b'{"job":"a"}'


async def test_a_producer_hears_at_once_that_nobody_can_be_asked(site: tuple[Client, Credentials]) -> None:
    _, credentials = site
    async with connected(credentials.url, credentials.producer) as producer:
        with pytest.raises(nats.errors.NoRespondersError):
            await producer.request("gpuq.ask.job", b"{}", timeout=20)


@pytest.mark.parametrize(
    "reply", ["gpuq.ev.job.a", "gpuq.submit.other", "gpuq.cmd.me", "gpuq.ask.job", "$JS.API.STREAM.INFO.GPUQ_LOG"]
)
async def test_a_producer_cannot_have_an_answer_written_through_a_reply_subject(
    site: tuple[Client, Credentials], reply: str
) -> None:
    """An answer is published with the rights of the site: it must go back to the producers' account and no further."""
    client, credentials = site
    answered = asyncio.Event()
    heard: list[str] = []

    async def hear(message: Msg) -> None:
        if message.data == b'{"job":"a"}':
            heard.append(message.subject)

    for subject in ("gpuq.>", "$JS.API.>"):
        await client.subscribe(subject, cb=hear)
    async with answering(client, answered), connected(credentials.url, credentials.producer) as producer:
        await producer.publish("gpuq.ask.job", b"{}", reply=reply)
        await producer.flush()
        await asyncio.wait_for(answered.wait(), 20)
        # Stored after the answer, had that been stored.
        await producer.jetstream().publish("gpuq.submit.me", b"{}")
    await client.flush()

    assert await subjects_in_log(client) == ["gpuq.submit.me"]
    assert heard == []


async def test_the_largest_message_is_the_configured_one(tmp_path: Path) -> None:
    async with running(tmp_path, max_payload_mb=2) as (_, site), connected(site.url, site.login) as client:
        assert client.max_payload == 2 * 1024 * 1024


async def test_the_server_listens_on_the_loopback_address_and_on_one_port_only(tmp_path: Path) -> None:
    async with running(tmp_path) as (server, credentials):
        pid = server.pid
        inodes = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
        rows = [
            line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()
        ]
        listening = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]

    port = int((credentials.url or "").rpartition(":")[2])
    assert listening == [f"0100007F:{port:04X}"]


async def test_a_port_that_must_be_had_and_is_taken_is_an_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        with pytest.raises(ServerFailed, match=f"port {port} \\(server.port\\) is taken"):
            await server_in(tmp_path, port=port).start(BoundedLog(tmp_path / "log"))


def test_the_last_port_is_taken_again_where_it_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        while_taken = choose_port(None, last_url=f"nats://127.0.0.1:{port}")

    assert while_taken != port
    assert choose_port(None, last_url=f"nats://127.0.0.1:{port}") == port
    assert choose_port(0, last_url=f"nats://127.0.0.1:{port}") == -1


async def test_what_was_acknowledged_survives_a_kill_of_the_server(tmp_path: Path) -> None:
    async with running(tmp_path) as (server, credentials), connected(credentials.url, credentials.login) as client:
        js = client.jetstream()
        await js.add_stream(name="GPUQ_LOG", subjects=["gpuq.submit.*"])
        for number in range(50):
            await js.publish("gpuq.submit.me", b"%d" % number)
        os.kill(server.pid or 0, 9)

    async with running(tmp_path) as (_, after), connected(after.url, after.login) as client:
        assert len(await subjects_in_log(client)) == 50
    assert after.password == credentials.password


def _cut_index(stream: Path) -> None:
    (stream / "msgs" / "index.db").write_bytes(b"\x00garbage")


def _garbage_at_the_end(stream: Path) -> None:
    with (stream / "msgs" / "1.blk").open("ab") as block:
        block.write(b"\xde\xad\xbe\xef" * 100)


def _cut_last_record(stream: Path) -> None:
    block = stream / "msgs" / "1.blk"
    block.write_bytes(block.read_bytes()[:-5])
    (stream / "msgs" / "index.db").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("damage", "kept"),
    [(_cut_index, 20), (_garbage_at_the_end, 20), (_cut_last_record, 19)],
    ids=str,
)
async def test_a_log_whose_files_were_damaged_at_the_end_is_read_back(
    tmp_path: Path, damage: Callable[[Path], None], kept: int
) -> None:
    await _log_of_20(tmp_path)
    damage(tmp_path / "nats" / "store" / "jetstream" / "SITE" / "streams" / "GPUQ_LOG")

    async with running(tmp_path) as (_, credentials), connected(credentials.url, credentials.login) as client:
        assert len(await subjects_in_log(client)) == kept


async def test_a_log_that_cannot_be_read_back_is_an_error_and_never_an_empty_log(tmp_path: Path) -> None:
    await _log_of_20(tmp_path)
    stream = tmp_path / "nats" / "store" / "jetstream" / "SITE" / "streams" / "GPUQ_LOG"
    (stream / "meta.inf").write_bytes(b"{}")

    with pytest.raises(ServerFailed, match="could not read back GPUQ_LOG"):
        async with running(tmp_path):
            pass

    assert streams_on_disk(tmp_path / "nats" / "store") == {"GPUQ_LOG"}


async def _log_of_20(data: Path) -> None:
    async with running(data) as (_, credentials), connected(credentials.url, credentials.login) as client:
        js = client.jetstream()
        await js.add_stream(name="GPUQ_LOG", subjects=["gpuq.submit.*"])
        for number in range(20):
            await js.publish("gpuq.submit.me", b"%d" % number)


async def test_a_server_left_behind_is_stopped_before_the_next_starts(tmp_path: Path) -> None:
    leftover = server_in(tmp_path)
    await leftover.prepare()
    # Not through `Child`, whose death signal would not let it be left behind.
    process = await asyncio.create_subprocess_exec(*leftover.argv, stderr=asyncio.subprocess.DEVNULL)
    try:
        await until(lambda: leftover.paths.pid.exists() and leftover.paths.pid.read_text(), "the server is up")

        async with running(tmp_path) as (server, _):
            assert await asyncio.wait_for(process.wait(), 20) is not None
            assert server.pid != process.pid
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_stranger_under_the_number_of_the_last_server_is_left_alone(tmp_path: Path) -> None:
    stranger = await asyncio.create_subprocess_exec("sleep", "600")
    try:
        server = server_in(tmp_path)
        await server.prepare()
        server.paths.pid.write_text(str(stranger.pid))

        async with running(tmp_path):
            assert is_running(stranger.pid)
    finally:
        stranger.kill()
        await stranger.wait()


async def test_a_server_that_ends_at_once_is_reported_with_its_last_words(tmp_path: Path) -> None:
    server = server_in(tmp_path)
    await server.prepare()
    server.paths.config.write_text("no such setting\n")
    child = await Child.start(server.argv, log=BoundedLog(tmp_path / "log"))

    with pytest.raises(ServerNotReady, match=r"ended with status 1: .*Parse error on line 1"):
        await server.wait_ready(child)


async def test_a_server_that_hangs_is_given_up_after_the_configured_time(tmp_path: Path) -> None:
    server = server_in(tmp_path, start_timeout_s=0.1)
    await server.prepare()
    child = await Child.start(("sleep", "600"), log=BoundedLog(tmp_path / "log"))
    try:
        with pytest.raises(ServerNotReady, match=r"not ready within 0.1 s \(server.start_timeout_s\)"):
            await server.wait_ready(child)
    finally:
        await child.stop(10)


def test_credentials_that_are_missing_or_damaged_are_named(tmp_path: Path) -> None:
    with pytest.raises(NoCredentials, match="no `gpuq up` has run"):
        load_credentials(tmp_path)

    (tmp_path / "site.json").write_text('{"site": 3}')
    with pytest.raises(CredentialsUnreadable, match=r"site.json: Expected `str`, got `int`"):
        load_credentials(tmp_path)
