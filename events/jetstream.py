"""The log on NATS JetStream: the only module of the read and write path that talks to NATS."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
import nats.errors

from gpukeeper.events.connection import Connection
from gpukeeper.events.errors import LogUnavailable
from gpukeeper.events.follower import JetStreamFollower
from gpukeeper.events.log import Appended, OnStored, Outcome, Record, Refused, Stored, Unanswered
from gpukeeper.events.subjects import LOG_STREAM

_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
_MSG_ID = "Nats-Msg-Id"

#: What the server's error codes mean for one append.
_STALE = frozenset({10071})
_IN_FLIGHT = frozenset({10158, 10164})
_FULL = frozenset({10077, 10023, 10047})
_TOO_LARGE = frozenset({10054})
_NO_MESSAGE = frozenset({10037})
_NO_STREAM = frozenset({10059})


class _Found(msgspec.Struct, frozen=True):
    subject: str
    seq: int
    time: str
    data: bytes = b""


class _Error(msgspec.Struct, frozen=True):
    code: int
    err_code: int = 0
    description: str = ""


class _Ack(msgspec.Struct, frozen=True):
    seq: int = 0
    error: _Error | None = None


class _State(msgspec.Struct, frozen=True):
    last_seq: int


class _Reply(msgspec.Struct, frozen=True):
    message: _Found | None = None
    state: _State | None = None
    error: _Error | None = None


_decode_ack = msgspec.json.Decoder(_Ack).decode
_decode_reply = msgspec.json.Decoder(_Reply).decode
_encode = msgspec.json.Encoder().encode


class JetStreamLog:
    """One stream as a log.

    Args:
        connection: where it lives.
        stream: its name.
        append_timeout_s: how long an append waits for its acknowledgement before it is ``Unanswered``.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        stream: str = LOG_STREAM,
        append_timeout_s: float = 5.0,
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._append_timeout_s = append_timeout_s

    async def append(self, record: Record) -> Outcome:
        client = self._connection.client
        # The client mutates the headers it is given, so each append has its own.
        headers = {_MSG_ID: record.event_id}
        if record.expected is not None:
            headers[_EXPECTED] = str(record.expected)
        if not client.is_connected:
            # The client would keep the message and send it whenever it is back, long after the caller gave up on it.
            return Refused("unavailable", "not connected")
        size = len(record.body) + _size_of(headers)
        if size > client.max_payload:
            # The server closes a connection that sends more, and it counts the headers; the client does not.
            return Refused("too_large", f"{size} bytes with headers, at most {client.max_payload}")
        self._connection.denied.discard(record.subject.lower())
        try:
            async with self._connection.while_connected():
                answer = await client.request(
                    record.subject, record.body, timeout=self._append_timeout_s, headers=headers
                )
            ack = _decode_ack(answer.data)
        except nats.errors.NoRespondersError:
            return Refused("unavailable", "no stream listens on this subject")
        except msgspec.MsgspecError as error:
            return Unanswered(f"not an acknowledgement: {error}")
        except (nats.errors.OutboundBufferLimitError, nats.errors.ConnectionDrainingError) as error:
            return Refused("unavailable", str(error))
        except (TimeoutError, nats.errors.Error, OSError) as error:
            if record.subject.lower() in self._connection.denied:
                return Refused("denied", f"these credentials may not publish to {record.subject}")
            return Unanswered(str(error) or type(error).__name__)
        if ack.error is not None:
            return _refused(ack.error)
        return Appended(ack.seq) if ack.seq else Unanswered("an acknowledgement without a sequence")

    async def last(self, subject: str) -> Stored | None:
        return await self._message(_encode({"last_by_subj": subject}))

    async def get(self, seq: int) -> Stored | None:
        if seq < 1:
            return None
        return await self._message(_encode({"seq": seq}))

    async def read(self, subject: str, *, after: int = 0) -> Sequence[Stored]:
        found: list[Stored] = []
        place = after
        while (stored := await self.next(subject, after=place)) is not None:
            found.append(stored)
            place = stored.seq
        return found

    async def next(self, subject: str, *, after: int) -> Stored | None:
        """The first message of a literal subject with a sequence above ``after``.

        Raises:
            LogUnavailable: the log did not answer.
        """
        return await self._message(_encode({"seq": after + 1, "next_by_subj": subject}))

    async def last_seq(self) -> int:
        reply = await self._ask(f"$JS.API.STREAM.INFO.{self._stream}", b"")
        if reply.state is None:
            raise self._no_answer(reply)
        return reply.state.last_seq

    async def _message(self, request: bytes) -> Stored | None:
        reply = await self._ask(f"$JS.API.STREAM.MSG.GET.{self._stream}", request)
        if reply.message is not None:
            found = reply.message
            return Stored(found.seq, _to_ns(found.time), found.subject, found.data)
        if reply.error is not None and reply.error.err_code in _NO_MESSAGE:
            return None
        raise self._no_answer(reply)

    def _no_answer(self, reply: _Reply) -> LogUnavailable:
        if reply.error is not None and reply.error.err_code in _NO_STREAM:
            return LogUnavailable(
                f"this server has no stream {self._stream}: `gpuq up` or `gpuq scheduler` creates it",
                stream=self._stream,
            )
        return LogUnavailable(f"stream {self._stream} did not answer: {reply.error}", stream=self._stream)

    async def _ask(self, subject: str, request: bytes) -> _Reply:
        if not self._connection.connected:
            raise LogUnavailable(f"stream {self._stream}: not connected")
        try:
            async with self._connection.while_connected():
                answer = await self._connection.client.request(subject, request, timeout=self._append_timeout_s)
            return _decode_reply(answer.data)
        except (TimeoutError, nats.errors.Error, OSError) as error:
            raise LogUnavailable(f"stream {self._stream}: {error or type(error).__name__}") from error
        except msgspec.MsgspecError as error:
            raise LogUnavailable(f"stream {self._stream} answered with no JSON: {error}") from error

    async def follow(
        self, on_stored: OnStored, *, after: int, subjects: Sequence[str] = (), newest_only: bool = False
    ) -> JetStreamFollower:
        follower = JetStreamFollower(
            self._connection, self._stream, on_stored, after=after, subjects=tuple(subjects), newest_only=newest_only
        )
        try:
            await follower.start()
        except (TimeoutError, nats.errors.Error, OSError) as error:
            raise LogUnavailable(f"cannot follow {self._stream}: {error or type(error).__name__}") from error
        return follower


def _size_of(headers: dict[str, str]) -> int:
    """Bytes that the headers take in a message."""
    return len("NATS/1.0\r\n\r\n") + sum(len(f"{name}: {value}\r\n".encode()) for name, value in headers.items())


def _refused(error: _Error) -> Refused:
    detail = f"{error.err_code}: {error.description}"
    code = error.err_code
    if code in _STALE:
        return Refused("stale", detail)
    if code in _IN_FLIGHT:
        return Refused("in_flight", detail)
    if code in _FULL:
        return Refused("full", detail)
    if code in _TOO_LARGE:
        return Refused("too_large", detail)
    return Refused("unavailable", detail)


def _to_ns(text: str) -> int:
    """RFC 3339 with up to nine digits of a second, to nanoseconds since the epoch."""
    stem, _, rest = text.rstrip("Z").partition(".")
    whole = datetime.fromisoformat(stem).replace(tzinfo=UTC)
    return int(whole.timestamp()) * 1_000_000_000 + int(rest.ljust(9, "0")[:9] or "0")
