"""Real processes to measure: a NATS server, a runtime that does nothing, a scheduler and an agent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from gpukeeper.cli.natsbinary import find_server
from gpukeeper.events.connection import Connection, NatsSettings, connect
from gpukeeper.events.streams import ensure_site

TESTS = Path(__file__).parent.parent / "tests"
_START_S = 15.0


async def until_file(path: Path) -> str:
    """The text of ``path`` once another process wrote it."""
    async with asyncio.timeout(_START_S):
        while not path.exists() or not path.read_text().strip():
            await asyncio.sleep(0.02)
    return path.read_text().strip()


@contextmanager
def process(argv: Sequence[str], *, env: dict[str, str] | None = None, log: Path | None = None) -> Generator[int]:
    """Run a program for the length of the block; yields its pid."""
    with open(log, "ab") if log else open(os.devnull, "wb") as out:
        child = subprocess.Popen(argv, env={**os.environ, **(env or {})}, stdout=out, stderr=out)
        try:
            yield child.pid
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


class BenchServer:
    """A NATS server with durable writes on a port of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = ""

    @contextmanager
    def running(self) -> Generator[int]:
        config = self.folder / "nats.conf"
        config.write_text(
            'listen: "127.0.0.1:-1"\n'
            f'ports_file_dir: "{self.folder}"\n'
            f'jetstream {{ store_dir: "{self.folder / "store"}", sync_interval: always }}\n'
        )
        binary = find_server(None, os.environ).path
        with process([str(binary), "-c", str(config)], log=self.folder / "nats.log") as pid:
            yield pid

    async def connect(self, pid: int, name: str = "bench") -> Connection:
        if not self.url:
            text = await until_file(self.folder / f"nats-server_{pid}.ports")
            start = text.index("nats://")
            self.url = text[start : text.index('"', start)]
        return await connect(NatsSettings(servers=(self.url,)), name=name)


@contextmanager
def runtime(folder: Path) -> Generator[Path]:
    """The runtime that answers at once; yields the file that will hold its port."""
    port_file = folder / "runtime.port"
    argv = [sys.executable, "-m", "support.llamacpp_fake", "--port-file", str(port_file)]
    with process(argv, env={"PYTHONPATH": str(TESTS), "PYTHONSAFEPATH": "1"}, log=folder / "runtime.log"):
        yield port_file


def write_config(folder: Path, *, nats_url: str, runtime_port: str, slots: int) -> Path:
    """A host with ``slots`` devices of one slot each, as GPUs are."""
    lines = ['[host]\nname = "bench"', f'[nats]\nurl = "{nats_url}"', "[agent]\nfind_devices = false"]
    device = '[[devices]]\nid = "d{}"\nsource = "static"\nkind = "cpu"\ntotal_mb = 1000'
    lines.extend(device.format(place) for place in range(slots))
    lines.append(f'[[runtimes]]\nname = "noop"\nprovider = "llamacpp"\nurl = "http://127.0.0.1:{runtime_port}"')
    path = folder / "gpuq.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


@contextmanager
def part(name: str, folder: Path, config: Path) -> Generator[int]:
    """The scheduler or the agent."""
    env = {"GPUQ_CONFIG": str(config), "GPUQ_DATA": str(folder / "data"), "PYTHONSAFEPATH": "1"}
    with process([sys.executable, "-m", "gpukeeper.cli.workers", name], env=env, log=folder / f"{name}.log") as pid:
        yield pid


async def prepare(connection: Connection) -> None:
    await ensure_site(connection)


@contextmanager
def whole_site(folder: Path, *, runtime_port: str) -> Generator[int]:
    """`gpuq up` with one device and one runtime, as on one machine; yields the supervisor's pid."""
    config = folder / "up.toml"
    config.write_text(
        '[host]\nname = "bench"\n[agent]\nfind_devices = false\n[server]\nport = 0\n'
        '[[devices]]\nid = "cpu"\nsource = "cpu"\n'
        f'[[runtimes]]\nname = "noop"\nprovider = "llamacpp"\nurl = "http://127.0.0.1:{runtime_port}"\n'
    )
    env = {"GPUQ_CONFIG": str(config), "GPUQ_DATA": str(folder / "up"), "PYTHONSAFEPATH": "1"}
    with process([sys.executable, "-m", "gpukeeper.cli.main", "up"], env=env, log=folder / "up.log") as pid:
        yield pid


def children_of(pid: int) -> dict[int, str]:
    """The processes that ``pid`` started, with the last word of their command lines."""
    found: dict[int, str] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            text = stat.read_text()
            if int(text.rsplit(")", 1)[1].split()[1]) == pid:
                words = (stat.parent / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                found[int(stat.parent.name)] = words[0 if b"nats-server" in words[0] else -1].decode()
    return found


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    """Memory that a process holds, in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0
