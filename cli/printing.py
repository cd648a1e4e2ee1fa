"""What reaches a terminal or a pipe: safe text, JSON, tables.

Words that users, producers or models wrote may hold anything. Before they stand in a line or a table their control
characters are shown as escapes, so that no text moves the cursor, changes colours or forges a line.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TextIO

import msgspec

from gpukeeper.events.errors import GpukeeperError

if TYPE_CHECKING:
    from rich.console import Console, Group

#: Control characters (but newline and tab), line separators, what reverses the direction of text, lone surrogates.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_LINE_BREAKS = re.compile("[\n\t]")
#: Programs that split text into lines split at these too; inside JSON strings they may stand as escapes.
_JSON_BREAKS = str.maketrans({"\u2028": "\\u2028", "\u2029": "\\u2029", "\x85": "\\u0085"})


def safe(text: str) -> str:
    """``text`` with what could act on a terminal shown as escapes; newlines and tabs stay."""
    return _UNSAFE.sub(_escape, text)


def one_line(text: object, limit: int = 500) -> str:
    """``text`` on one line, escaped and cut to ``limit`` characters."""
    line = _LINE_BREAKS.sub(_escape, safe(str(text)[: limit + 1]))
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    if character in "\n\t\r":
        return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}[character]
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class OutputClosed(GpukeeperError):
    """Whoever reads stdout has seen enough."""

    code = "output_closed"


class OutputFailed(GpukeeperError):
    """Stdout cannot be written to."""

    code = "output_failed"


def abandon(stream: TextIO) -> None:
    """Write nothing more there, also not what is still buffered when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say(line: str) -> None:
    """One line on stdout. Whatever others wrote in it must have gone through :func:`one_line`.

    Raises:
        OutputClosed: nobody reads any more.
        OutputFailed: it cannot be written, as where a disk is full.
    """
    _write(line + "\n")


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise OutputClosed from None
    except OSError as error:
        raise OutputFailed(f"the output cannot be written: {error.strerror}", reason=error.strerror) from error


def tell(line: str) -> None:
    """One line on stderr, for people: scripts read stdout.

    Where stderr cannot be written to, there is nowhere to say so, and what a command does must not depend on it.
    """
    try:
        print(line, file=sys.stderr, flush=True)  # noqa: T201
    except OSError:
        abandon(sys.stderr)


def write_text(text: str) -> None:
    """A piece of what a model wrote: as it is into a pipe or file, escaped on a terminal."""
    _write(safe(text) if sys.stdout.isatty() else text)


def print_text(text: str) -> None:
    """All of what a model wrote, ended by a newline."""
    write_text(text if text.endswith("\n") else text + "\n")


def json_text(document: object, *, indent: int = 0) -> str:
    """``document`` as JSON that no reader of lines splits, whatever strings are in it."""
    encoded = msgspec.json.encode(document)
    if indent:
        encoded = msgspec.json.format(encoded, indent=indent)
    return encoded.decode().translate(_JSON_BREAKS)


def print_json(document: object) -> None:
    """One JSON document."""
    say(json_text(document, indent=2))


def print_json_line(document: object) -> None:
    """One JSON document on one line, of several."""
    say(json_text(document))


class Sheet(msgspec.Struct, frozen=True):
    """A table, or only its title where it has no rows."""

    title: str | None
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def sheet(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> Sheet:
    """A table of cells that show exactly what they hold."""
    shown = [["" if cell is None else one_line(cell) for cell in row] for row in rows]
    return Sheet(None if title is None else one_line(title), columns, shown)


def print_sheets(sheets: Sequence[Sheet]) -> None:
    """Tables, each after an empty line but the first; fitted to the terminal, or as wide as they are elsewhere."""
    if not sys.stdout.isatty():
        say("\n\n".join(_plain(each) for each in sheets))
        return
    _console().print(_group(sheets))


async def show_live(draw: Callable[[], Sequence[Sheet]], changed: Callable[[], Awaitable[None]]) -> None:
    """Draw again after each ``changed()``, in place on a terminal, one after another elsewhere. Ends when cancelled."""
    if not sys.stdout.isatty():
        while True:
            print_sheets(draw())
            say("")
            await changed()
    from rich.live import Live

    with Live(_group(draw()), console=_console(), auto_refresh=False) as live:
        while True:
            await changed()
            live.update(_group(draw()), refresh=True)


def _plain(shown: Sheet) -> str:
    lines = [] if shown.title is None else [shown.title]
    if shown.rows:
        table = [list(shown.columns), *shown.rows]
        widths = [max(len(row[place]) for row in table) for place in range(len(shown.columns))]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
    return "\n".join(lines)


def _console() -> Console:
    """A terminal that takes no markup from what it is given."""
    from rich.console import Console

    return Console(file=sys.stdout, markup=False, highlight=False, emoji=False)


def _group(sheets: Sequence[Sheet]) -> Group:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Table | Text] = []
    for each in sheets:
        if parts:
            parts.append(Text(""))
        if each.title is not None:
            parts.append(Text(each.title, style="bold"))
        if not each.rows:
            continue
        drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for column in each.columns:
            drawn.add_column(Text(column), overflow="fold")
        for row in each.rows:
            drawn.add_row(*(Text(cell) for cell in row))
        parts.append(drawn)
    return Group(*parts)
