"""`gpuq doctor`: the checks as a table."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Iterator, Sequence

from gpukeeper.agents.devices.inventory import Inventory
from gpukeeper.cli.configuration import current_folder
from gpukeeper.cli.datafolder import data_folder
from gpukeeper.cli.doctor import Check, run_checks
from gpukeeper.cli.exitcodes import Exit
from gpukeeper.cli.logs import log_to_stderr
from gpukeeper.cli.options import Where
from gpukeeper.cli.printing import print_json, print_sheets, say, sheet
from gpukeeper.cli.siteconfig import SiteConfig, agent_config
from gpukeeper.events import streams
from gpukeeper.events.clock import now


async def show_checks(where: Where, *, as_json: bool) -> Exit:
    """Look, print, and say by the status whether something is wrong."""
    log_to_stderr(logging.ERROR)
    opened: list[Inventory] = []

    def finder(config: SiteConfig) -> Inventory:
        opened.append(Inventory(agent_config(config, machine_name=platform.node()), now=now))
        return opened[-1]

    environ = dict(os.environ) | ({} if where.nats is None else {"GPUQ_NATS_URL": where.nats})
    try:
        checks = await run_checks(
            where.config,
            data_folder(where.data, os.environ),
            environ=environ,
            cwd=current_folder(),
            finder=finder,
            stream_problems=streams.problems,
        )
    finally:
        for inventory in opened:
            await inventory.close()
    wrong = [check for check in checks if check.ok is False]
    if as_json:
        print_json({"ok": not wrong, "checks": checks})
    else:
        print_sheets([sheet(("", "check", "found", "what to do"), _rows(checks))])
        say("")
        say(f"{len(wrong)} to repair" if wrong else "nothing to repair")
    return Exit.MISCONFIGURED if wrong else Exit.OK


def _rows(checks: Sequence[Check]) -> Iterator[Sequence[object]]:
    signs = {True: "ok", False: "WRONG", None: "-"}
    for check in checks:
        yield signs[check.ok], check.name, check.detail, check.fix or ""
