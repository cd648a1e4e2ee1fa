"""A real site for tests of the command line: NATS, scheduler and agent as `gpuq up` runs them, and two runtimes.

``llama`` is a real llama.cpp server with the tiny model. ``fake`` is a scripted one, in a thread of the test process,
which can be told to hold its answers or to say again what it is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import nats
import structlog

from gpukeeper.cli.credentials import Login, load_credentials
from gpukeeper.cli.demo.tiny_model import write_tiny_model
from gpukeeper.cli.main import main
from support.fake_http import Exchange
from support.llamacpp_fake import FakeLlamaCpp
from support.wait import until_found

HOST = "box"
REAL = "tiny"
FAKE = "fake"
FAKE_DEVICE_MB = 1000

_CONFIG = """\
[host]
name = "{host}"
[server]
port = 0
[agent]
find_devices = false
find_runtimes = false
heartbeat_s = 1
stop_grace_s = 1
[scheduler]
claim_ttl_s = 6
[[devices]]
id = "cpu"
source = "cpu"
[[devices]]
id = "slow"
source = "static"
kind = "cpu"
total_mb = {fake_mb}
[[runtimes]]
name = "llama"
provider = "llamacpp"
url = "http://127.0.0.1:{llama_port}"
devices = ["cpu"]
[[runtimes]]
name = "fake"
provider = "llamacpp"
url = "{fake_url}"
devices = ["slow"]
"""


class Ran(NamedTuple):
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.out)

    @property
    def documents(self) -> list[Any]:
        """The JSON documents on stdout, one a line."""
        return [json.loads(line) for line in self.out.split("\n") if line]


def run_gpuq(*arguments: str, stdin: bytes = b"") -> Ran:
    """Run one command in this process. Not for use inside a running event loop."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="", write_through=True) for _ in range(2))
    before = sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
    finally:
        sys.stdin = before
        structlog.reset_defaults()
    return Ran(code, *(_content(stream) for stream in (out, err)))


def _content(stream: io.TextIOWrapper) -> str:
    buffer = stream.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode()


def environment() -> dict[str, str]:
    """What a gpuq process of its own is given."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GPUQ_")}
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def start(
    *arguments: str,
    stdout: IO[bytes] | int = subprocess.PIPE,
    stderr: int = subprocess.STDOUT,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a gpuq process of its own; ``env`` is added to its environment. End it with :func:`stop`."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "gpukeeper.cli.main", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env={**environment(), **(env or {})},
    )


class ControlledLlama(FakeLlamaCpp):
    """A scripted llama.cpp server that may say again what it is asked."""

    def __init__(self) -> None:
        super().__init__(model=FAKE)
        self.repeats = False
        self.usual = self.words

    def answer(self, exchange: Exchange) -> Coroutine[Any, Any, None] | None:
        if exchange.path == "/completion":
            self.words = (exchange.json()["prompt"],) if self.repeats else self.usual
            self._ready.clear()
        return super().answer(exchange)


class ThreadedLlama:
    """A :class:`ControlledLlama` that runs in a thread of its own, and is told what to do from here."""

    def __init__(self) -> None:
        self.fake = ControlledLlama()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._listening = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="fake llama")

    @property
    def url(self) -> str:
        return self.fake.url

    def start(self) -> None:
        self._thread.start()
        assert self._listening.wait(30)

    def stop(self) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)

    @contextmanager
    def holding(self) -> Generator[None]:
        """Every completion stops after its first token until the end of this."""
        self._call(lambda: setattr(self.fake, "hold", asyncio.Event()))
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        """Let held completions go on, and hold no more."""

        def let_go() -> None:
            held, self.fake.hold = self.fake.hold, None
            if held is not None:
                held.set()

        self._call(let_go)

    @contextmanager
    def busy(self) -> Generator[None]:
        """The server says that it works, whatever it does."""
        self._call(lambda: setattr(self.fake, "in_flight", self.fake.in_flight + 1))
        try:
            yield
        finally:
            self._call(lambda: setattr(self.fake, "in_flight", self.fake.in_flight - 1))

    @contextmanager
    def repeating(self) -> Generator[None]:
        """Completions say again what they are asked until the end of this."""
        self.fake.repeats = True
        try:
            yield
        finally:
            self.fake.repeats = False

    def until_asked(self, prompt: str) -> dict[str, Any]:
        """Wait until a completion with this prompt was asked for; return what was asked."""

        def look() -> dict[str, Any] | None:
            return next((body for path, body in self.fake.bodies if body.get("prompt") == prompt and path), None)

        return until_found(look, f"the fake is asked {prompt!r}")

    def _call(self, do: Callable[[], object]) -> None:
        assert self._loop is not None
        done = threading.Event()

        def both() -> None:
            do()
            done.set()

        self._loop.call_soon_threadsafe(both)
        assert done.wait(30)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        async with self.fake:
            self._listening.set()
            await self._stop.wait()


class CliSite:
    """The running site. :meth:`gpuq` runs a command against it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.config = folder / "gpuq.toml"
        self.llama = ThreadedLlama()
        self.up: subprocess.Popen[bytes] | None = None
        self._real: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.llama.start()
        port = self._start_real()
        self.config.write_text(
            _CONFIG.format(host=HOST, fake_mb=FAKE_DEVICE_MB, llama_port=port, fake_url=self.llama.url)
        )
        with (self.folder / "up.out").open("wb") as out:
            self.up = self.popen("up", stdout=out)
        until_found(self._is_live, f"the site in {self.folder} is up")

    def stop(self) -> None:
        for process in (self.up, self._real):
            if process is not None:
                stop(process)
        self.llama.stop()

    def where(self) -> tuple[str, ...]:
        """The options that name this site."""
        return ("--config", str(self.config), "--data", str(self.data))

    def gpuq(self, *arguments: str, stdin: bytes = b"") -> Ran:
        """Run one command against this site, in this process."""
        return run_gpuq(*self.where(), *arguments, stdin=stdin)

    def popen(
        self, *arguments: str, stdout: IO[bytes] | int = subprocess.PIPE, stderr: int = subprocess.STDOUT
    ) -> subprocess.Popen[bytes]:
        """Start one command against this site as a process of its own."""
        return start(*self.where(), *arguments, stdout=stdout, stderr=stderr)

    def publish(self, body: bytes, *, producer: str = "raw", headers: Mapping[str, str] | None = None) -> int:
        """Publish as a program without our library does, with the producer's login; return the sequence."""
        site = load_credentials(self.data)
        return asyncio.run(_publish(site.url or "", site.producer, producer, body, dict(headers or {})))

    def job_of(self, seq: int) -> dict[str, Any]:
        """The answer to the submission at ``seq``, as its CloudEvent."""

        def look() -> dict[str, Any] | None:
            found = self.gpuq("events", "--since", str(seq), "--type", "job.*", "--json").documents
            return next((each for each in found if each["data"].get("submission_seq") == seq), None)

        return until_found(look, f"submission {seq} is answered")

    def submit(self, *arguments: str) -> str:
        """Submit; return the id."""
        ran = self.gpuq("submit", "--quiet", *arguments)
        assert ran.code == 0, ran.err
        return ran.out.strip()

    def until_phase(self, job_id: str, phase: str) -> dict[str, Any]:
        """Wait until the job is in ``phase``; return its status."""

        def look() -> dict[str, Any] | None:
            found = self.gpuq("status", job_id, "--json").document
            return found if found.get("phase") == phase else None

        return until_found(look, f"{job_id} is {phase}")

    def _is_live(self) -> bool:
        assert self.up is not None
        assert self.up.poll() is None, (self.folder / "up.out").read_text()
        ran = self.gpuq("devices", "--json")
        hosts: list[Any] = ran.document["hosts"] if ran.code == 0 else []
        return any(host["agent"] == "live" and all(each["healthy"] for each in host["runtimes"]) for host in hosts)

    def _start_real(self) -> int:
        model = write_tiny_model(self.folder / f"{REAL}.gguf", name=REAL)
        port_file = self.folder / "port"
        log = (self.folder / "llama.log").open("wb")
        self._real = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "gpukeeper.cli.demo.llama_server", "--model", str(model)),
                *("--port-file", str(port_file), "--parent", str(os.getpid())),
            ],
            stdout=log,
            stderr=log,
            env=environment(),
        )
        log.close()
        until_found(port_file.exists, "the llama.cpp server listens")
        return int(port_file.read_text())


async def _publish(url: str, login: Login, producer: str, body: bytes, headers: dict[str, str]) -> int:
    client = await nats.connect(url, user=login.user, password=login.password, inbox_prefix=login.inbox_prefix)
    try:
        answer = await client.request(f"gpuq.submit.{producer}", body, timeout=10, headers=headers or None)
        return json.loads(answer.data)["seq"]
    finally:
        await client.close()


def stop(process: subprocess.Popen[bytes]) -> int:
    """End a process in order, or at once where it does not; return its status."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    return process.wait(30)


def read_until(process: subprocess.Popen[bytes], wanted: str, *, within_s: float = 30.0) -> list[str]:
    """Lines of a process's stdout up to the first that holds ``wanted``."""
    assert process.stdout is not None
    lines: list[str] = []
    give_up_at = time.monotonic() + within_s
    watchdog = threading.Timer(within_s, process.kill)
    watchdog.start()
    try:
        while time.monotonic() < give_up_at:
            line = process.stdout.readline().decode()
            if not line:
                break
            lines.append(line.rstrip("\n"))
            if wanted in line:
                return lines
    finally:
        watchdog.cancel()
    raise AssertionError(f"no {wanted!r} in what it said:\n" + "\n".join(lines))
