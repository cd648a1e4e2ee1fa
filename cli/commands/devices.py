"""`gpuq devices`."""

from __future__ import annotations

from typing import Annotated

import typer

from gpukeeper.cli.options import ConfigOption, DataOption, JsonOption, NatsOption, where

app = typer.Typer()


@app.command()
def devices(
    ctx: typer.Context,
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing them, until Ctrl-C.")] = False,
    json: JsonOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
    nats: NatsOption = None,
) -> None:
    """Show hosts, devices with their slots and claims, and runtimes with their models."""
    import asyncio

    from gpukeeper.cli.sitescreen import show_devices

    raise typer.Exit(asyncio.run(show_devices(where(ctx, config, data, nats), watches=watch, as_json=json)))
