"""A real Docker engine for tests, on data and a socket of its own, with one small image.

The fixture ``docker_engine`` is for test modules that say ``pytest_plugins = ["support.dockerd"]``. The image holds
busybox and ``/bin/katago``, a script that speaks the protocol of KataGo's analysis engine.
"""

from __future__ import annotations

import io
import os
import shutil
import socket
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
from docker.errors import NotFound

from support.require import skip_or_fail
from support.wait import until_found

IMAGE = "gpukeeper-test:1"
NETWORK = 1024 * 1024
_BUSYBOX = ("/bin/busybox", "/usr/bin/busybox")
_KATAGO = Path(__file__).parent / "katago.sh"
#: The programs that stand in the image under names of their own.
_APPLETS = ("sh", "sleep", "cat", "grep", "httpd", "false", "true", "sed", "kill")


class DockerDaemon:
    """One dockerd process. Containers use the host's network, as the engine has no bridge."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"unix://{folder}/s"
        self._process: subprocess.Popen[bytes] | None = None
        self._client: Any = None
        self._made: list[str] = []

    @property
    def socket(self) -> Path:
        return self.folder / "s"

    def start(self) -> None:
        """Start it and make the image.

        Raises:
            AssertionError: it does not come up; has its log.
        """
        arguments = ["--iptables=false", "--ip6tables=false", "--bridge=none", "--storage-driver=vfs"]
        arguments += [f"--data-root={self.folder}/data", f"--exec-root={self.folder}/exec"]
        arguments += [f"--pidfile={self.folder}/pid", f"--host={self.url}"]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                ["dockerd", *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        until_found(self._takes_connections, f"dockerd takes connections; its log:\n{self.log}")
        self._client = docker.APIClient(self.url, version="auto", timeout=60)
        self._client.import_image_from_data(image_tar(), repository="gpukeeper-test", tag="1")

    def stop(self) -> None:
        for name in self._made:
            self.remove(name)
        if self._client is not None:
            self._client.close()
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=30)
        subprocess.run(["umount", "-l", f"{self.folder}/exec/netns/default"], capture_output=True, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-4000:]

    @property
    def client(self) -> Any:
        """The engine, asked directly: what a test compares with."""
        return self._client

    def make(
        self, name: str, *command: str, restart: str | None = None, start: bool = True, **fields: Any
    ) -> dict[str, Any]:
        """Make a container, and start it. It is removed at the end of the run."""
        policy = None if restart is None else {"Name": restart, "MaximumRetryCount": 0}
        host = self._client.create_host_config(network_mode="host", restart_policy=policy)
        # The first process of a container ignores SIGTERM unless it handles it: nothing here waits for that.
        fields = {"stop_signal": "SIGKILL", **fields}
        made = self._client.create_container(IMAGE, list(command), name=name, host_config=host, **fields)
        self._made.append(name)
        if start:
            self._client.start(name)
        return made

    def remove(self, name: str) -> None:
        try:
            self._client.remove_container(name, force=True)
        except NotFound:
            return

    def status(self, name: str) -> str:
        return self._client.inspect_container(name)["State"]["Status"]

    def processes(self, name: str, word: str) -> list[str]:
        """The commands of the container's processes that contain ``word``."""
        rows = self._client.top(name, "-eo pid,args")["Processes"]
        return [row[1] for row in rows if word in row[1]]

    def _takes_connections(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(f"dockerd ended with {self._process.returncode}; its log:\n{self.log}")
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.socket))
            except OSError:
                return False
        return True


def image_tar() -> bytes:
    """The file system of the image."""
    busybox = Path(next(path for path in _BUSYBOX if Path(path).exists()))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:

        def add(path: str, content: bytes, mode: int) -> None:
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(content), mode
            tar.addfile(entry, io.BytesIO(content))

        for folder in ("bin", "proc", "app", "tmp"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o777
            tar.addfile(entry)
        add("bin/busybox", busybox.read_bytes(), 0o755)
        add("bin/katago", _KATAGO.read_bytes(), 0o755)
        add("app/model.bin.gz", bytes(NETWORK), 0o644)
        add("app/analysis.cfg", b"", 0o644)
        for applet in _APPLETS:
            entry = tarfile.TarInfo(f"bin/{applet}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(entry)
    return buffer.getvalue()


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[DockerDaemon]:
    """A running engine; the test is skipped (in CI: fails) where none can be started."""
    if shutil.which("dockerd") is None:
        skip_or_fail("no dockerd: install docker.io")
    if not any(Path(path).exists() for path in _BUSYBOX):
        skip_or_fail("no busybox: install busybox-static")
    if os.geteuid() != 0:
        skip_or_fail("dockerd needs root")
    # A socket's path may have about a hundred characters: pytest's own folders are too deep.
    daemon = DockerDaemon(Path(tempfile.mkdtemp(prefix="gpuq-docker-")))
    try:
        try:
            daemon.start()
        except AssertionError as error:
            skip_or_fail(f"dockerd does not start here: {error}")
        yield daemon
    finally:
        daemon.stop()
