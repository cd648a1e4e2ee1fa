"""The NATS client that every connection uses: nothing that another program publishes can stop it from reading.

The server stores subjects of any bytes but blanks, and headers of any bytes at all. The library's own reader breaks on
some of them and then stays "connected" and deaf; since the log is never deleted from, the same message would break it
again after every restart. So messages are read here in a way that has no failing case, and a reader that ends for any
other reason closes the connection: its process ends and is started again.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Coroutine
from typing import Any

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import Header
from nats.protocol.parser import AWAITING_CONTROL_LINE, AWAITING_MSG_PAYLOAD, Parser

_log = structlog.get_logger("gpukeeper.client")

_CRLF = b"\r\n"
_VERSION = b"NATS/1.0"
#: A control line beyond this is no line of the protocol: the server's own limit is 4 KiB, its INFO may be longer.
_LINE_BYTES_MAX = 1_048_576
#: How long a connection whose reader is gone may take to close.
_CLOSE_S = 2.0


class TotalParser(Parser):
    """Reads the server's half of the protocol. Words are kept apart by spaces and tabs, as the server sees it.

    The library's own parser also takes a form feed or a vertical tab for a blank; the server lets both into subjects.
    """

    nc: Any
    buf: bytearray

    async def parse(self, data: bytes = b"") -> None:
        """Take what arrived and hand on every message that is whole.

        Raises:
            ProtocolError: a line is not one of the protocol.
        """
        self.buf.extend(data)
        while self.buf:
            if self.state == AWAITING_MSG_PAYLOAD:
                if len(self.buf) < self.needed + len(_CRLF):
                    return
                await self._take_message()
                continue
            end = self.buf.find(_CRLF)
            if end < 0:
                if len(self.buf) > _LINE_BYTES_MAX:
                    raise nats.errors.ProtocolError(f"nats: a line of more than {_LINE_BYTES_MAX} bytes")
                return
            line = bytes(self.buf[:end])
            del self.buf[: end + len(_CRLF)]
            await self._take_line(line)

    async def _take_message(self) -> None:
        headers = bytes(self.buf[: self.header_needed])
        body = bytes(self.buf[self.header_needed : self.needed])
        del self.buf[: self.needed + len(_CRLF)]
        self.state = AWAITING_CONTROL_LINE
        await self.nc._process_msg(self.msg_arg["sid"], self.msg_arg["subject"], self.msg_arg["reply"], body, headers)

    async def _take_line(self, line: bytes) -> None:
        word, _, rest = line.partition(b" ")
        if word == b"MSG":
            self._expect(rest, sizes=1)
        elif word == b"HMSG":
            self._expect(rest, sizes=2)
        elif word == b"PING":
            await self.nc._process_ping()
        elif word == b"PONG":
            await self.nc._process_pong()
        elif word == b"-ERR":
            await self.nc._process_err(rest.strip().decode(errors="replace").lower())
        elif word == b"INFO":
            await self.nc._process_info(json.loads(rest))
        elif word != b"+OK":
            raise nats.errors.ProtocolError("nats: unknown protocol")

    def _expect(self, arguments: bytes, *, sizes: int) -> None:
        """``<subject> <sid> [reply] [header bytes] <all bytes>``"""
        words = arguments.replace(b"\t", b" ").split(b" ")
        if b"" in words:
            words = [word for word in words if word]
        try:
            sid, whole = int(words[1]), int(words[-1])
            headers = int(words[-2]) if sizes == 2 else 0
        except (IndexError, ValueError) as error:
            raise nats.errors.ProtocolError("nats: malformed message") from error
        if len(words) not in (sizes + 2, sizes + 3) or not 0 <= headers <= whole:
            raise nats.errors.ProtocolError("nats: malformed message")
        self.msg_arg = {"subject": words[0], "sid": sid, "reply": words[2] if len(words) == sizes + 3 else b""}
        self.header_needed, self.needed = headers, whole
        self.state = AWAITING_MSG_PAYLOAD


def headers_of(block: bytes) -> dict[str, str] | None:
    """The headers of a message, and the server's inline status among them; None where the bytes are no header block."""
    first, *lines = block.split(_CRLF)
    if not first.startswith(_VERSION):
        return None
    found: dict[str, str] = {}
    status, _, description = first[len(_VERSION) :].strip().partition(b" ")
    if status.isdigit():
        found[Header.STATUS.value] = status.decode()
        if description:
            found[Header.DESCRIPTION.value] = description.decode(errors="replace")
    for line in lines:
        name, colon, value = line.partition(b":")
        if colon:
            found[name.decode(errors="replace").strip()] = value.decode(errors="replace").strip()
    return found or None


def _is_late(answer: asyncio.Future[Msg]) -> None:
    if not answer.done():
        answer.set_exception(nats.errors.TimeoutError())


class LogClient(Client):
    """A client that no message can break, and that is closed rather than deaf.

    Args:
        require_tls: never send the credentials without TLS.
    """

    def __init__(self, *, require_tls: bool = False) -> None:
        super().__init__()
        self._ps = TotalParser(self)
        self._require_tls = require_tls
        #: The subscription that brings all answers, and the subject that they have in common.
        self._answers_sid: int | None = None
        self._answers_prefix = ""
        self._listening: asyncio.Task[None] | None = None
        #: Questions without an answer, by the last word of the subject that theirs will come on.
        self._asked: dict[bytes, asyncio.Future[Msg]] = {}
        self._numbers = itertools.count(1)

    def _connect_command(self) -> bytes:
        if self._require_tls and not self._server_info.get("tls_required"):
            raise nats.errors.Error("the server does not use TLS, but the settings say it must")
        return super()._connect_command()

    async def _process_headers(self, headers: Any) -> dict[str, str] | None:
        return headers_of(headers) if headers else None

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Msg:
        return self.msg_class(
            subject=subject.decode(errors="replace"),
            reply=reply.decode(errors="replace"),
            data=data,
            headers=headers,
            _client=self,
            _sid=sid,
        )

    # --- questions

    async def _request_new_style(
        self, subject: str, payload: bytes, timeout: float = 1, headers: dict[str, Any] | None = None
    ) -> Msg:
        """Ask, and wait for the answer.

        The answer comes to its waiter without a queue and a task in between, and the wait costs one timer: a log asks
        for every event that it appends.

        Raises:
            ConnectionDrainingError: the client is closing.
            TimeoutError: no answer within ``timeout`` seconds.
        """
        if self.is_draining_pubs:
            raise nats.errors.ConnectionDrainingError
        if self._answers_sid is None:
            await self._listen()
        loop = asyncio.get_running_loop()
        token = b"%x" % next(self._numbers)
        answer: asyncio.Future[Msg] = loop.create_future()
        self._asked[token] = answer
        late = loop.call_later(timeout, _is_late, answer)
        try:
            await self.publish(subject, payload, reply=self._answers_prefix + token.decode(), headers=headers)
            return await answer
        finally:
            late.cancel()
            del self._asked[token]
            if answer.done() and not answer.cancelled():
                # Taken note of, in case that publishing failed and nobody waited any more.
                answer.exception()

    async def _listen(self) -> None:
        """Subscribe to answers, once."""
        if self._listening is None:
            self._answers_prefix = self.new_inbox() + "."
            self._listening = asyncio.create_task(self._subscribe_to_answers())
        await asyncio.shield(self._listening)

    async def _subscribe_to_answers(self) -> None:
        try:
            subscription: Any = await self.subscribe(self._answers_prefix + "*")
        except BaseException:
            self._listening = None
            raise
        self._answers_sid = subscription._id

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        if sid != self._answers_sid:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        answer = self._asked.get(subject.rpartition(b".")[2])
        if answer is not None and not answer.done():
            answer.set_result(self._build_message(sid, subject, reply, data, headers_of(headers) if headers else None))

    # --- reading and reconnecting

    async def _read_loop(self) -> None:
        # It returns instead of raising, whatever happened; only with a lost connection is there another one to come.
        await super()._read_loop()
        task = asyncio.current_task()
        if self.is_connected and task is self._reading_task and task is not None and not task.cancelling():
            await self._end("its reader ended")

    async def _attempt_reconnect(self) -> None:
        reconnecting: Coroutine[Any, Any, None] = super()._attempt_reconnect()
        try:
            await reconnecting
        except Exception as error:
            await self._end(f"it cannot connect again: {error!r}")
            raise

    async def _end(self, why: str) -> None:
        """Close for good, and tell so even where closing does not come to its end."""
        _log.error("nats_client_broke", why=why)
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._close(Client.CLOSED)
        finally:
            if self._closed_cb is not None:
                await self._closed_cb()
