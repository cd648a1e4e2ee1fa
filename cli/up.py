"""What ``gpuq up`` runs: a NATS server of its own, a scheduler and an agent, over one data folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from gpukeeper.agents.config import STOP_MARGIN_S
from gpukeeper.cli.configuration import Loaded
from gpukeeper.cli.credentials import load_credentials
from gpukeeper.cli.datafolder import hold, make_private
from gpukeeper.cli.natsbinary import find_server
from gpukeeper.cli.natsserver import STOP_GRACE_S, NatsServer
from gpukeeper.cli.siteconfig import SiteConfig
from gpukeeper.cli.supervisor import Part, Supervisor
from gpukeeper.events.errors import ConfigError

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

    The children find the data folder and the configuration in ``GPUQ_DATA`` and ``GPUQ_CONFIG``, and their login in
    the data folder: no secret is on a command line or in an environment. ``on_ready`` gets the URL of the server.

    Raises:
        ConfigError: the configuration names a NATS that somebody else runs.
        FolderHeld: another process has the data folder; names it.
        FolderUnusable, NoServerBinary, ServerFailed, CredentialsUnreadable: in words.
    """
    config = loaded.config
    if config.nats.url is not None:
        raise ConfigError(
            f"nats.url is {config.nats.url}, and `gpuq up` starts a server of its own: leave nats.url (or "
            "GPUQ_NATS_URL) out, or run `gpuq scheduler` and `gpuq agent` against that server",
            key="nats.url",
        )
    with hold(data, command="gpuq up"):
        given = None if config.server.binary is None else Path(config.server.binary)
        binary = find_server(given, environ)
        server = NatsServer(data, config.server, site=config.site.name, binary=binary)
        await server.prepare()
        logs = data / "logs"
        make_private(logs)
        told = {"GPUQ_DATA": str(data)} | ({} if loaded.path is None else {"GPUQ_CONFIG": str(loaded.path)})
        supervisor = Supervisor(
            [
                Part(
                    name="nats",
                    argv=tuple(server.argv),
                    stop_grace_s=STOP_GRACE_S,
                    ready=server.wait_ready,
                ),
                Part(
                    name="scheduler",
                    argv=argv_for("scheduler"),
                    env=told,
                    stop_grace_s=SCHEDULER_GRACE_S,
                ),
                Part(
                    name="agent",
                    argv=argv_for("agent"),
                    env=told,
                    stop_grace_s=agent_stop_s(config),
                ),
            ],
            log_folder=logs,
            environ=environ,
            say=say,
            verbose=verbose,
            on_ready=lambda: on_ready(load_credentials(data).url or "") if on_ready is not None else None,
        )
        return await supervisor.run()
