"""Connecting to real servers, and what a user is told when it fails."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import nats.errors
import pytest
from nats.aio.msg import Msg

from gpukeeper.events.connection import Connection, NatsSettings, connect
from gpukeeper.events.errors import ConfigError, LogUnavailable
from support.nats import NatsServer, free_ports
from support.wait import until_answered

pytestmark = pytest.mark.processes

WITHIN_S = 30.0


@pytest.fixture
def own(tmp_path: Path) -> Iterator[NatsServer]:
    """A server of one's own, to kill."""
    server = NatsServer(tmp_path / "own")
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=tests "
        f"-addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    return certificate, key


@pytest.fixture(scope="module")
def tls_server(certificate: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    cert, key = certificate
    server = NatsServer(
        tmp_path_factory.mktemp("tls-server"), extra=f'tls {{ cert_file: "{cert}", key_file: "{key}" }}'
    )
    try:
        server.start()
        yield server
    finally:
        server.stop()


async def reason_of(settings: NatsSettings) -> str:
    """Why the first connection fails. A timeout would be another reason."""
    with pytest.raises(LogUnavailable) as raised:
        await connect(settings, name="tests")
    for server in settings.servers:
        assert server in raised.value.message
    reason: str = raised.value.fields["reason"]
    return reason


async def test_a_port_that_nobody_listens_on_is_named(nats_settings: NatsSettings) -> None:
    (port,) = free_ports(1)

    reason = await reason_of(msgspec.structs.replace(nats_settings, servers=(f"nats://127.0.0.1:{port}",)))

    assert "Connect call failed" in reason


async def test_a_wrong_password_is_said_to_be_that(nats_settings: NatsSettings) -> None:
    reason = await reason_of(msgspec.structs.replace(nats_settings, password="wrong"))

    assert "authorization violation" in reason.lower()


async def test_no_credentials_are_said_to_be_missing(nats_settings: NatsSettings) -> None:
    reason = await reason_of(NatsSettings(servers=nats_settings.servers))

    assert "authorization" in reason.lower()


async def test_a_server_that_says_nothing_is_given_up_on(tmp_path: Path) -> None:
    async def say_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)

    writers: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]

    reason = await reason_of(NatsSettings(servers=(f"nats://127.0.0.1:{port}",), connect_timeout_s=1.0))

    assert "TimeoutError" in reason or "no answer within 2 s" in reason
    silent.close()
    for writer in writers:
        writer.close()
        await writer.wait_closed()
    await silent.wait_closed()


async def test_a_server_with_a_certificate_that_we_do_not_know_is_refused(tls_server: NatsServer) -> None:
    reason = await reason_of(tls_server.settings())

    assert "CERTIFICATE_VERIFY_FAILED" in reason


async def test_a_server_with_a_certificate_that_we_know_is_reached(
    tls_server: NatsServer, certificate: tuple[Path, Path]
) -> None:
    settings = msgspec.structs.replace(tls_server.settings(), tls_ca_file=str(certificate[0]))

    connection = await connect(settings, name="tests")

    assert connection.connected
    await connection.close()


@pytest.mark.parametrize("how", ["ca file", "address"])
async def test_credentials_are_not_sent_without_tls_where_tls_is_wanted(
    nats_settings: NatsSettings, certificate: tuple[Path, Path], how: str
) -> None:
    if how == "ca file":
        settings = msgspec.structs.replace(nats_settings, tls_ca_file=str(certificate[0]))
    else:
        servers = tuple(server.replace("nats://", "tls://") for server in nats_settings.servers)
        settings = msgspec.structs.replace(nats_settings, servers=servers)

    assert "does not use TLS" in await reason_of(settings)


@pytest.mark.parametrize(
    ("field", "content"),
    [("tls_ca_file", None), ("tls_ca_file", "no certificate"), ("creds_file", None)],
)
async def test_a_file_that_cannot_be_used_is_named(
    nats_settings: NatsSettings, tmp_path: Path, field: str, content: str | None
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content)

    with pytest.raises(ConfigError, match=field):
        await connect(msgspec.structs.replace(nats_settings, **{field: str(path)}), name="tests")


async def test_of_several_servers_the_one_that_runs_is_found(nats_settings: NatsSettings) -> None:
    down = tuple(f"nats://127.0.0.1:{port}" for port in free_ports(2))

    for servers in ((*down, *nats_settings.servers), (*nats_settings.servers, *down)):
        connection = await connect(msgspec.structs.replace(nats_settings, servers=servers), name="tests")
        assert connection.connected
        await connection.close()


async def test_a_server_that_was_down_at_first_is_used_when_the_other_goes(tmp_path: Path, own: NatsServer) -> None:
    """The client must not have struck it off its list."""
    other = NatsServer(tmp_path / "other")
    try:
        other.start()
        other.kill()
        settings = msgspec.structs.replace(own.settings(), servers=(other.url, own.url))
        connection = await connect(settings, name="tests")
        again = asyncio.Event()

        async def notice() -> None:
            again.set()

        connection.on_reconnect(notice)
        await asyncio.to_thread(other.start)
        own.kill()

        await asyncio.wait_for(again.wait(), WITHIN_S)
        assert str(connection.client.connected_url and connection.client.connected_url.port) in other.url
        await connection.close()
    finally:
        other.stop()


async def test_a_connection_tries_for_ever_and_tells_each_listener_when_it_is_back(own: NatsServer) -> None:
    connection = await connect(own.settings(), name="tests")
    told: list[str] = []
    back = asyncio.Event()

    async def first() -> None:
        told.append("first")
        back.set()

    async def second() -> None:
        told.append("second")

    connection.on_reconnect(first)
    forget = connection.on_reconnect(second)
    forget()
    forget()
    own.kill()

    async def noticed() -> bool:
        return not connection.connected

    await until_answered(noticed, "the client noticed")
    await asyncio.to_thread(own.start)
    await asyncio.wait_for(back.wait(), WITHIN_S)

    assert told == ["first"]
    assert connection.client.options["max_reconnect_attempts"] == -1
    assert not connection.closed.done()
    await connection.close()


async def test_a_reader_that_breaks_closes_the_connection_instead_of_leaving_it_deaf() -> None:
    """Its process then ends and is started again."""

    async def say_nonsense_when_told(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        writer.write(b'INFO {"server_id":"tests","version":"2.14.0","max_payload":1048576,"headers":true}\r\n')
        await reader.readuntil(b"PING\r\n")
        writer.write(b"PONG\r\n")
        await told.wait()
        writer.write(b"INFO {this is no JSON}\r\n")

    told = asyncio.Event()
    writers: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(say_nonsense_when_told, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    connection = await connect(NatsSettings(servers=(f"nats://127.0.0.1:{port}",)), name="tests")
    assert connection.connected

    told.set()

    await asyncio.wait_for(asyncio.shield(connection.closed), WITHIN_S)
    assert not connection.connected
    await connection.close()
    server.close()
    for writer in writers:
        writer.close()
        await writer.wait_closed()
    await server.wait_closed()


async def test_closing_ends_the_connection_for_good_and_can_be_repeated(nats_settings: NatsSettings) -> None:
    connection = await connect(nats_settings, name="tests")

    await connection.close()
    await connection.close()

    assert connection.closed.done()
    assert not connection.connected


# --- questions


@pytest.fixture
async def opened(nats_settings: NatsSettings) -> AsyncIterator[Connection]:
    connection = await connect(nats_settings, name="questions")
    yield connection
    await connection.close()


async def test_many_questions_at_once_each_get_their_own_answer(opened: Connection) -> None:
    async def echo(message: Msg) -> None:
        await message.respond(message.data)

    await opened.client.subscribe("echo", cb=echo)
    bodies = [str(number).encode() for number in range(200)]

    answers = await asyncio.gather(*(opened.client.request("echo", body, timeout=10) for body in bodies))

    assert [answer.data for answer in answers] == bodies


async def test_a_question_that_nobody_hears_says_so_and_one_that_nobody_answers_ends_in_time(
    opened: Connection,
) -> None:
    async def silent(message: Msg) -> None:
        """Hears and says nothing."""

    await opened.client.subscribe("silent", cb=silent)

    with pytest.raises(nats.errors.NoRespondersError):
        await opened.client.request("nobody", b"", timeout=10)
    with pytest.raises(nats.errors.TimeoutError):
        await opened.client.request("silent", b"", timeout=0.05)


async def test_an_answer_after_its_time_goes_nowhere_and_the_next_question_gets_its_own(opened: Connection) -> None:
    asked: list[Msg] = []
    heard = asyncio.Event()

    async def keep(message: Msg) -> None:
        asked.append(message)
        heard.set()

    await opened.client.subscribe("slow", cb=keep)
    with pytest.raises(nats.errors.TimeoutError):
        await opened.client.request("slow", b"first", timeout=0.05)
    second = asyncio.create_task(opened.client.request("slow", b"second", timeout=10))
    while len(asked) < 2:
        heard.clear()
        await heard.wait()
    await asked[0].respond(b"late")
    await asked[1].respond(b"in time")

    assert (await second).data == b"in time"


async def test_a_question_that_is_cancelled_while_its_answer_arrives_is_cancelled(opened: Connection) -> None:
    """A wait that took the answer instead would lose the wish to stop, and its task would go on for ever."""
    asked: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()

    async def keep(message: Msg) -> None:
        asked.set_result(message)

    await opened.client.subscribe("asked", cb=keep)
    question = asyncio.create_task(opened.client.request("asked", b"", timeout=10))
    message = await asked
    # Straight to the future that waits, and the cancel in the same turn of the loop.
    (waiting,) = opened.client._asked.values()  # pyright: ignore
    waiting.set_result(message)
    question.cancel()

    with pytest.raises(asyncio.CancelledError):
        await question
