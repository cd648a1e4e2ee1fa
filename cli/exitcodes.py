"""Exit codes of `gpuq`, for scripts. Stable: a code never changes its meaning."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """What the exit status says; :data:`MEANINGS` has the words."""

    OK = 0
    JOB_FAILED = 1
    USAGE = 2
    REFUSED = 3
    UNAVAILABLE = 4
    TIMED_OUT = 5
    NOT_FOUND = 6
    MISCONFIGURED = 7
    NO_ROOM = 8
    INTERRUPTED = 130


#: Also shown in docs/cli.md.
MEANINGS: dict[Exit, str] = {
    Exit.OK: "It worked; a job that was waited for succeeded.",
    Exit.JOB_FAILED: (
        "A job that was waited for ended otherwise: failed, cancelled, expired, unroutable, lost. "
        "For `gpuq demo`: something was not as it should be. "
        "For `gpuq reclaim` and `gpuq runtime`: it was tried and did not come about."
    ),
    Exit.USAGE: "The command line is wrong.",
    Exit.REFUSED: "The submission or command was refused, by the scheduler or by the agent; the answer says why.",
    Exit.UNAVAILABLE: "The log cannot be reached, or its server will not start.",
    Exit.TIMED_OUT: "A wait that was bounded ended before what it waited for.",
    Exit.NOT_FOUND: "What was asked for does not exist (a job, its result, a host, a device, a runtime).",
    Exit.MISCONFIGURED: "The configuration, the data folder or the machine is not as it must be.",
    Exit.NO_ROOM: "For `gpuq preview`: as things are, the job would not start now, nor after releases that are safe.",
    Exit.INTERRUPTED: "Stopped by Ctrl-C (SIGINT).",
}
