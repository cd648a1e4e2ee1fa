"""`gpuq up` in the foreground: what it found, how to begin, and then the news, one line each."""

from __future__ import annotations

import asyncio
import os
import platform
import shlex
from collections.abc import Iterator
from typing import Any

from gpukeeper.cli.arrival import until_joined, until_log
from gpukeeper.cli.inbox import Inbox
from gpukeeper.cli.livesite import LiveSite
from gpukeeper.cli.options import Where
from gpukeeper.cli.printing import one_line, say, tell
from gpukeeper.cli.quantities import megabytes
from gpukeeper.cli.session import Session, load_where, open_session
from gpukeeper.cli.siteconfig import agent_config
from gpukeeper.cli.siteview import devices_document
from gpukeeper.cli.up import up
from gpukeeper.cli.watching import news_line
from gpukeeper.cli.words import IMPORTANT
from gpukeeper.events.clock import now_ns
from gpukeeper.events.errors import GpukeeperError

#: How long the scheduler may take to create the log, and the agent to join, before something is said about it.
_START_S = 30.0


async def run_up(where: Where, *, quiet: bool, verbose: bool) -> int:
    """Run a site until a signal; return the exit status.

    Raises:
        GpukeeperError: it cannot start, in words.
    """
    loaded, data = load_where(where, os.environ)
    host = agent_config(loaded.config, machine_name=platform.node()).host
    ready = asyncio.Event()
    news = None if quiet else asyncio.create_task(_tell_news(where, host, ready))
    try:
        return await up(
            loaded,
            data,
            environ=dict(os.environ) | ({} if where.nats is None else {"GPUQ_NATS_URL": where.nats}),
            say=lambda text: tell(one_line(text, 4000)),
            verbose=verbose,
            on_ready=lambda _: ready.set(),
        )
    finally:
        if news is not None:
            news.cancel()
            await asyncio.wait({news})
            if not news.cancelled() and (fault := news.exception()) is not None:
                tell(f"no news any more: {one_line(fault)}")


async def _tell_news(where: Where, host: str, ready: asyncio.Event) -> None:
    await ready.wait()
    try:
        async with open_session(where) as session, Inbox(session) as inbox:
            after = await _tell_start(session, where, host)
            await inbox.follow(after=after)
            while True:
                event = await inbox.next_event()
                if isinstance(event.data, IMPORTANT):
                    say(news_line(event))
    except GpukeeperError as error:
        tell(f"no news any more: {error.message}")


async def _tell_start(session: Session, where: Where, host: str) -> int:
    """Say what runs here and how to use it; return the sequence up to which that is told."""
    say(f"gpuq is up at {', '.join(session.settings.servers)}; data in {session.data}")
    live = LiveSite(session)
    try:
        async with asyncio.timeout(_START_S):
            await until_log(session)
            await live.start()
            await until_joined(session, live, host)
    except TimeoutError:
        tell(f"the agent has not joined within {_START_S:g} s: see {session.data / 'logs' / 'agent.log'}")
    finally:
        await live.stop()
    found = devices_document(live.site, live.heard, now_ns=now_ns())
    for line in _found(next((each for each in found["hosts"] if each["host"] == host), None), where):
        say(one_line(line, 2000))
    return live.site.seq


def _found(host: dict[str, Any] | None, where: Where) -> Iterator[str]:
    """Devices, runtimes, and the command for a first job."""
    if host is None:
        return
    flags = "".join(
        f" {name} {shlex.quote(str(value))}"
        for name, value in (("--config", where.config), ("--data", where.data), ("--nats", where.nats))
        if value is not None
    )
    devices = [
        f"{each['device']} ({each['name'] or each['kind']}, {megabytes(each['total_mb'])})" for each in host["devices"]
    ]
    yield f"host {host['host']}, devices: {', '.join(devices) or 'none, so no job can run here: see `gpuq doctor`'}"
    models: list[str] = []
    for runtime in host["runtimes"]:
        state = "healthy" if runtime["healthy"] else f"does not answer: {runtime['detail']}"
        models += runtime["models"] or []
        yield f"runtime {runtime['runtime']}: {runtime['provider']} at {runtime['url']}, {state}"
    if not host["runtimes"]:
        yield "no runtime yet: declare one in gpuq.toml, or start Ollama, which is looked for again and again"
    yield f"first job:  gpuq{flags} submit --stream --model {shlex.quote(models[0]) if models else 'MODEL'} 'Hello'"
    yield f"more:       gpuq{flags} queue | devices | watch | events; Ctrl-C stops"
