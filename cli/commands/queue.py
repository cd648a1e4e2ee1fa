"""`gpuq queue`."""

from __future__ import annotations

from typing import Annotated

import typer

from gpukeeper.cli.options import ConfigOption, DataOption, JsonOption, NatsOption, where

app = typer.Typer()


@app.command()
def queue(
    ctx: typer.Context,
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing it, until Ctrl-C.")] = False,
    json: JsonOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
    nats: NatsOption = None,
) -> None:
    """Show the jobs that wait, in order and with why, and those that run."""
    import asyncio

    from gpukeeper.cli.sitescreen import show_queue

    raise typer.Exit(asyncio.run(show_queue(where(ctx, config, data, nats), watches=watch, as_json=json)))
