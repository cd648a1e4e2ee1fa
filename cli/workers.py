"""The long-running parts as processes: `scheduler` and `agent`. Imports stay small; nothing here draws.

Started as ``python -m gpukeeper.cli.workers scheduler|agent``; they find the data folder and the configuration in
``GPUQ_DATA`` and ``GPUQ_CONFIG``.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import platform
import signal
import sys
from pathlib import Path
from typing import TextIO, cast

import structlog
import uvloop

from gpukeeper.cli.access import nats_settings
from gpukeeper.cli.configuration import Loaded, current_folder, load_config
from gpukeeper.cli.datafolder import data_folder
from gpukeeper.cli.errors import exit_code_of
from gpukeeper.cli.exitcodes import Exit
from gpukeeper.cli.siteconfig import SiteConfig, agent_config, scheduler_config
from gpukeeper.events.catchup import unless_set
from gpukeeper.events.connection import Connection, connect
from gpukeeper.events.errors import ConfigError, GpukeeperError, LogUnavailable
from gpukeeper.events.streams import SiteStreams, ensure_site
from gpukeeper.projections.site import Retention

#: How long a part waits for the log's server and leader when it starts.
_START_S = 60.0
_START_PAUSE_S = 0.5


def configure_logging(*, verbose: bool = False) -> None:
    """One line an event on stderr: time, level, a short name, fields. Bodies and secrets are never fields."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"], bool_as_flag=False),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG if verbose else logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(file=cast("TextIO", _Stderr())),
        cache_logger_on_first_use=True,
    )


class _Stderr:
    """Stderr that cannot break what it tells about: when its reader has died, work goes on untold.

    Nothing is buffered: what Python cannot flush at its end would change the exit status.
    """

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            os.write(2, text.encode())
        return len(text)

    def flush(self) -> None:
        return


async def run_scheduler(loaded: Loaded, data: Path, stop: asyncio.Event) -> None:
    """Run one scheduler until ``stop``."""
    from gpukeeper.scheduler.service import SchedulerService

    config = scheduler_config(loaded.config, deadline_sources=loaded.deadline_sources)
    connection = await unless_set(stop, _connect(loaded, data, "gpuq-scheduler"))
    if connection is None:
        return
    try:
        await SchedulerService(connection, config).run(stop)
    finally:
        await connection.close()


async def run_agent(loaded: Loaded, data: Path, stop: asyncio.Event) -> None:
    """Run this host's agent until ``stop``."""
    from gpukeeper.agents.service import AgentService

    config = agent_config(loaded.config, machine_name=platform.node())
    scheduler = loaded.config.scheduler
    retention = Retention(scheduler.forget_after_s, scheduler.forget_above)
    connection = await unless_set(stop, _connect(loaded, data, f"gpuq-agent-{config.host}"))
    if connection is None:
        return
    try:
        await AgentService(connection, config, retention).run(stop)
    finally:
        await connection.close()


async def _connect(loaded: Loaded, data: Path, name: str) -> Connection:
    """Connect and set the streams up, waiting a while for a server that is just starting.

    Raises:
        LogUnavailable: it did not come up in time.
    """
    log = structlog.get_logger("gpukeeper.start")
    settings = nats_settings(loaded.config.nats, data)
    give_up_at = asyncio.get_running_loop().time() + _START_S
    connection: Connection | None = None
    while True:
        try:
            if connection is None:
                connection = await connect(settings, name=name)
            await ensure_site(connection, site_streams(loaded.config))
        except LogUnavailable as error:
            if asyncio.get_running_loop().time() >= give_up_at:
                if connection is not None:
                    await connection.close()
                raise
            log.warning("log_not_ready", error=error.message)
            await asyncio.sleep(_START_PAUSE_S)
        except BaseException:
            if connection is not None:
                await connection.close()
            raise
        else:
            return connection


def site_streams(config: SiteConfig) -> SiteStreams:
    """What the streams are like when they are made."""
    return SiteStreams(
        replicas=config.log.replicas,
        payload_ttl_s=config.log.payload_ttl_s,
        lease_ttl_s=config.scheduler.lease_ttl_s,
    )


async def until_signalled(stop: asyncio.Event) -> None:
    """Set ``stop`` on SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)


def run_worker(
    part: str,
    *,
    config: Path | None = None,
    data: Path | None = None,
    nats_url: str | None = None,
    verbose: bool = False,
) -> Exit:
    """Run ``scheduler`` or ``agent`` in the foreground until a signal."""
    configure_logging(verbose=verbose)

    async def main() -> None:
        loaded = load_config(config, os.environ, cwd=current_folder(), nats_url=nats_url)
        folder = data_folder(data, os.environ)
        stop = asyncio.Event()
        await until_signalled(stop)
        await (run_scheduler if part == "scheduler" else run_agent)(loaded, folder, stop)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            # What was imported lives as long as the process: the collector need not walk it again and again.
            gc.freeze()
            runner.run(main())
    except GpukeeperError as error:
        structlog.get_logger("gpukeeper").error("stopped", code=error.code, message=error.message)
        return exit_code_of(error)
    return Exit.OK


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in ("scheduler", "agent"):
        raise ConfigError("usage: python -m gpukeeper.cli.workers scheduler|agent")
    sys.exit(run_worker(sys.argv[1]))
