"""`gpuq preview`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from gpukeeper.cli.options import ConfigOption, DataOption, JsonOption, NatsOption, where

app = typer.Typer()


@app.command()
def preview(
    ctx: typer.Context,
    model: Annotated[str, typer.Option("--model", "-m", help="The model that a job would run.")],
    vram_mb: Annotated[
        int | None,
        typer.Option("--vram-mb", min=0, metavar="MB", help="What it needs; else what earlier loads of it took."),
    ] = None,
    host: Annotated[str | None, typer.Option("--host", help="Only this host.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="Only this device; HOST/DEVICE too.")] = None,
    runtime: Annotated[str | None, typer.Option("--runtime", help="Only this runtime.")] = None,
    place: Annotated[
        Literal["any", "gpu", "cpu"], typer.Option("--place", metavar="any|gpu|cpu", help="Which kind of device.")
    ] = "any",
    json: JsonOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
    nats: NatsOption = None,
) -> None:
    """Say what would happen to a job now: where it fits, who would be asked to let go, who stays and why.

    Nothing is submitted, released or started. It rests on the newest heartbeats, and says how old they are.
    """
    import asyncio

    from gpukeeper.cli.placenames import host_and_device
    from gpukeeper.cli.previewing import show_preview
    from gpukeeper.scheduler.feasible import Want

    host, device = host_and_device(host, device)
    want = Want(model=model, runtime=runtime, host=host, device=device, place=place, vram_mb=vram_mb)
    raise typer.Exit(asyncio.run(show_preview(where(ctx, config, data, nats), want, as_json=json)))
