"""Small programs that stand for the parts of a site, and one that runs ``gpuq up`` over them.

Each program, given a folder and a name, leaves ``<name>.<pid>`` in the folder when it is up, and adds its name to the
file ``ended`` when SIGTERM has come and it ends.
"""

from __future__ import annotations

import sys
from pathlib import Path

_OBEDIENT = """
import os, pathlib, signal, sys
folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
def end(number, frame):
    with open(folder / "ended", "a") as file:
        file.write(name + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print(name, "is up", flush=True)
(folder / f"{name}.{os.getpid()}").touch()
while True:
    signal.pause()
"""

_STUBBORN = """
import os, pathlib, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(pathlib.Path(sys.argv[1]) / f"{sys.argv[2]}.{os.getpid()}").touch()
while True:
    signal.pause()
"""


def obedient(folder: Path, name: str) -> tuple[str, ...]:
    """The command of a program that ends on SIGTERM."""
    return (sys.executable, "-I", "-S", "-c", _OBEDIENT, str(folder), name)


def stubborn(folder: Path, name: str) -> tuple[str, ...]:
    """The command of a program that ignores SIGTERM."""
    return (sys.executable, "-I", "-S", "-c", _STUBBORN, str(folder), name)


def pids(folder: Path, name: str) -> list[int]:
    """The processes that have been up under ``name``, the latest last."""
    found = sorted(folder.glob(f"{name}.[0-9]*"), key=lambda path: path.stat().st_mtime_ns)
    return [int(path.suffix[1:]) for path in found]


def ended(folder: Path) -> list[str]:
    """The names of the programs that ended after SIGTERM, in order."""
    return (folder / "ended").read_text().split() if (folder / "ended").exists() else []


def run_up(data: Path, folder: Path) -> tuple[str, ...]:
    """The command of a ``gpuq up`` over ``data`` on a free port, with obedient programs as scheduler and agent."""
    return (sys.executable, "-P", str(Path(__file__)), str(data), str(folder))


def _main() -> None:
    import asyncio
    import os

    from gpukeeper.cli.configuration import Loaded
    from gpukeeper.cli.siteconfig import ServerSection, SiteConfig
    from gpukeeper.cli.up import up

    data, folder = Path(sys.argv[1]), Path(sys.argv[2])

    def say(sentence: str) -> None:
        print(sentence, file=sys.stderr, flush=True)

    def ready(url: str) -> None:
        (folder / "url").write_text(url)

    sys.exit(
        asyncio.run(
            up(
                Loaded(config=SiteConfig(server=ServerSection(port=0))),
                data,
                environ=os.environ,
                say=say,
                argv_for=lambda name: obedient(folder, name),
                on_ready=ready,
            )
        )
    )


if __name__ == "__main__":
    _main()
