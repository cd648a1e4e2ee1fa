"""Exit codes of `gpuq`, for scripts. Stable: a code never changes its meaning."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """What the exit status says."""

    #: It worked; a job that was waited for succeeded.
    OK = 0
    #: A job that was waited for ended otherwise: failed, cancelled, expired, unroutable, lost.
    JOB_FAILED = 1
    #: The command line is wrong.
    USAGE = 2
    #: The submission or command was refused; the answer says why.
    REFUSED = 3
    #: The log cannot be reached, or its server will not start.
    UNAVAILABLE = 4
    #: A wait that was bounded ended before what it waited for.
    TIMED_OUT = 5
    #: What was asked for does not exist (a job, a device).
    NOT_FOUND = 6
    #: The configuration, the data folder or the machine is not as it must be.
    MISCONFIGURED = 7
    #: Stopped by SIGINT.
    INTERRUPTED = 130
