"""Becomes another program that is told to end (SIGTERM) when its parent dies, also when the parent is killed.

Run as a script: ``python -I -S deathsignal.py PARENT_PID PROGRAM ARGUMENT...``. A separate program rather than
a function between fork and exec, which is unsafe once the parent has threads. Only Linux offers the signal;
elsewhere the program runs without it, and the next ``gpuq up`` stops a server that was left behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
EXIT_PARENT_GONE = 125
EXIT_NO_PROGRAM = 127


def main() -> None:
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) != 0:
            sys.exit(f"cannot tie {program[0]} to its parent: {os.strerror(ctypes.get_errno())}")
        # The parent may have died before the signal was asked for.
        if os.getppid() != parent:
            sys.exit(EXIT_PARENT_GONE)
    try:
        os.execvp(program[0], program)  # noqa: S606 - an argument list, no shell
    except OSError as error:
        print(f"cannot start {program[0]}: {error.strerror}", file=sys.stderr)  # noqa: T201 - its only output
        sys.exit(EXIT_NO_PROGRAM)


if __name__ == "__main__":
    main()
