"""What runtimes and networks do to a connection, for what asks them: on each event loop that may run it."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import struct
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import uvloop

from gpukeeper.agents.config import RuntimeConfig
from gpukeeper.agents.runtimes import http as module
from gpukeeper.agents.runtimes.http import RuntimeHttp
from gpukeeper.agents.runtimes.port import RuntimeFailure
from gpukeeper.agents.runtimes.registry import build
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import Work
from support.fake_http import Fault
from support.llamacpp_fake import FakeLlamaCpp

ANY = msgspec.json.Decoder(Any)
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"

Runner = Callable[[Coroutine[Any, Any, None]], None]
on_each_loop = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Script:
    """A server of one behaviour, with every request that it was sent."""

    def __init__(self, answer: Callable[[asyncio.StreamWriter, int], Coroutine[Any, Any, None]]) -> None:
        self._answer = answer
        self.url = ""
        self.requests: list[tuple[bytes, bytes]] = []
        self.connections = 0
        self.gone = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
                body = await reader.readexactly(int(fields.get(b"content-length", 0)))
                self.requests.append((head, body))
                await self._answer(writer, len(self.requests))
        except (asyncio.IncompleteReadError, ConnectionError):
            self.gone.set()
        finally:
            writer.close()


@asynccontextmanager
async def scripted(
    answer: Callable[[asyncio.StreamWriter, int], Coroutine[Any, Any, None]],
) -> AsyncGenerator[tuple[Script, RuntimeHttp]]:
    """A server and what asks it. Nothing may be reported to the loop, nor be left unclosed, meanwhile."""
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    script = Script(answer)
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    script.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    http = RuntimeHttp(script.url)
    try:
        async with server, asyncio.timeout(20):
            try:
                yield script, http
            finally:
                await http.close()
    finally:
        gc.collect()
        await asyncio.sleep(0)
        assert reported == []


async def whole(writer: asyncio.StreamWriter, _: int) -> None:
    writer.write(WHOLE)


async def nothing(writer: asyncio.StreamWriter, _: int) -> None:
    """No answer; the connection stays open until the client leaves."""


# --- nothing is sent twice


@on_each_loop
def test_a_kept_connection_that_ended_unseen_is_replaced_before_anything_is_written(run: Runner) -> None:
    """The system knows of the end, the loop has not read it: what is written now would be lost."""
    bodies: list[bytes] = []

    def answer(listening: socket.socket) -> socket.socket:
        connection, _ = listening.accept()
        connection.settimeout(10)
        data = b""
        while not data.endswith(b"}"):
            data += connection.recv(65536)
        bodies.append(data.rpartition(b"\r\n\r\n")[2])
        connection.sendall(WHOLE)
        return connection

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.settimeout(10)
            http = RuntimeHttp(f"http://127.0.0.1:{listening.getsockname()[1]}")
            server = asyncio.create_task(asyncio.to_thread(answer, listening))
            assert await http.post("/x", {"job": 1}, ANY) == {}
            connection = await server
            second = asyncio.create_task(asyncio.to_thread(answer, listening))
            await asyncio.sleep(0)

            connection.close()
            # Nothing gives the loop a chance to read the end before the connection is chosen.
            assert await http.post("/x", {"job": 2}, ANY) == {}

            (await second).close()
            await http.close()

    run(scenario())

    assert bodies == [b'{"job":1}', b'{"job":2}']


@on_each_loop
def test_a_post_that_may_have_been_seen_is_cut_and_not_sent_again(run: Runner) -> None:
    async def answer(writer: asyncio.StreamWriter, number: int) -> None:
        if number == 1:
            writer.write(WHOLE)
        else:
            writer.close()

    async def scenario() -> None:
        async with scripted(answer) as (script, http):
            await http.post("/x", {"job": 1}, ANY)
            with pytest.raises(RuntimeFailure) as caught:
                await http.post("/x", {"job": 2}, ANY)

            assert caught.value.reason is Reason.RUNTIME_CUT
            assert [body for _, body in script.requests] == [b'{"job":1}', b'{"job":2}']
            assert script.connections == 1

    run(scenario())


@on_each_loop
@pytest.mark.parametrize("kept", [False, True])
def test_a_get_whose_connection_breaks_is_not_sent_again(run: Runner, kept: bool) -> None:
    async def answer(writer: asyncio.StreamWriter, number: int) -> None:
        if kept and number == 1:
            writer.write(WHOLE)
        else:
            writer.close()

    async def scenario() -> None:
        async with scripted(answer) as (script, http):
            if kept:
                await http.get("/x", ANY)
            with pytest.raises(RuntimeFailure) as caught:
                await http.get("/x", ANY)

            assert caught.value.reason is Reason.RUNTIME_CUT
            assert len(script.requests) == 1 + kept

    run(scenario())


async def test_a_runtime_that_closes_idle_connections_never_sees_a_payload_twice() -> None:
    async with FakeLlamaCpp() as fake:
        provider = build(RuntimeConfig(name="l", provider="llamacpp", url=fake.url))

        async def job() -> None:
            async for _ in provider.run("fake", "generate", Work(prompt="x"), on_cpu=False):
                pass

        for _ in range(3):
            await job()
            (connection,) = fake.live
            connection.close()
            await connection.gone.wait()
        fake.faults["/completion"] = Fault("drop", times=1)
        with pytest.raises(RuntimeFailure) as caught:
            await job()
        await job()
        await provider.close()

        assert caught.value.reason is Reason.RUNTIME_CUT
        assert fake.requests["/completion"] == 5
        assert fake.connections == 5


async def test_a_connection_that_was_idle_for_too_long_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.KEEP_ALIVE_S < 5
    monkeypatch.setattr(module, "KEEP_ALIVE_S", 0.0)
    async with scripted(whole) as (script, http):
        await http.get("/x", ANY)
        await http.get("/x", ANY)

        assert script.connections == 2


# --- nothing that arrived is lost, and nothing hangs


@on_each_loop
@pytest.mark.parametrize("ending", ["closed", "in mid-chunk", "malformed"])
def test_a_reader_that_was_busy_gets_all_that_arrived_before_the_failure(run: Runner, ending: str) -> None:
    async def scenario() -> None:
        read = asyncio.Event()

        async def answer(writer: asyncio.StreamWriter, _: int) -> None:
            writer.write(HEAD + chunk(b"one\n"))
            await read.wait()
            writer.write(chunk(b"two\nthree\n"))
            await writer.drain()
            if ending == "malformed":
                writer.write(b"zzz\r\n")
                return
            if ending == "in mid-chunk":
                writer.write(chunk(b"the end")[:5])
            writer.write_eof()

        async with scripted(answer) as (script, http):
            seen: list[bytes] = []

            async def collect() -> None:
                async with http.stream("/x", {}) as lines:
                    async for line in lines:
                        seen.append(line)
                        read.set()
                        await script.gone.wait()  # the client has heard of the end, and closed

            with pytest.raises(RuntimeFailure) as caught:
                await collect()

            assert caught.value.reason is Reason.RUNTIME_CUT
            assert seen == [b"one", b"two", b"three"]

    run(scenario())


@on_each_loop
def test_a_malformed_chunk_in_mid_answer_is_cut_at_once(run: Runner) -> None:
    async def scenario() -> None:
        read = asyncio.Event()

        async def answer(writer: asyncio.StreamWriter, _: int) -> None:
            writer.write(HEAD + chunk(b"one\n"))
            await read.wait()
            writer.write(b"zzz\r\nabc\r\n")

        async with scripted(answer) as (_, http):

            async def collect() -> None:
                async with http.stream("/x", {}) as lines:
                    async for line in lines:
                        assert line == b"one"
                        read.set()

            with pytest.raises(RuntimeFailure) as caught:
                async with asyncio.timeout(5):
                    await collect()

        assert caught.value.reason is Reason.RUNTIME_CUT

    run(scenario())


@on_each_loop
def test_a_connection_that_is_reset_in_mid_answer_is_cut_and_reported_once(run: Runner) -> None:
    async def scenario() -> None:
        read = asyncio.Event()

        async def answer(writer: asyncio.StreamWriter, _: int) -> None:
            writer.write(HEAD + chunk(b"one\n"))
            await read.wait()
            at_once = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            writer.transport.abort()

        async with scripted(answer) as (_, http):

            async def collect() -> None:
                async with http.stream("/x", {}) as lines:
                    async for _ in lines:
                        read.set()

            with pytest.raises(RuntimeFailure) as caught:
                await collect()
            assert caught.value.reason is Reason.RUNTIME_CUT
            # What was not looked at is reported when nothing holds it any more.
            del caught

    run(scenario())


@on_each_loop
def test_a_server_that_never_answers_is_left_by_cancelling(run: Runner) -> None:
    async def scenario() -> None:
        async with scripted(nothing) as (script, http):
            for _ in range(2):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await http.post("/x", {"a": 1}, ANY)

            assert script.connections == len(script.requests) == 2

    run(scenario())


@on_each_loop
@pytest.mark.parametrize("begun", [False, True])
def test_closing_ends_what_is_being_asked(run: Runner, begun: bool) -> None:
    async def scenario() -> None:
        asked = asyncio.Event()

        async def answer(writer: asyncio.StreamWriter, _: int) -> None:
            if begun:
                writer.write(HEAD + chunk(b"one\n"))
            asked.set()

        async with scripted(answer) as (_, http):

            async def read() -> list[bytes]:
                async with http.stream("/x", {}) as lines:
                    return [line async for line in lines]

            reading = asyncio.create_task(read())
            await asked.wait()
            await http.close()
            with pytest.raises(RuntimeFailure) as caught:
                await reading
            with pytest.raises(RuntimeError, match="/x: asked after the connections to"):
                await http.get("/x", ANY)

        assert caught.value.reason is Reason.RUNTIME_CUT

    run(scenario())


def test_what_was_never_asked_needs_no_loop_until_it_is_closed() -> None:
    http = RuntimeHttp("http://127.0.0.1:1")

    asyncio.run(http.close())

    gc.collect()


# --- connecting


async def test_a_port_that_nobody_listens_on_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    http = RuntimeHttp(url)

    for ask in (http.get("/x", ANY), http.post("/x", {}, ANY), http.check("/x")):
        with pytest.raises(RuntimeFailure) as caught:
            await ask
        assert caught.value.reason is Reason.RUNTIME_UNREACHABLE
        assert caught.value.detail.startswith(f"{url} cannot be reached: ")
    await http.close()


async def test_connecting_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener whose queue is full answers no attempt to connect."""
    monkeypatch.setattr(module, "CONNECT_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening:
        waiting = [socket.socket() for _ in range(3)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(listening.getsockname())
        http = RuntimeHttp(f"http://127.0.0.1:{listening.getsockname()[1]}")

        with pytest.raises(RuntimeFailure) as caught:
            async with asyncio.timeout(10):
                await http.get("/x", ANY)

        await http.close()
        for each in waiting:
            each.close()
    assert caught.value.reason is Reason.RUNTIME_UNREACHABLE
    assert "connecting took too long" in caught.value.detail


# --- what is sent, and what is taken


async def test_json_is_sent_as_it_is_encoded_however_large() -> None:
    async with scripted(whole) as (script, http):
        for text in ("ü\u2028", "x" * 3_000_000):
            await http.post("/x", {"prompt": text}, ANY)

        small, large = script.requests
        assert small[1] == msgspec.json.encode({"prompt": "ü\u2028"})
        assert json.loads(large[1]) == {"prompt": "x" * 3_000_000}
        assert b"\r\nContent-Type: application/json\r\n" in small[0]
        assert b"\r\nAccept-Encoding: identity\r\n" in small[0]


async def test_the_environment_names_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    async with scripted(whole) as (_, http):
        assert await http.get("/x", ANY) == {}


async def test_redirects_are_not_followed_and_cookies_not_kept() -> None:
    async def answer(writer: asyncio.StreamWriter, _: int) -> None:
        writer.write(b"HTTP/1.1 307 Go\r\nLocation: /other\r\nSet-Cookie: a=b; Path=/\r\nContent-Length: 0\r\n\r\n")

    async with scripted(answer) as (script, http):
        for _ in range(2):
            with pytest.raises(RuntimeFailure) as caught:
                await http.post("/x", {}, ANY)
            assert caught.value.status == 307

        assert len(script.requests) == 2
        assert not any(b"cookie" in head.lower() or b"/other" in head for head, _ in script.requests)


async def test_nothing_is_decompressed() -> None:
    async def answer(writer: asyncio.StreamWriter, _: int) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}")

    async with scripted(answer) as (_, http):
        assert await http.get("/x", ANY) == {}


async def test_text_that_is_not_utf_8_is_a_bad_reply() -> None:
    async def answer(writer: asyncio.StreamWriter, _: int) -> None:
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n["\xff\xfe"]')

    async with scripted(answer) as (_, http):
        with pytest.raises(RuntimeFailure) as caught:
            await http.get("/x", ANY)

        assert caught.value.reason is Reason.RUNTIME_BAD_REPLY


@pytest.mark.parametrize("limit", ["LINE_BYTES_MAX", "STREAM_BYTES_MAX", "REPLY_BYTES_MAX"])
async def test_an_answer_without_end_is_bounded(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(module, limit, 100_000)
    piece = chunk(b"x" * 1000 + (b"\n" if limit == "STREAM_BYTES_MAX" else b""))

    async def answer(writer: asyncio.StreamWriter, _: int) -> None:
        writer.write(HEAD)
        while True:
            writer.write(piece)
            await writer.drain()

    async with scripted(answer) as (_, http):

        async def collect() -> None:
            async with http.stream("/x", {}) as lines:
                async for _ in lines:
                    pass

        with pytest.raises(RuntimeFailure) as caught:
            await (http.post("/x", {}, ANY) if limit == "REPLY_BYTES_MAX" else collect())

        assert caught.value.reason is Reason.RUNTIME_BAD_REPLY


async def test_what_is_no_http_is_cut() -> None:
    async def answer(writer: asyncio.StreamWriter, _: int) -> None:
        writer.write(b"SSH-2.0-OpenSSH\r\n")

    async with scripted(answer) as (_, http):
        with pytest.raises(RuntimeFailure) as caught:
            await http.get("/x", ANY)

        assert caught.value.reason is Reason.RUNTIME_CUT
        assert "SSH-2.0" in caught.value.detail
