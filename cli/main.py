"""The command line: `gpuq`."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from gpukeeper.cli.commands import demo, devices, doctor, eventlog, jobs, preview, queue, serve, steer, submit, version
from gpukeeper.cli.errors import error_document, exit_code_of
from gpukeeper.cli.exitcodes import Exit
from gpukeeper.cli.options import ConfigOption, DataOption, NatsOption, Where
from gpukeeper.events.errors import GpukeeperError

#: Set to see the traceback of a fault in gpuq itself.
DEBUG_VARIABLE = "GPUQ_DEBUG"

app = typer.Typer(name="gpuq", add_completion=True, pretty_exceptions_enable=False)
for module in (submit, jobs, queue, devices, preview, steer, eventlog, serve, doctor, demo, version):
    app.add_typer(module.app)


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    config: ConfigOption = None,
    data: DataOption = None,
    nats: NatsOption = None,
    show_version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """An event-sourced scheduler for GPU inference jobs.

    Begin with `gpuq up` on the machine with the GPU, or with `gpuq demo` anywhere.
    """
    ctx.obj = Where(config, data, nats)
    if show_version:
        version.print_version(as_json=False)
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit(Exit.USAGE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Errors are one sentence on stderr, never a traceback."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in given
    try:
        return int(app(given, prog_name="gpuq", standalone_mode=False) or 0)
    except typer.Abort:
        return Exit.INTERRUPTED
    except typer.TyperException as error:
        return _fail("usage", _usage_words(error.format_message()), Exit.USAGE, as_json=as_json, hint=" (see --help)")
    except GpukeeperError as error:
        if error.code in ("output_closed", "output_failed"):
            return _fail_to_say(error)
        return _fail(error.code, error.message, exit_code_of(error), as_json=as_json, fields=error.fields)
    except Exception as error:  # noqa: BLE001 - the last resort: a sentence, and how to see more
        if os.environ.get(DEBUG_VARIABLE):
            traceback.print_exc()
        words = f"a fault in gpuq itself: {type(error).__name__}: {error} (set {DEBUG_VARIABLE}=1 to see where)"
        return _fail("internal", words, Exit.MISCONFIGURED, as_json=as_json)


def _usage_words(message: str) -> str:
    """What the parser says, as one sentence: its lists come over several lines, its values with a class's name."""
    words = " ".join(message.replace("Value error, ", "").split())
    return words.replace("'. Choose from: ", "': one of ")


def _fail(
    code: str, message: str, status: Exit, *, as_json: bool, fields: dict[str, object] | None = None, hint: str = ""
) -> Exit:
    from gpukeeper.cli.printing import one_line, print_json, tell

    tell(f"gpuq: {one_line(message, 2000)}{hint}")
    if as_json:
        try:
            print_json(error_document(code, message, status, fields))
        except GpukeeperError as error:
            # What went wrong first is what the status says.
            _fail_to_say(error)
    return status


def _fail_to_say(error: GpukeeperError) -> Exit:
    """Stdout takes no more: no error where its reader has seen enough, and one where it should have taken all."""
    from gpukeeper.cli.printing import abandon, tell

    abandon(sys.stdout)
    if error.code == "output_closed":
        return Exit.OK
    tell(f"gpuq: {error.message}")
    return exit_code_of(error)


def _open_what_is_closed() -> None:
    """Stand in for streams that the program was started without, before a socket or file takes their number.

    Python has none then: errors would go to stdout, and what reads or writes there would find no stream at all.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open until Python ends


def run() -> None:
    """Entry point of the program."""
    _open_what_is_closed()
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            # A terminal that cannot show a character shows its escape instead of an error.
            reconfigure(errors="backslashreplace")
            if stream is sys.stdout and not stream.isatty():
                # JSON is UTF-8 whatever the locale says, and what a model wrote goes into a file as it is.
                reconfigure(encoding="utf-8")
    sys.exit(main())


if __name__ == "__main__":
    run()
