"""The log on NATS JetStream: the only module of the read and write path that talks to NATS."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
import nats.errors
import nats.js.errors
import structlog
from nats.aio.msg import Msg
from nats.js.api import ConsumerConfig, DeliverPolicy
from nats.js.client import JetStreamContext

from gpukeeper.events.connection import Connection
from gpukeeper.events.errors import LogUnavailable, WaitTimedOut
from gpukeeper.events.log import Appended, OnStored, Outcome, Record, Refused, Stored, Unanswered
from gpukeeper.events.subjects import LOG_STREAM

_log = structlog.get_logger("gpukeeper.log")

_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
_MSG_ID = "Nats-Msg-Id"

#: What the server's error codes mean for one append.
_STALE = frozenset({10071})
_IN_FLIGHT = frozenset({10158, 10164})
_FULL = frozenset({10077, 10023, 10047})
_TOO_LARGE = frozenset({10054})
_NO_MESSAGE = frozenset({10037})

_PENDING_MSGS_MAX = 4_194_304
_PENDING_BYTES_MAX = 1_073_741_824
_IDLE_HEARTBEAT_S = 2.0
#: How long a follower tries to come back after a reconnect before it gives up.
_RESTART_LIMIT_S = 300.0


class _Found(msgspec.Struct, frozen=True):
    subject: str
    seq: int
    time: str
    data: bytes = b""


class _Error(msgspec.Struct, frozen=True):
    code: int
    err_code: int = 0
    description: str = ""


class _State(msgspec.Struct, frozen=True):
    last_seq: int


class _Reply(msgspec.Struct, frozen=True):
    message: _Found | None = None
    state: _State | None = None
    error: _Error | None = None


_decode_reply = msgspec.json.Decoder(_Reply).decode
_encode = msgspec.json.Encoder().encode


class JetStreamLog:
    """One stream as a log.

    Args:
        connection: where it lives.
        stream: its name.
        covering: one subject pattern that covers all of the stream's subjects.
        append_timeout_s: how long an append waits for its acknowledgement before it is ``Unanswered``.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        stream: str = LOG_STREAM,
        covering: str = "gpuq.>",
        append_timeout_s: float = 5.0,
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._covering = covering
        self._append_timeout_s = append_timeout_s

    async def append(self, record: Record) -> Outcome:
        # The client mutates the headers it is given, so each append has its own.
        headers = {_MSG_ID: record.event_id}
        if record.expected is not None:
            headers[_EXPECTED] = str(record.expected)
        try:
            ack = await self._connection.js.publish(
                record.subject, record.body, timeout=self._append_timeout_s, headers=headers
            )
        except nats.js.errors.NoStreamResponseError:
            return Refused("unavailable", "no stream listens on this subject")
        except nats.js.errors.APIError as error:
            return _refused(error)
        except nats.errors.MaxPayloadError:
            limit = self._connection.client.max_payload
            return Refused("too_large", f"{len(record.body)} bytes, at most {limit}")
        except (nats.errors.OutboundBufferLimitError, nats.errors.ConnectionDrainingError) as error:
            return Refused("unavailable", str(error))
        except (TimeoutError, nats.errors.Error, OSError) as error:
            if record.subject in self._connection.denied:
                return Refused("denied", f"these credentials may not publish to {record.subject}")
            return Unanswered(str(error) or type(error).__name__)
        return Appended(ack.seq)

    async def last(self, subject: str) -> Stored | None:
        return await self._message(_encode({"last_by_subj": subject}))

    async def get(self, seq: int) -> Stored | None:
        return await self._message(_encode({"seq": seq}))

    async def read(self, subject: str, *, after: int = 0) -> Sequence[Stored]:
        found: list[Stored] = []
        place = after
        while True:
            stored = await self._message(_encode({"seq": place + 1, "next_by_subj": subject}))
            if stored is None:
                return found
            found.append(stored)
            place = stored.seq

    async def last_seq(self) -> int:
        reply = await self._ask(f"$JS.API.STREAM.INFO.{self._stream}", b"")
        if reply.state is None:
            raise LogUnavailable(f"no state of stream {self._stream}: {reply.error}")
        return reply.state.last_seq

    async def _message(self, request: bytes) -> Stored | None:
        reply = await self._ask(f"$JS.API.STREAM.MSG.GET.{self._stream}", request)
        if reply.message is not None:
            found = reply.message
            return Stored(found.seq, _to_ns(found.time), found.subject, found.data)
        if reply.error is not None and reply.error.err_code in _NO_MESSAGE:
            return None
        raise LogUnavailable(f"stream {self._stream} did not answer: {reply.error}")

    async def _ask(self, subject: str, request: bytes) -> _Reply:
        try:
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
            self._connection,
            self._stream,
            self._covering,
            on_stored,
            after,
            tuple(subjects),
            newest_only=newest_only,
        )
        try:
            await follower.start()
        except (TimeoutError, nats.errors.Error, OSError) as error:
            raise LogUnavailable(f"cannot follow {self._stream}: {error or type(error).__name__}") from error
        return follower


class JetStreamFollower:
    """An ordered push consumer that survives reconnects.

    The client's ordered consumer re-creates itself on a gap or when heartbeats stop; after a reconnect it is made
    anew here, since a server that was killed has forgotten it. What was already handed on is skipped by sequence.
    """

    def __init__(
        self,
        connection: Connection,
        stream: str,
        covering: str,
        on_stored: OnStored,
        after: int,
        subjects: tuple[str, ...],
        *,
        newest_only: bool,
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._covering = covering
        self._on_stored = on_stored
        self._seen = after
        self._subjects = subjects
        self._newest_only = newest_only
        self._subscription: JetStreamContext.PushSubscription | None = None
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._forget = connection.on_reconnect(self._restart)
        self._stopped = False
        #: Set when the follower can never go on; its owner should end.
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def seen(self) -> int:
        return self._seen

    async def start(self) -> None:
        config = ConsumerConfig(inactive_threshold=60)
        if self._newest_only and self._seen == 0:
            config.deliver_policy = DeliverPolicy.LAST_PER_SUBJECT
            config.filter_subjects = [self._covering]
        elif self._seen:
            config.deliver_policy = DeliverPolicy.BY_START_SEQUENCE
            config.opt_start_seq = self._seen + 1
        if len(self._subjects) > 1:
            config.filter_subjects = list(self._subjects)
        subject = self._subjects[0] if len(self._subjects) == 1 else self._covering
        self._subscription = await self._connection.js.subscribe(
            subject,
            stream=self._stream,
            ordered_consumer=True,
            config=config,
            cb=self._on_message,
            idle_heartbeat=_IDLE_HEARTBEAT_S,
            pending_msgs_limit=_PENDING_MSGS_MAX,
            pending_bytes_limit=_PENDING_BYTES_MAX,
        )

    async def _on_message(self, message: Msg) -> None:
        if self._stopped:
            return
        # $JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<timestamp>.<pending>, read from the
        # right, where a domain or account hash does not shift it.
        _, seq_token, _, stored_token, _ = message.reply.rsplit(".", 4)
        seq = int(seq_token)
        if seq <= self._seen:
            return
        try:
            self._on_stored(Stored(seq, int(stored_token), message.subject, message.data))
        except BaseException as error:
            # A reader that cannot fold must not go on with a hole: its owner ends.
            self._stopped = True
            if not self.broken.done():
                self.broken.set_exception(error)
            raise
        self._seen = seq
        if self._waiters:
            self._wake()

    def _wake(self) -> None:
        for wanted, future in self._waiters:
            if wanted <= self._seen and not future.done():
                future.set_result(None)
        self._waiters = [waiter for waiter in self._waiters if not waiter[1].done()]

    async def wait_seen(self, seq: int, timeout_s: float) -> None:
        if seq <= self._seen:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((seq, future))
        try:
            await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            self._waiters = [waiter for waiter in self._waiters if waiter[1] is not future]
            raise WaitTimedOut(f"sequence {seq} was not seen within {timeout_s} s", seq=seq, seen=self._seen) from None

    async def _restart(self) -> None:
        """Follow again from where we were, until it works or the limit is reached."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + _RESTART_LIMIT_S
        pause_s = 0.05
        while not self._stopped:
            try:
                await self._unsubscribe()
                await self.start()
            except (TimeoutError, nats.errors.Error, OSError) as error:
                if loop.time() >= give_up_at:
                    if not self.broken.done():
                        self.broken.set_exception(LogUnavailable(f"cannot follow {self._stream} again: {error}"))
                    return
                _log.warning("follow_again_failed", stream=self._stream, error=str(error), pause_s=pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, 2.0)
            else:
                return

    async def _unsubscribe(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is None:
            return
        try:
            await subscription.unsubscribe()
        except (nats.errors.ConnectionClosedError, nats.errors.BadSubscriptionError):
            _log.debug("unsubscribed_already", stream=self._stream)

    async def stop(self) -> None:
        self._stopped = True
        self._forget()
        await self._unsubscribe()
        if not self.broken.done():
            self.broken.cancel()


def _refused(error: nats.js.errors.APIError) -> Refused:
    detail = f"{error.err_code}: {error.description}"
    code = error.err_code or 0
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
