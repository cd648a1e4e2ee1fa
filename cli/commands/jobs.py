"""`gpuq status`, `result`, `cancel`, `watch`: one job."""

from __future__ import annotations

from typing import Annotated

import typer

from gpukeeper.cli.options import ConfigOption, DataOption, JobArgument, JsonOption, NatsOption, where

app = typer.Typer()


@app.command()
def status(
    ctx: typer.Context,
    job: JobArgument,
    json: JsonOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
    nats: NatsOption = None,
) -> None:
    """Show where a job is, and why: phase, reason, place in the queue, attempts, clocks and times."""
    import asyncio

    from gpukeeper.cli.onejob import show_status

    raise typer.Exit(asyncio.run(show_status(where(ctx, config, data, nats), job, as_json=json)))


@app.command()
def result(
    ctx: typer.Context,
    job: JobArgument,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Wait for the end.")] = False,
    stream: Annotated[
        bool, typer.Option("--stream", "-s", help="Wait, and print the text as it comes, from its beginning.")
    ] = False,
    timeout: Annotated[
        float | None, typer.Option("--timeout", min=0, metavar="SECONDS", help="How long to wait at most.")
    ] = None,
    json: JsonOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
    nats: NatsOption = None,
) -> None:
    """Print what a job came to: its text, its message, its embeddings, or its output."""
    import asyncio

    from gpukeeper.cli.onejob import show_result
    from gpukeeper.cli.viewing import View

    view = View(streams=stream, as_json=json, timeout_s=timeout)
    place = where(ctx, config, data, nats)
    raise typer.Exit(asyncio.run(show_result(place, job, view, waits=wait or stream)))


@app.command()
def cancel(
    ctx: typer.Context,
    job: JobArgument,
    reason: Annotated[str, typer.Option("--reason", help="Kept with the job.")] = "",
    timeout: Annotated[
        float, typer.Option("--timeout", min=0, metavar="SECONDS", help="How long to wait for the outcome.")
    ] = 10.0,
    json: JsonOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
    nats: NatsOption = None,
) -> None:
    """End a job: at once where it waits; where it runs, as soon as its runtime has stopped."""
    import asyncio

    from gpukeeper.cli.cancelling import cancel_job

    place = where(ctx, config, data, nats)
    raise typer.Exit(asyncio.run(cancel_job(place, job, reason=reason, timeout_s=timeout, as_json=json)))


@app.command()
def watch(
    ctx: typer.Context,
    job: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="One job; everything that happens if left out.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="Also the steps in between: routes, claims, releases, progress.")
    ] = False,
    json: JsonOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
    nats: NatsOption = None,
) -> None:
    """Show what happens as it happens, until Ctrl-C or the end of the job."""
    import asyncio

    from gpukeeper.cli.watching import watch_job, watch_site

    place = where(ctx, config, data, nats)
    if job is None:
        raise typer.Exit(asyncio.run(watch_site(place, everything=everything, as_json=json)))
    raise typer.Exit(asyncio.run(watch_job(place, job, as_json=json)))
