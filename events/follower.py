"""A running read of a JetStream stream that misses nothing.

The server pushes messages to an inbox and numbers them; a number that is not the next one, heartbeats that say more
was sent than arrived, heartbeats that stop, and a reconnect all mean the same: make a new consumer that starts after
the last sequence that was handed on. One task does that, so there is never more than one consumer to listen to.
"""

from __future__ import annotations

import asyncio

import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from gpukeeper.events.connection import Connection
from gpukeeper.events.errors import LogUnavailable, WaitTimedOut
from gpukeeper.events.log import OnStored, Stored

_log = structlog.get_logger("gpukeeper.log")

_IDLE_HEARTBEAT_S = 2.0
#: Without a sign of life for this long the consumer is taken for gone.
_SILENCE_S = 3 * _IDLE_HEARTBEAT_S
#: The server forgets a consumer that nobody listens to.
_INACTIVE_S = 10.0
#: How long one try to make a consumer may take. The answer to a request is lost when the connection is.
_CREATE_S = 2.0
#: How long a follower tries to come back, while connected, before it gives up.
_RESTART_LIMIT_S = 300.0
_PAUSE_S_MIN = 0.05
_PAUSE_S_MAX = 2.0

#: Messages after which everybody else has a turn.
_TURN = 256

_PENDING_MSGS_MAX = 4_194_304
_PENDING_BYTES_MAX = 1_073_741_824

#: $JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<timestamp>.<pending>, where a domain and an
#: account hash may stand before the stream: read from the right.
_ACK_PREFIX = "$JS.ACK."
_ERRORS = (TimeoutError, nats.errors.Error, OSError)


class _Source:
    """One consumer and the inbox it pushes to."""

    def __init__(self) -> None:
        self.subscription: Subscription | None = None
        #: Messages that arrived, as the consumer numbers them.
        self.arrived = 0
        #: Something arrived since the last look.
        self.alive = True


class JetStreamFollower:
    """A running read of one stream. Made by :meth:`.JetStreamLog.follow`."""

    def __init__(
        self,
        connection: Connection,
        stream: str,
        on_stored: OnStored,
        *,
        after: int,
        subjects: tuple[str, ...],
        newest_only: bool,
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._on_stored = on_stored
        self._seen = after
        self._subjects = subjects
        self._newest_only = newest_only
        self._source = _Source()
        self._again = asyncio.Event()
        self._stopped = False
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None
        self._forget = connection.on_reconnect(self._on_reconnect)
        #: Set when the follower can never go on; its owner should end.
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def seen(self) -> int:
        return self._seen

    async def start(self) -> None:
        """Begin to read. Raises what the client raises."""
        try:
            await self._open()
        except BaseException:
            await self.stop()
            raise
        self._connection.closed.add_done_callback(self._on_closed)
        self._task = asyncio.create_task(self._keep_open(), name=f"follow {self._stream}")

    async def wait_seen(self, seq: int, timeout_s: float) -> None:
        if seq <= self._seen:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((seq, future))
        try:
            # Not wait_for: before Python 3.12 it loses a cancel that arrives together with the result.
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            raise WaitTimedOut(f"sequence {seq} was not seen within {timeout_s} s", seq=seq, seen=self._seen) from None
        finally:
            self._waiters = [waiter for waiter in self._waiters if waiter[1] is not future]

    async def stop(self) -> None:
        self._stopped = True
        self._forget()
        self._connection.closed.remove_done_callback(self._on_closed)
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._close()
        if not self.broken.done():
            self.broken.cancel()

    async def _on_reconnect(self) -> None:
        self._again.set()

    def _on_closed(self, _: asyncio.Future[None]) -> None:
        self._break(LogUnavailable(f"the connection that {self._stream} was followed over is closed"))

    def _break(self, error: BaseException) -> None:
        self._stopped = True
        self._again.set()
        if not self.broken.done():
            self.broken.set_exception(error)

    async def _keep_open(self) -> None:
        """The only task that replaces the source."""
        while not self._stopped:
            try:
                async with asyncio.timeout(_SILENCE_S):
                    await self._again.wait()
            except TimeoutError:
                if self._source.alive or not self._connection.connected:
                    self._source.alive = False
                    continue
                _log.warning("follower_hears_nothing", stream=self._stream, seen=self._seen, silent_s=_SILENCE_S)
            try:
                await self._open_again()
            except Exception as error:
                self._break(error)
                raise

    async def _open_again(self) -> None:
        """Follow again from where we were, until it works, the connection is gone, or the limit is reached."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + _RESTART_LIMIT_S
        pause_s = _PAUSE_S_MIN
        while not self._stopped:
            self._again.clear()
            try:
                await self._close()
                await self._open()
            except _ERRORS as error:
                if loop.time() >= give_up_at:
                    self._break(LogUnavailable(f"cannot follow {self._stream} again: {error or type(error).__name__}"))
                    return
                _log.warning("follow_again_failed", stream=self._stream, error=str(error), pause_s=pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, _PAUSE_S_MAX)
                if not self._connection.connected:
                    return  # the reconnect begins again
            else:
                return

    async def _open(self) -> None:
        client = self._connection.client
        source = self._source = _Source()

        async def on_message(message: Msg) -> None:
            await self._on_message(source, message)

        inbox = client.new_inbox()
        source.subscription = await client.subscribe(
            inbox, cb=on_message, pending_msgs_limit=_PENDING_MSGS_MAX, pending_bytes_limit=_PENDING_BYTES_MAX
        )
        try:
            await self._connection.js.add_consumer(self._stream, self._consumer(inbox), timeout=_CREATE_S)
        except TimeoutError:
            # Messages are a proof that it was made, though the answer was lost.
            if source.arrived == 0:
                raise

    def _consumer(self, inbox: str) -> ConsumerConfig:
        config = ConsumerConfig(
            # A name lets the server's permissions see the filter in the subject of the request.
            name=inbox.rpartition(".")[2],
            deliver_subject=inbox,
            ack_policy=AckPolicy.NONE,
            max_deliver=1,
            flow_control=True,
            idle_heartbeat=_IDLE_HEARTBEAT_S,
            inactive_threshold=_INACTIVE_S,
            num_replicas=1,
            mem_storage=True,
        )
        if self._newest_only and self._seen == 0:
            config.deliver_policy = DeliverPolicy.LAST_PER_SUBJECT
        elif self._seen:
            config.deliver_policy = DeliverPolicy.BY_START_SEQUENCE
            config.opt_start_seq = self._seen + 1
        if len(self._subjects) == 1:
            config.filter_subject = self._subjects[0]
        elif self._subjects:
            config.filter_subjects = list(self._subjects)
        elif config.deliver_policy == DeliverPolicy.LAST_PER_SUBJECT:
            config.filter_subject = ">"  # that policy wants a filter
        return config

    async def _close(self) -> None:
        subscription, self._source.subscription = self._source.subscription, None
        if subscription is None:
            return
        try:
            await subscription.unsubscribe()
        except nats.errors.Error as error:
            # Closed or draining: there is nothing left to unsubscribe from.
            _log.debug("unsubscribed_already", stream=self._stream, error=str(error))

    async def _on_message(self, source: _Source, message: Msg) -> None:
        if self._stopped or source is not self._source:
            return
        source.alive = True
        if not message.reply.startswith(_ACK_PREFIX):
            await self._on_control(source, message)
            return
        _, seq, number, stored_ns, _ = message.reply.rsplit(".", 4)
        if int(number) != source.arrived + 1:
            self._on_gap(source, int(number))
            return
        source.arrived += 1
        self._hand_on(Stored(int(seq), int(stored_ns), message.subject, message.data))
        if not source.arrived % _TURN:
            # The client hands over what is queued without a break: signals and answers need their turn.
            await asyncio.sleep(0)

    def _hand_on(self, stored: Stored) -> None:
        if stored.seq <= self._seen:
            return
        try:
            self._on_stored(stored)
        except BaseException as error:
            # A reader that cannot fold must not go on with a hole: its owner ends.
            self._break(error)
            raise
        self._seen = stored.seq
        if self._waiters:
            for wanted, future in self._waiters:
                if wanted <= self._seen and not future.done():
                    future.set_result(None)

    async def _on_control(self, source: _Source, message: Msg) -> None:
        """Idle heartbeats and requests of the flow control, in order with the messages."""
        headers = message.headers or {}
        sent = headers.get("Nats-Last-Consumer")
        if sent is not None and int(sent) != source.arrived:
            self._on_gap(source, int(sent))
            return
        answer_to = message.reply or headers.get("Nats-Consumer-Stalled")
        if answer_to:
            try:
                await self._connection.client.publish(answer_to)
            except nats.errors.Error as error:
                # The reconnect makes a new consumer.
                _log.debug("flow_control_unanswered", stream=self._stream, error=str(error))

    def _on_gap(self, source: _Source, number: int) -> None:
        _log.warning("follower_gap", stream=self._stream, seen=self._seen, arrived=source.arrived, number=number)
        # What the present source still brings may be after a hole: the next one brings it again.
        self._source = _Source()
        self._source.subscription = source.subscription
        self._again.set()
