"""`gpuq drain`, `resume`, `pin`, `unpin`, `reclaim` and `runtime`: devices and runtimes, for operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gpukeeper.cli.options import ConfigOption, DataOption, JsonOption, NatsOption, Where, where

if TYPE_CHECKING:
    from gpukeeper.cli.orders import Order

app = typer.Typer()

DeviceArgument = Annotated[
    list[str], typer.Argument(metavar="HOST DEVICE", help="Which device; HOST/DEVICE is the same.")
]
RuntimeArgument = Annotated[
    list[str], typer.Argument(metavar="HOST RUNTIME", help="Which runtime; HOST/RUNTIME is the same.")
]
ModelArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="HOST RUNTIME [MODEL]",
        help="Which runtime (HOST/RUNTIME is the same), and which model of it; without one, whatever it holds.",
    ),
]
ReasonOption = Annotated[str, typer.Option("--reason", help="Why: kept in the log, with your name.")]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", min=0, metavar="SECONDS", help="How long to wait for the answer.")
]


@app.command()
def drain(
    ctx: typer.Context,
    device: DeviceArgument,
    reason: ReasonOption = "",
    timeout: TimeoutOption = 10.0,
    json: JsonOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
    nats: NatsOption = None,
) -> None:
    """Take a device out of service: what runs goes on, nothing new begins until `gpuq resume`."""
    from gpukeeper.cli.orders import order

    _carry_out(where(ctx, config, data, nats), order("drain", device, reason=reason), timeout, json)


@app.command()
def resume(
    ctx: typer.Context,
    device: DeviceArgument,
    reason: ReasonOption = "",
    timeout: TimeoutOption = 10.0,
    json: JsonOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
    nats: NatsOption = None,
) -> None:
    """Put a drained device back into service."""
    from gpukeeper.cli.orders import order

    _carry_out(where(ctx, config, data, nats), order("resume", device, reason=reason), timeout, json)


@app.command()
def pin(
    ctx: typer.Context,
    runtime: ModelArgument,
    reason: ReasonOption = "",
    timeout: TimeoutOption = 10.0,
    json: JsonOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
    nats: NatsOption = None,
) -> None:
    """Keep a model, or whatever a runtime holds, until `gpuq unpin`: it is neither taken back nor unloaded."""
    from gpukeeper.cli.orders import order

    _carry_out(where(ctx, config, data, nats), order("pin", runtime, reason=reason), timeout, json)


@app.command()
def unpin(
    ctx: typer.Context,
    runtime: ModelArgument,
    reason: ReasonOption = "",
    timeout: TimeoutOption = 10.0,
    json: JsonOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
    nats: NatsOption = None,
) -> None:
    """Take a pin away. A pin of whatever a runtime holds, and one of a model, are two pins."""
    from gpukeeper.cli.orders import order

    _carry_out(where(ctx, config, data, nats), order("unpin", runtime, reason=reason), timeout, json)


@app.command()
def reclaim(
    ctx: typer.Context,
    device: DeviceArgument,
    runtime: Annotated[str | None, typer.Option("--runtime", help="Only what this runtime holds.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Only this model of that runtime.")] = None,
    vram_mb: Annotated[
        int | None,
        typer.Option(
            "--vram-mb",
            min=1,
            metavar="MB",
            help="How much shall be usable there; without it, free all that can be had.",
        ),
    ] = None,
    reason: ReasonOption = "",
    timeout: TimeoutOption = 120.0,
    json: JsonOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
    nats: NatsOption = None,
) -> None:
    """Free memory on a device, as far as that is safe, and show what was measured, what stays and why.

    Only registered runtimes are asked to let go, and only those that have been idle for their whole grace and are not
    pinned. `gpuq preview` says beforehand who that would be.
    """
    from gpukeeper.cli.orders import order

    wanted = order("reclaim", device, reason=reason, runtime=runtime, model=model, vram_mb=vram_mb)
    _carry_out(where(ctx, config, data, nats), wanted, timeout, json)


@app.command()
def runtime(
    ctx: typer.Context,
    act: Annotated[Literal["begin", "stop", "restart"], typer.Argument(metavar="begin|stop|restart", help="What.")],
    runtime: RuntimeArgument,
    reason: ReasonOption = "",
    timeout: TimeoutOption = 120.0,
    json: JsonOption = False,
    config: ConfigOption = None,
    data: DataOption = None,
    nats: NatsOption = None,
) -> None:
    """Begin, stop or restart the container of a runtime whose registry entry names one."""
    from gpukeeper.cli.orders import order

    _carry_out(where(ctx, config, data, nats), order(act, runtime, reason=reason), timeout, json)


def _carry_out(place: Where, wanted: Order, timeout_s: float, as_json: bool) -> None:
    import asyncio

    from gpukeeper.cli.steering import carry_out

    raise typer.Exit(asyncio.run(carry_out(place, wanted, timeout_s=timeout_s, as_json=as_json)))
