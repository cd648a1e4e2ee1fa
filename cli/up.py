"""What ``gpuq up`` runs: a NATS server of its own, a scheduler and an agent, over one data folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from gpukeeper.agents.config import STOP_MARGIN_S
from gpukeeper.cli.access import nats_settings
from gpukeeper.cli.configuration import Loaded
from gpukeeper.cli.credentials import load_credentials
from gpukeeper.cli.datafolder import hold, make_private
from gpukeeper.cli.natsbinary import find_server
from gpukeeper.cli.natsserver import STOP_GRACE_S, NatsServer
from gpukeeper.cli.siteconfig import SiteConfig
from gpukeeper.cli.supervisor import Part, Supervisor
from gpukeeper.events.connection import connect

SCHEDULER_GRACE_S = 15.0


def agent_stop_s(config: SiteConfig) -> float:
    """From SIGTERM to SIGKILL for the agent: all that it may take to hand its work back and say goodbye."""
    return config.agent.stop_grace_s + STOP_MARGIN_S


def gpuq_argv(command: str) -> tuple[str, ...]:
    """How a part of gpuq is started: by this Python, with the current folder off ``sys.path``."""
    return (sys.executable, "-P", "-m", "gpukeeper.cli.workers", command)


async def up(
    loaded: Loaded,
    data: Path,
    *,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    verbose: bool = False,
    argv_for: Callable[[str], tuple[str, ...]] = gpuq_argv,
    on_ready: Callable[[str], None] | None = None,
) -> int:
    """Run a whole site on this machine until a signal; return the exit status (see :meth:`Supervisor.run`).

    Where the configuration names a NATS that somebody else runs, the scheduler and the agent run against that one.

    The children find the data folder and the configuration in ``GPUQ_DATA`` and ``GPUQ_CONFIG``, and their login in
    the data folder or in what the configuration names: no secret is on a command line or in an environment.
    ``on_ready`` gets the URL of the server.

    Raises:
        FolderHeld: another process has the data folder; names it.
        LogUnavailable: the configured NATS does not answer, or refuses the login.
        FolderUnusable, NoServerBinary, ServerFailed, CredentialsUnreadable: in words.
    """
    config = loaded.config
    theirs = config.nats.url
    with hold(data, command="gpuq up" if theirs is None else f"gpuq up --nats {theirs}"):
        logs = data / "logs"
        make_private(logs)
        if theirs is None:
            parts = [await _own_server(loaded, data, environ)]
        else:
            parts = []
            await (await connect(nats_settings(config.nats, data), name="gpuq up")).close()
        told = {"GPUQ_DATA": str(data)} | ({} if loaded.path is None else {"GPUQ_CONFIG": str(loaded.path)})
        for name, grace_s in (
            ("scheduler", SCHEDULER_GRACE_S),
            ("agent", agent_stop_s(config)),
        ):
            parts.append(Part(name=name, argv=argv_for(name), env=told, stop_grace_s=grace_s))

        def tell_ready() -> None:
            if on_ready is not None:
                on_ready(theirs or load_credentials(data).url or "")

        supervisor = Supervisor(parts, log_folder=logs, environ=environ, say=say, verbose=verbose, on_ready=tell_ready)
        return await supervisor.run()


async def _own_server(loaded: Loaded, data: Path, environ: Mapping[str, str]) -> Part:
    """A NATS server over ``data``, ready to be started."""
    config = loaded.config
    given = None if config.server.binary is None else Path(config.server.binary)
    binary = find_server(given, environ)
    server = NatsServer(data, config.server, site=config.site.name, binary=binary)
    await server.prepare()
    return Part(name="nats", argv=tuple(server.argv), stop_grace_s=STOP_GRACE_S, ready=server.wait_ready)
