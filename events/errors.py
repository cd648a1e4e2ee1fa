"""The root of every error that gpukeeper raises.

An error carries fields, not prose, and says whether a retry can help. A command that is refused is a value
(a ``Refused`` outcome, a ``rejected`` fact), not an exception.
"""

from __future__ import annotations

from typing import Any, ClassVar


class GpukeeperError(Exception):
    """Something went wrong in gpukeeper."""

    #: A stable word for scripts, shown in ``--json`` output.
    code: ClassVar[str] = "error"
    #: Whether the same call may succeed later without a change by the caller.
    retryable: ClassVar[bool] = False

    def __init__(self, message: str | None = None, **fields: Any) -> None:
        self.message = message or (self.__doc__ or "").strip().splitlines()[0]
        self.fields = fields
        super().__init__(self.message)


class InvalidId(GpukeeperError):
    """An id that becomes a subject token has characters or a length that are not allowed."""

    code = "invalid_id"


class LogUnavailable(GpukeeperError):
    """The log cannot be reached, or has no leader just now."""

    code = "log_unavailable"
    retryable = True


class IncompatibleStream(GpukeeperError):
    """A stream exists with a setting that gpukeeper cannot work with."""

    code = "incompatible_stream"


class PayloadTooLarge(GpukeeperError):
    """A body is larger than the server takes in one message."""

    code = "payload_too_large"


class WaitTimedOut(GpukeeperError):
    """A bounded wait ended before what it waited for."""

    code = "wait_timed_out"
    retryable = True


class ConfigError(GpukeeperError):
    """The configuration is wrong."""

    code = "config"
