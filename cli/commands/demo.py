"""`gpuq demo`."""

from __future__ import annotations

import typer

app = typer.Typer()


@app.command()
def demo() -> None:
    """Show a whole site at work in a temporary folder, in less than a minute and without a GPU.

    Needs the extra: pip install 'gpukeeper[demo]'. Leaves nothing behind.
    """
    from gpukeeper.cli.demo.run import run_demo

    raise typer.Exit(run_demo())
