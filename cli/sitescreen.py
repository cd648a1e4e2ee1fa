"""`gpuq queue` and `gpuq devices`: once, or for as long as somebody looks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpukeeper.cli import holders, siteview
from gpukeeper.cli.exitcodes import Exit
from gpukeeper.cli.livesite import Heard, LiveSite
from gpukeeper.cli.options import Where
from gpukeeper.cli.printing import Sheet, print_json, print_json_line, print_sheets, sheet, show_live
from gpukeeper.cli.session import open_session
from gpukeeper.events.clock import now_ns
from gpukeeper.projections.site import Site

_Document = dict[str, Any]

_BAR_MIN, _BAR_MAX = 10, 60
#: What stands behind the letters of a bar, on terminals that have colours.
_COLOURS = {
    holders.LETTERS["job"]: "black on green",
    holders.LETTERS["reserved"]: "black on cyan",
    holders.LETTERS["busy"]: "black on yellow",
    holders.LETTERS["idle"]: "white on blue",
    holders.LETTERS["unsure"]: "black on bright_yellow",
    holders.LETTERS["unmanaged"]: "white on magenta",
    holders.LETTERS["unknown"]: "white on red",
    holders.LETTERS["free"]: "dim",
}


async def show_queue(where: Where, *, watches: bool, as_json: bool) -> Exit:
    """Print the queue."""

    def document(site: Site, heard: Mapping[str, Heard]) -> _Document:
        return siteview.queue_document(site, heard, now_ns=now_ns())

    return await _show(where, document, _queue_sheets, watches=watches, as_json=as_json)


async def show_devices(where: Where, *, watches: bool, as_json: bool) -> Exit:
    """Print hosts, devices and runtimes."""

    def document(site: Site, heard: Mapping[str, Heard]) -> _Document:
        return siteview.devices_document(site, heard, now_ns=now_ns())

    return await _show(where, document, _devices_sheets, watches=watches, as_json=as_json)


async def _show(
    where: Where,
    document: Callable[[Site, Mapping[str, Heard]], _Document],
    sheets: Callable[[_Document], Sequence[Sheet]],
    *,
    watches: bool,
    as_json: bool,
) -> Exit:
    """Print a document of the folded site, as JSON or as tables, once or again and again.

    Raises:
        LogUnavailable, WaitTimedOut: the log did not answer (in time).
    """
    async with open_session(where, follows=watches) as session:
        live = LiveSite(session)
        try:
            await live.start()
            if watches and as_json:
                while True:
                    print_json_line(document(live.site, live.heard))
                    await live.changed(at_least_every_s=60.0)
            elif watches:
                await show_live(lambda: sheets(document(live.site, live.heard)), live.changed)
            elif as_json:
                print_json(document(live.site, live.heard))
            else:
                print_sheets(sheets(document(live.site, live.heard)))
        finally:
            await live.stop()
    return Exit.OK


def _bar_width() -> int:
    """As many letters as leave room for names and words; the terminal may have been made smaller since."""
    return max(_BAR_MIN, min(_BAR_MAX, shutil.get_terminal_size().columns // 3))


def _queue_sheets(document: _Document) -> Sequence[Sheet]:
    waiting = f"{len(document['waiting'])} waiting"
    if document["unanswered_submissions"]:
        waiting += f", {document['unanswered_submissions']} submitted and not yet accepted"
    running = f"{len(document['running'])} sent or running"
    return (
        sheet(siteview.QUEUE_COLUMNS, siteview.queue_rows(document), title=waiting),
        sheet(siteview.RUNNING_COLUMNS, siteview.running_rows(document), title=running),
    )


def _devices_sheets(document: _Document) -> Sequence[Sheet]:
    if not document["hosts"]:
        return (sheet((), (), title="no host has joined yet: `gpuq agent` (or `gpuq up`) joins this one"),)
    problems = (sheet(siteview.PROBLEM_COLUMNS, siteview.problem_rows(document)),) if document["problems"] else ()
    return (
        *problems,
        sheet(siteview.HOST_COLUMNS, siteview.host_rows(document)),
        sheet(siteview.DEVICE_COLUMNS, siteview.device_rows(document)),
        sheet(
            siteview.BAR_COLUMNS,
            siteview.bar_rows(document, _bar_width()),
            title=holders.LEGEND,
            colours={1: _COLOURS},
        ),
        sheet(siteview.RUNTIME_COLUMNS, siteview.runtime_rows(document)),
    )
