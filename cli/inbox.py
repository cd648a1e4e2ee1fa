"""What a waiting command hears, from the log and over core NATS, in one place and in order of arrival."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from types import TracebackType

import msgspec
import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from gpukeeper.agents.outputs import Chunk
from gpukeeper.cli.session import Session
from gpukeeper.events import subjects
from gpukeeper.events.codec import Event, decode
from gpukeeper.events.errors import LogUnavailable
from gpukeeper.events.log import Follower

_decode_chunk = msgspec.json.Decoder(Chunk).decode


class Inbox:
    """A queue that followers of the log and viewers of running jobs fill. Use as an async context."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._items: asyncio.Queue[Event | Chunk | BaseException] = asyncio.Queue()
        self._followers: list[Follower] = []
        self._subscriptions: list[Subscription] = []

    async def __aenter__(self) -> Inbox:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for follower in self._followers:
            await follower.stop()
        for subscription in self._subscriptions:
            if not self._session.connection.client.is_closed:
                await subscription.unsubscribe()

    async def follow(self, *patterns: str, after: int) -> None:
        """Hear the events under ``patterns`` (none: all) with a sequence above ``after``, history first.

        Raises:
            LogUnavailable: the log did not answer.
        """
        follower = await self._session.log.follow(
            lambda stored: self._items.put_nowait(decode(stored)), after=after, subjects=patterns
        )
        self._followers.append(follower)
        follower.broken.add_done_callback(self._on_broken)

    async def hear_output(self, job_id: str) -> None:
        """Hear the text of a job as it is generated. What was published before is not heard.

        Raises:
            LogUnavailable: the server did not take the subscription.
        """

        async def on_message(message: Msg) -> None:
            try:
                self._items.put_nowait(_decode_chunk(message.data))
            except msgspec.MsgspecError:
                # Anybody may publish there: what is no chunk is not ours to show.
                return

        client = self._session.connection.client
        try:
            self._subscriptions.append(await client.subscribe(subjects.out(job_id), cb=on_message))
            await client.flush(timeout=5)  # the server has it before anything is submitted
        except (TimeoutError, nats.errors.Error) as error:
            raise LogUnavailable(f"cannot hear the output of {job_id}: {error or type(error).__name__}") from error

    async def next(self) -> Event | Chunk:
        """The next thing that was heard.

        Raises:
            GpukeeperError: nothing more can be heard.
        """
        item = await self._items.get()
        if isinstance(item, BaseException):
            raise item
        return item

    async def next_event(self) -> Event:
        """The next event; for an inbox that hears no output.

        Raises:
            GpukeeperError: nothing more can be heard.
        """
        item = await self.next()
        assert isinstance(item, Event)
        return item

    def heard_already(self) -> Sequence[Event | Chunk]:
        """What waits to be taken, taken."""
        found: list[Event | Chunk] = []
        while not self._items.empty():
            item = self._items.get_nowait()
            if not isinstance(item, BaseException):
                found.append(item)
        return found

    def _on_broken(self, broken: asyncio.Future[None]) -> None:
        if not broken.cancelled() and (error := broken.exception()) is not None:
            self._items.put_nowait(error)


@asynccontextmanager
async def following(session: Session, *patterns: str, after: int) -> AsyncGenerator[Inbox]:
    """An inbox that hears the events under ``patterns`` (none: all) above ``after``."""
    async with Inbox(session) as inbox:
        await inbox.follow(*patterns, after=after)
        yield inbox
