"""`gpuq events`."""

from __future__ import annotations

from typing import Annotated

import typer

from gpukeeper.cli.options import ConfigOption, DataOption, JsonOption, NatsOption, where

app = typer.Typer()

_FILTERS = "Which events"


@app.command()
def events(
    ctx: typer.Context,
    job: Annotated[
        str | None, typer.Option("--job", metavar="ID", rich_help_panel=_FILTERS, help="Of this job.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="ID", rich_help_panel=_FILTERS, help="Of this device.")
    ] = None,
    host: Annotated[
        str | None, typer.Option("--host", rich_help_panel=_FILTERS, help="Of this host's devices and runtimes.")
    ] = None,
    type_: Annotated[
        list[str] | None,
        typer.Option("--type", metavar="TYPE", rich_help_panel=_FILTERS, help="Such as job.accepted or 'device.*'."),
    ] = None,
    producer: Annotated[
        str | None, typer.Option("--producer", rich_help_panel=_FILTERS, help="Submitted or caused by this producer.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="WHEN",
            rich_help_panel=_FILTERS,
            help="From this sequence or time on, or 10m ago.",
        ),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option("--until", metavar="WHEN", rich_help_panel=_FILTERS, help="Up to there."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", "-n", min=0, help="The newest so many; 0 shows all. Default: 100 where nothing narrows it."
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with what happens, until Ctrl-C.")] = False,
    json: JsonOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
    nats: NatsOption = None,
) -> None:
    """Show the log: every event with its sequence, its time, and the time since the one before.

    With --json each line is the whole CloudEvent, with its sequence and the time at which the server stored it.
    """
    import asyncio

    from gpukeeper.cli.eventscreen import Wanted, show_events
    from gpukeeper.cli.logrange import Filter

    wanted = Wanted(
        filter=Filter(job=job, device=device, host=host, producer=producer, types=tuple(type_ or ())),
        since=since,
        until=until,
        limit=limit,
        follows=follow,
    )
    raise typer.Exit(asyncio.run(show_events(where(ctx, config, data, nats), wanted, as_json=json)))
