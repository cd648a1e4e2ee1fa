"""A whole site in a temporary folder: a real llama.cpp server, and `gpuq up` over it."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from gpukeeper.cli.arrival import until_joined, until_log
from gpukeeper.cli.credentials import NoCredentials, load_credentials
from gpukeeper.cli.datafolder import read_holder
from gpukeeper.cli.livesite import LiveSite
from gpukeeper.cli.options import Where
from gpukeeper.cli.processes import BoundedLog, Child, command_line
from gpukeeper.cli.session import Session, open_session
from gpukeeper.events.errors import GpukeeperError

HOST = "demo"
DEVICE = "cpu"
RUNTIME = "llama"
MODEL = "tiny"
#: What the demonstration's device may use, in MB: more than the tiny model needs, on any machine.
DEVICE_MB = 512
_START_S = 30.0
_STOP_S = 20.0
_LOOK_AGAIN_S = 0.02
#: Some milliseconds for each token: with fewer the text is there before anybody can watch it come.
_LAYERS = 40

_CONFIG = """\
[site]
name = "demo"
[host]
name = "{host}"
[server]
port = 0                        # the system chooses
[agent]
find_devices = false
find_runtimes = false
heartbeat_s = 1
stop_grace_s = 1
[scheduler]
claim_ttl_s = 10
[[devices]]
id = "{device}"
source = "cpu"
total_mb = {device_mb}
[[runtimes]]
name = "{runtime}"
provider = "llamacpp"
url = "http://127.0.0.1:{port}"
devices = ["{device}"]
"""


class DemoFailed(GpukeeperError):
    """The demonstration's site did not come up."""

    code = "demo_failed"


class DemoSite:
    """Everything that the demonstration starts. :meth:`stop` ends and removes it all, whatever has happened."""

    def __init__(self) -> None:
        # The system's folder for such things is private to us: mode 0700.
        self.folder = Path(tempfile.mkdtemp(prefix="gpuq-demo-"))
        #: This process's own GPUQ_* variables are about another site.
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith("GPUQ_")}
        self.where = Where(config=self.folder / "gpuq.toml", data=self.folder / "data")
        self._children: list[Child] = []
        self._pids: set[int] = set()

    async def start(self) -> None:
        """Start the model's server and then `gpuq up`; returns when NATS is ready.

        Raises:
            DemoFailed: one of them did not come up in time; with its last lines.
        """
        port = await self._start_llama()
        config = _CONFIG.format(host=HOST, device=DEVICE, device_mb=DEVICE_MB, runtime=RUNTIME, port=port)
        assert self.where.config is not None
        self.where.config.write_text(config)
        child = await self._start_child("up", *self.gpuq("up", "--quiet"))
        await self._until(child, "`gpuq up`", self._has_url)

    def gpuq(self, *arguments: str) -> tuple[str, ...]:
        """The command line of a gpuq command that talks to this site."""
        own = ("--config", str(self.where.config), "--data", str(self.where.data))
        return (sys.executable, "-P", "-m", "gpukeeper.cli.main", *own, *arguments)

    def session(self) -> AbstractAsyncContextManager[Session]:
        """A connection to the site, as the one who may do everything."""
        return open_session(self.where, environ=self.environ)

    async def until_joined(self, session: Session, live: LiveSite) -> None:
        """Start ``live`` once there is a log, and wait until the agent has joined.

        Raises:
            DemoFailed: it did not in time; with the last lines of `gpuq up`.
        """
        up = self._children[-1]
        try:
            async with asyncio.timeout(_START_S):
                await until_log(session)
                await live.start()
                await until_joined(session, live, HOST)
        except TimeoutError:
            raise _failed("the agent", up, f"did not join within {_START_S:g} s") from None
        self._pids |= _parts_of(self.folder / "data")

    async def stop(self) -> list[str]:
        """Stop everything, the last first, and remove the folder. Returns what is left behind, in words: nothing."""
        try:
            for child in reversed(self._children):
                await child.stop(_STOP_S)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
        left = [f"process {pid}: {line}" for pid in sorted(self._pids) if (line := command_line(pid)) is not None]
        return left + ([f"folder {self.folder}"] if self.folder.exists() else [])

    async def _start_llama(self) -> int:
        from gpukeeper.cli.demo.tiny_model import write_tiny_model

        model = await asyncio.to_thread(write_tiny_model, self.folder / f"{MODEL}.gguf", name=MODEL, layers=_LAYERS)
        port_file = self.folder / "llama.port"
        child = await self._start_child(
            "llama",
            *(sys.executable, "-P", "-m", "gpukeeper.cli.demo.llama_server"),
            *("--model", str(model), "--alias", MODEL, "--port-file", str(port_file)),
        )
        await self._until(child, "the llama.cpp server", port_file.exists)
        return int(port_file.read_text())

    async def _start_child(self, name: str, *argv: str) -> Child:
        child = await Child.start(argv, log=BoundedLog(self.folder / f"{name}.log"), env=self.environ)
        self._children.append(child)
        self._pids.add(child.pid)
        return child

    async def _until(self, child: Child, what: str, look: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(_START_S):
                while not look():
                    if child.ended:
                        raise _failed(what, child, f"ended with status {await child.wait()}")
                    await asyncio.sleep(_LOOK_AGAIN_S)
        except TimeoutError:
            raise _failed(what, child, f"was not ready within {_START_S:g} s") from None

    def _has_url(self) -> bool:
        assert self.where.data is not None
        try:
            return load_credentials(self.where.data).url is not None
        except NoCredentials:
            return False


def _failed(what: str, child: Child, how: str) -> DemoFailed:
    said = " | ".join(child.log.tail()[-5:]) or "nothing"
    return DemoFailed(f"{what} {how}; it said: {said}")


def _parts_of(data: Path) -> set[int]:
    """The processes that `gpuq up` over ``data`` has started."""
    holder = read_holder(data)
    if holder is None:
        return set()
    children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
    found = {int(pid) for pid in children.read_text().split()} if children.exists() else set[int]()
    return found | {holder.pid}
