"""Errors of the command line, and the exit status that stands for each error of gpukeeper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpukeeper.cli.exitcodes import Exit
from gpukeeper.events.errors import GpukeeperError


class NotFound(GpukeeperError):
    """What was asked for does not exist."""

    code = "not_found"


class Refused(GpukeeperError):
    """The submission or command was refused."""

    code = "refused"


class WrongUsage(GpukeeperError):
    """The command line is wrong."""

    code = "usage"


#: By code, so that this module needs none of the modules that define the errors. Others: MISCONFIGURED.
_EXITS: Mapping[str, Exit] = {
    "usage": Exit.USAGE,
    "invalid_id": Exit.USAGE,
    "refused": Exit.REFUSED,
    "payload_too_large": Exit.REFUSED,
    "log_unavailable": Exit.UNAVAILABLE,
    "no_credentials": Exit.UNAVAILABLE,
    "server_failed": Exit.UNAVAILABLE,
    "server_not_ready": Exit.UNAVAILABLE,
    "wait_timed_out": Exit.TIMED_OUT,
    "not_found": Exit.NOT_FOUND,
}


def exit_code_of(error: GpukeeperError) -> Exit:
    """The exit status that stands for ``error``."""
    return _EXITS.get(error.code, Exit.MISCONFIGURED)


def error_document(code: str, message: str, status: Exit, fields: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What ``--json`` prints for an error."""
    import msgspec

    shown = msgspec.to_builtins(dict(fields or {}), enc_hook=str)
    return {"error": {"code": code, "message": message, "exit": int(status), "fields": shown}}
