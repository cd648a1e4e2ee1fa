"""One command's view of a site: where it is, a connection to it, its log and its objects."""

from __future__ import annotations

import getpass
import logging
import os
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import nats.errors

from gpukeeper.cli.access import nats_settings
from gpukeeper.cli.configuration import Loaded, current_folder, load_config
from gpukeeper.cli.datafolder import data_folder
from gpukeeper.cli.logs import log_to_stderr
from gpukeeper.cli.options import Where
from gpukeeper.events import subjects
from gpukeeper.events.clock import new_id, now_rfc3339
from gpukeeper.events.codec import Event, decode
from gpukeeper.events.connection import Connection, NatsSettings, connect
from gpukeeper.events.errors import LogUnavailable
from gpukeeper.events.jetstream import JetStreamLog
from gpukeeper.events.objects import JetStreamObjects
from gpukeeper.events.recorder import Recorder, Stamp

#: How long an unanswered append is chased, and one answer of the log is waited for.
SETTLE_S = 10.0
ANSWER_S = 5.0
#: How long reading what the log holds may take.
CATCH_UP_S = 120.0


class Session:
    """An open connection and what is reached over it. Made by :func:`open_session`."""

    def __init__(self, loaded: Loaded, data: Path, settings: NatsSettings, connection: Connection) -> None:
        self.loaded = loaded
        self.data = data
        self.settings = settings
        self.connection = connection
        #: Who this is, in commands and submissions.
        self.user = user_token()
        self.log = JetStreamLog(connection, append_timeout_s=ANSWER_S)
        self.beats_log = JetStreamLog(connection, stream=subjects.BEATS_STREAM, append_timeout_s=ANSWER_S)
        self.source = f"/site/{loaded.config.site.name}/cli/{self.user}"
        stamp = Stamp(source=self.source, new_id=new_id, now=now_rfc3339)
        self.recorder = Recorder(self.log, stamp, settle_s=SETTLE_S)
        self.payloads = JetStreamObjects(connection, subjects.PAYLOADS_BUCKET)
        self.snapshots = JetStreamObjects(connection, subjects.SNAPSHOTS_BUCKET)

    async def history(self, *patterns: str, after: int = 0) -> list[Event]:
        """Every event under ``patterns`` with a sequence above ``after`` that the log holds now, in order.

        Raises:
            LogUnavailable, WaitTimedOut: the log did not answer (in time).
        """
        last = [stored for pattern in patterns if (stored := await self.log.last(pattern)) is not None]
        until = max((stored.seq for stored in last), default=0)
        if until <= after:
            return []
        found: list[Event] = []
        follower = await self.log.follow(lambda stored: found.append(decode(stored)), after=after, subjects=patterns)
        try:
            await follower.wait_seen(until, CATCH_UP_S)
        finally:
            await follower.stop()
        return found

    async def scheduler_answers(self, timeout_s: float = 1.0) -> bool:
        """Whether a scheduler runs."""
        try:
            await self.connection.client.request(subjects.SCHEDULER_STATUS, b"", timeout=timeout_s)
        except nats.errors.NoRespondersError:
            return False
        except (TimeoutError, nats.errors.Error):
            # Somebody listens, and is busy.
            return True
        return True


def load_where(where: Where, environ: Mapping[str, str]) -> tuple[Loaded, Path]:
    """The configuration and the data folder that ``where`` names, else ``environ``, else the defaults.

    Raises:
        ConfigError: names the file, the path, the value and what would be right.
    """
    loaded = load_config(where.config, environ, cwd=current_folder(), nats_url=where.nats)
    return loaded, data_folder(where.data, environ)


@asynccontextmanager
async def open_session(
    where: Where, *, follows: bool = False, environ: Mapping[str, str] | None = None
) -> AsyncGenerator[Session]:
    """Connect to the site that ``where`` names; ``follows``: it lasts, so that what goes wrong meanwhile is told.

    ``environ`` stands for this process's environment where it is given.

    Raises:
        LogUnavailable: no server answers, or it refuses the login.
        ConfigError, NoCredentials, CredentialsUnreadable: in words.
    """
    log_to_stderr(logging.WARNING if follows else logging.ERROR)
    loaded, data = load_where(where, os.environ if environ is None else environ)
    settings = nats_settings(loaded.config.nats, data)
    try:
        connection = await connect(settings, name="gpuq")
    except LogUnavailable as error:
        hint = "is `gpuq up` running?" if loaded.config.nats.url is None else "is it running, and is the login right?"
        raise LogUnavailable(f"{error.message}; {hint}", **error.fields) from error
    try:
        yield Session(loaded, data, settings, connection)
    finally:
        await connection.close()


def user_token() -> str:
    """The user's name as a token of a subject; ``cli`` where there is none."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # no such user, as in some containers
        name = ""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:64] or "cli"
