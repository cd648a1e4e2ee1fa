"""`gpuq up`, `scheduler`, `agent`: what runs."""

from __future__ import annotations

from typing import Annotated

import typer

from gpukeeper.cli.options import ConfigOption, DataOption, NatsOption, where

app = typer.Typer()

VerboseOption = Annotated[bool, typer.Option("--verbose", help="Also what the parts log.")]


@app.command()
def up(
    ctx: typer.Context,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing while all is well.")] = False,
    verbose: VerboseOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
    nats: NatsOption = None,
) -> None:
    """Run a whole site on this machine: NATS, scheduler, agent. With --nats: against a server that you have."""
    import asyncio

    from gpukeeper.cli.foreground import run_up

    raise typer.Exit(asyncio.run(run_up(where(ctx, config, data, nats), quiet=quiet, verbose=verbose)))


@app.command()
def scheduler(
    ctx: typer.Context,
    verbose: VerboseOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
    nats: NatsOption = None,
) -> None:
    """Run one scheduler. Several may run; one leads."""
    _run_worker("scheduler", ctx, config, data, nats, verbose=verbose)


@app.command()
def agent(
    ctx: typer.Context,
    verbose: VerboseOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
    nats: NatsOption = None,
) -> None:
    """Run this host's agent."""
    _run_worker("agent", ctx, config, data, nats, verbose=verbose)


def _run_worker(
    part: str, ctx: typer.Context, config: ConfigOption, data: DataOption, nats: NatsOption, *, verbose: bool
) -> None:
    from gpukeeper.cli.workers import run_worker

    place = where(ctx, config, data, nats)
    raise typer.Exit(run_worker(part, config=place.config, data=place.data, nats_url=place.nats, verbose=verbose))
