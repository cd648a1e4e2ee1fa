"""`gpuq doctor`."""

from __future__ import annotations

import typer

from gpukeeper.cli.options import ConfigOption, DataOption, JsonOption, NatsOption, where

app = typer.Typer()


@app.command()
def doctor(
    ctx: typer.Context,
    json: JsonOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
    nats: NatsOption = None,
) -> None:
    """Look at everything that gpuq needs here, and say what is wrong and what to do. Changes nothing."""
    import asyncio

    from gpukeeper.cli.doctorscreen import show_checks

    raise typer.Exit(asyncio.run(show_checks(where(ctx, config, data, nats), as_json=json)))
