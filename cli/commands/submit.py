"""`gpuq submit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from gpukeeper.cli.options import ConfigOption, DataOption, JsonOption, NatsOption, where

app = typer.Typer()

_JOB = "The job"
_PLACE = "Where and when"


@app.command()
def submit(
    ctx: typer.Context,
    text: Annotated[str | None, typer.Argument(metavar="[PROMPT]", help="The prompt; - reads it from stdin.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="The model to run.", rich_help_panel=_JOB)] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt.", rich_help_panel=_JOB)] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a chat message.", rich_help_panel=_JOB)
    ] = False,
    message: Annotated[
        list[str] | None,
        typer.Option("--message", metavar="ROLE:TEXT", help="A chat message, in order.", rich_help_panel=_JOB),
    ] = None,
    embed: Annotated[
        list[str] | None,
        typer.Option("--embed", metavar="TEXT", help="A text to make an embedding of.", rich_help_panel=_JOB),
    ] = None,
    workflow: Annotated[
        Path | None,
        typer.Option(
            "--workflow",
            metavar="FILE",
            help="A graph for ComfyUI as JSON (API format); the model is comfyui unless one is named.",
            rich_help_panel=_JOB,
        ),
    ] = None,
    analysis: Annotated[
        Path | None,
        typer.Option("--analysis", metavar="FILE", help="A query of an analysis engine as JSON.", rich_help_panel=_JOB),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", metavar="FILE", help="A job as JSON; - is stdin.", rich_help_panel=_JOB),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Generate so many at most.", rich_help_panel=_JOB)
    ] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", rich_help_panel=_JOB)] = None,
    seed: Annotated[int | None, typer.Option("--seed", rich_help_panel=_JOB)] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="NAME=VALUE", help="Passed to the runtime.", rich_help_panel=_JOB),
    ] = None,
    job_id: Annotated[
        str | None,
        typer.Option("--id", metavar="ID", help="The same id and body are the same job.", rich_help_panel=_JOB),
    ] = None,
    producer: Annotated[
        str | None, typer.Option("--producer", help="Who submits. Default: your user name.", rich_help_panel=_JOB)
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="NAME=TEXT", help="A note of your own.", rich_help_panel=_JOB),
    ] = None,
    runtime: Annotated[str | None, typer.Option("--runtime", help="Only this runtime.", rich_help_panel=_PLACE)] = None,
    host: Annotated[str | None, typer.Option("--host", help="Only this host.", rich_help_panel=_PLACE)] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="Only this device (with --host).", rich_help_panel=_PLACE)
    ] = None,
    place: Annotated[
        Literal["any", "gpu", "cpu"] | None,
        typer.Option("--place", help="The kind of device.", rich_help_panel=_PLACE),
    ] = None,
    priority: Annotated[
        int | None, typer.Option("--priority", help="Higher goes first.", rich_help_panel=_PLACE)
    ] = None,
    vram_mb: Annotated[
        int | None, typer.Option("--vram-mb", help="Memory that it needs, in MB.", rich_help_panel=_PLACE)
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", help="GPUs of one host at once; --vram-mb is for each.", rich_help_panel=_PLACE),
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--kind", help="A kind of job of the configuration.", rich_help_panel=_PLACE)
    ] = None,
    on_capacity: Annotated[
        Literal["wait", "reject"] | None,
        typer.Option("--on-capacity", help="Where nothing can take it now.", rich_help_panel=_PLACE),
    ] = None,
    deadline: Annotated[
        list[str] | None,
        typer.Option(
            "--deadline",
            metavar="CLOCK=SECONDS",
            help="A clock of the job: queue, load, first_byte, idle or run.",
            rich_help_panel=_PLACE,
        ),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Wait for the end and print the result.")] = False,
    stream: Annotated[bool, typer.Option("--stream", "-s", help="Wait, and print the text as it comes.")] = False,
    timeout: Annotated[
        float | None, typer.Option("--timeout", min=0, metavar="SECONDS", help="How long to wait at most.")
    ] = None,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Send what is given, right or wrong; the scheduler answers.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print the id, or the result, and nothing else.")
    ] = False,
    json: JsonOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
    nats: NatsOption = None,
) -> None:
    """Submit a job, and wait for it where asked to.

    Prints the id and the scheduler's answer. A job that was stored is never lost, also where no scheduler runs yet.
    """
    import asyncio

    from gpukeeper.cli.submission import Asked
    from gpukeeper.cli.submitting import Manner, SubmitRun, read_file, read_prompt

    asked = Asked(
        model=model,
        prompt=read_prompt(text, prompt),
        chat=chat,
        messages=message or (),
        embed=embed or (),
        workflow=None if workflow is None else read_file(workflow),
        analysis=None if analysis is None else read_file(analysis),
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        options=option or (),
        id=job_id,
        kind=kind,
        runtime=runtime,
        host=host,
        device=device,
        place=place,
        priority=priority,
        vram_mb=vram_mb,
        gpus=gpus,
        on_capacity=on_capacity,
        deadlines=deadline or (),
        labels=label or (),
    )
    manner = Manner(waits=wait or stream, streams=stream, timeout_s=timeout, as_json=json, quiet=quiet)
    run = SubmitRun(where(ctx, config, data, nats), producer, manner)
    try:
        status = asyncio.run(run.run(asked, file, check=not no_check))
    except KeyboardInterrupt:
        run.interrupted()
        raise
    raise typer.Exit(status)
