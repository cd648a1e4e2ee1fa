"""The command line: `gpuq`."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from gpukeeper.cli.exitcodes import Exit
from gpukeeper.events.errors import GpukeeperError

app = typer.Typer(name="gpuq", no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False)

ConfigOption = Annotated[Path | None, typer.Option("--config", help="The gpuq.toml to read.")]
DataOption = Annotated[Path | None, typer.Option("--data", help="The data folder of `gpuq up`.")]


@app.command()
def up(config: ConfigOption = None, data: DataOption = None, verbose: Annotated[bool, typer.Option()] = False) -> None:
    """Run a whole site on this machine: NATS, scheduler, agent."""
    from gpukeeper.cli.configuration import load_config
    from gpukeeper.cli.datafolder import data_folder
    from gpukeeper.cli.up import up as run_up

    loaded = load_config(config, os.environ, cwd=Path.cwd())
    folder = data_folder(data, os.environ)
    status = asyncio.run(
        run_up(
            loaded,
            folder,
            environ=os.environ,
            say=lambda text: typer.echo(text, err=True),
            verbose=verbose,
        )
    )
    raise typer.Exit(status)


@app.command()
def scheduler(
    config: ConfigOption = None, data: DataOption = None, verbose: Annotated[bool, typer.Option()] = False
) -> None:
    """Run one scheduler. Several may run; one leads."""
    from gpukeeper.cli.workers import run_worker

    raise typer.Exit(run_worker("scheduler", config=config, data=data, verbose=verbose))


@app.command()
def agent(
    config: ConfigOption = None, data: DataOption = None, verbose: Annotated[bool, typer.Option()] = False
) -> None:
    """Run this host's agent."""
    from gpukeeper.cli.workers import run_worker

    raise typer.Exit(run_worker("agent", config=config, data=data, verbose=verbose))


def run() -> None:
    """Entry point: errors in words, never a traceback."""
    try:
        app()
    except GpukeeperError as error:
        typer.echo(f"gpuq: {error.message}", err=True)
        sys.exit(Exit.MISCONFIGURED)


if __name__ == "__main__":
    run()
