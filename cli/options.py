"""Options that many commands share. Imports stay small: this is read for every `gpuq --help`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

_PANEL = "Which site"


def check_nats_url(value: str | None) -> str | None:
    """Refuse what is no URL of a NATS server, or holds a secret, before anything is done with it."""
    if value is not None:
        from gpukeeper.cli.siteconfig import NatsConfig, SiteConfig, problems

        for problem in problems(SiteConfig(nats=NatsConfig(url=value))):
            raise typer.BadParameter(f"{problem.value}: must be {problem.wanted}")
    return value


ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="The gpuq.toml to read.", rich_help_panel=_PANEL),
]
DataOption = Annotated[
    Path | None,
    typer.Option("--data", metavar="FOLDER", help="The data folder of `gpuq up`.", rich_help_panel=_PANEL),
]
NatsOption = Annotated[
    str | None,
    typer.Option(
        "--nats",
        metavar="URL",
        callback=check_nats_url,
        help="A NATS server that you have, instead of the configured one. Logins come from the configuration.",
        rich_help_panel=_PANEL,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON: one document, or one a line where it follows.")]
JobArgument = Annotated[str, typer.Argument(metavar="ID", help="The id of the job.")]


@dataclass(frozen=True)
class Where:
    """Which site a command talks to, as far as the command line says."""

    config: Path | None = None
    data: Path | None = None
    nats: str | None = None

    def over(self, below: object) -> Where:
        """This, with what it leaves open taken from ``below``: what stood before the command."""
        if not isinstance(below, Where):
            return self
        return Where(self.config or below.config, self.data or below.data, self.nats or below.nats)


def where(ctx: typer.Context, config: Path | None, data: Path | None, nats: str | None) -> Where:
    """The options of a command over those that stood before it."""
    return Where(config, data, nats).over(ctx.obj)
