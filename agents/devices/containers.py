"""Which container a process runs in, by the control group that the kernel shows for it.

The PIDs that a driver gives are the host's. Seen from inside a container, ``/proc`` numbers other processes: a PID of
the host may be somebody else's there, or nobody's. So nothing is said unless this process sees the host's PIDs.
"""

from __future__ import annotations

import re
from pathlib import Path

PROC = Path("/proc")

#: How the kernel names the PID namespace that it starts in (PROC_PID_INIT_INO).
_FIRST_PID_NAMESPACE = "pid:[4026531836]"
#: A folder of a container's own group: the bare id, or ``<engine>-<id>.scope`` under systemd.
_GROUP = re.compile(r"(?:(?P<engine>[a-z][a-z-]*)[-:])?(?P<id>[0-9a-f]{64})(?:\.scope)?")


def sees_host_pids(proc: Path = PROC) -> bool:
    """Whether PIDs mean the same here as to the driver. False where that is not told."""
    try:
        return str((proc / "self" / "ns" / "pid").readlink()) == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def container_of(pid: int, *, proc: Path = PROC) -> str | None:
    """The full id of the container that the process runs in, as Docker, containerd, CRI-O or Podman name it.

    Of containers within containers, the outermost: the one that this host's engine knows. None for a process outside
    of containers, one that has ended or may not be looked at, and for every PID where :func:`sees_host_pids` is False.
    """
    if not sees_host_pids(proc):
        return None
    try:
        text = (proc / str(pid) / "cgroup").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return container_in(text)


def container_in(cgroup: str) -> str | None:
    """The container that the text of a ``cgroup`` file names, or None. Text in any shape will do."""
    for line in cgroup.splitlines():
        fields = line.split(":", 2)
        if len(fields) != 3:
            continue
        for folder in fields[2].split("/"):
            match = _GROUP.fullmatch(folder)
            # The monitor of a container (libpod-conmon-…, crio-conmon-…) runs beside it, not in it.
            if match is not None and not (match["engine"] or "").endswith("conmon"):
                return match["id"]
    return None
