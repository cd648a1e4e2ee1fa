"""``gpuq doctor`` says what is wrong, with words for what to do, and never hangs or crashes on it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from gpukeeper.agents.config import RuntimeConfig
from gpukeeper.capacity.device import Device
from gpukeeper.cli import doctor
from gpukeeper.cli.credentials import load_credentials, save_credentials
from gpukeeper.cli.datafolder import hold
from gpukeeper.cli.doctor import Check, run_checks
from gpukeeper.cli.natsbinary import find_server
from gpukeeper.cli.natsserver import NatsServer
from gpukeeper.cli.processes import BoundedLog
from gpukeeper.cli.siteconfig import NatsConfig, ServerSection, SiteConfig
from gpukeeper.events.connection import Connection

pytestmark = pytest.mark.processes

BINARY = find_server(None, os.environ)


class Finder:
    """Devices as a test has them."""

    def __init__(self, *devices: Device, problems: Sequence[str] = ()) -> None:
        self._devices = devices
        self._problems = list(problems)

    async def find(self) -> tuple[Device, ...]:
        return self._devices

    def problems(self) -> list[str]:
        return self._problems


async def no_problems(connection: Connection) -> list[str]:
    return []


@asynccontextmanager
async def server(data: Path) -> AsyncGenerator[NatsServer]:
    running = NatsServer(data, ServerSection(port=0), site="main", binary=BINARY)
    data.mkdir(exist_ok=True)
    await running.start(BoundedLog(data / "log"))
    try:
        yield running
    finally:
        await running.stop()


@asynccontextmanager
async def http(answer: bytes | None, *, then_hold: bool = False) -> AsyncGenerator[str]:
    """A server that gives every request ``answer``, or none at all; yields its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answer is not None:
            writer.write(answer)
            await writer.drain()
        if answer is None or then_hold:
            await reader.read()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


def status(code: int) -> bytes:
    return f"HTTP/1.1 {code} X\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}".encode()


async def look_at_runtime(url: str, provider: str = "ollama") -> Check:
    runtime = msgspec.convert({"name": "r", "provider": provider, "url": url}, RuntimeConfig)
    (check,) = await doctor.runtime_checks([runtime], find_runtimes=True)
    return check


async def test_a_healthy_machine_has_nothing_to_repair(tmp_path: Path) -> None:
    gpu = Device(id="GPU-1", kind="gpu", name="A card")
    async with server(tmp_path / "data"), http(status(200)) as url:
        (tmp_path / "gpuq.toml").write_text(f'[[runtimes]]\nname = "r"\nprovider = "ollama"\nurl = "{url}"\n')
        checks = await run_checks(
            None,
            tmp_path / "data",
            environ=os.environ,
            cwd=tmp_path,
            finder=lambda config: Finder(gpu),
            stream_problems=no_problems,
        )

    assert [check for check in checks if check.ok is False] == []
    assert {check.name for check in checks if check.ok} >= {
        *("python", "configuration", "nats-server", "data folder", "clock", "log", "streams", "devices", "runtime r")
    }


async def test_a_wrong_configuration_is_one_check_and_the_others_still_run(tmp_path: Path) -> None:
    (tmp_path / "gpuq.toml").write_text("[agents]\n[agent]\nfind_runtimes = false")
    checks = await run_checks(
        None,
        tmp_path / "data",
        environ=os.environ,
        cwd=tmp_path,
        finder=lambda config: Finder(),
        stream_problems=no_problems,
    )

    wrong = [check for check in checks if check.ok is False]
    assert [check.name for check in wrong] == ["configuration"]
    assert "agents = a table: unknown key; did you mean agent?" in wrong[0].detail
    assert all(check.fix for check in wrong)


def test_a_python_that_is_too_old_is_named() -> None:
    assert doctor.python_check((3, 10, 9)).ok is False
    assert doctor.python_check((3, 11, 0)).ok is True


def test_a_server_is_not_looked_for_where_somebody_elses_is_configured() -> None:
    config = SiteConfig(nats=NatsConfig(url="nats://10.0.0.5:4222"), server=ServerSection(binary="/nonexistent"))

    assert doctor.server_binary_check(config, {}).ok is None
    assert doctor.server_binary_check(msgspec.structs.replace(config, nats=NatsConfig()), {}).ok is False


def test_a_data_folder_that_others_can_read_is_named_with_the_repair(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "site.json").touch()
    (tmp_path / "site.json").chmod(0o640)

    check = doctor.data_folder_check(tmp_path)

    assert (check.ok, check.fix) == (False, f"chmod go= '{tmp_path}/site.json'")


def test_the_data_folder_tells_who_holds_it_and_not_who_died_holding_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with hold(tmp_path, command="gpuq up"):
        held = doctor.data_folder_check(tmp_path).detail
        content = (tmp_path / "up.lock").read_bytes()
    (tmp_path / "up.lock").write_bytes(content.replace(str(os.getpid()).encode(), b"4194304"))
    died = doctor.data_folder_check(tmp_path).detail

    assert f"held by gpuq up, process {os.getpid()} on " in held
    assert "held by nobody" in died
    assert doctor.data_folder_check(tmp_path / "missing").ok is None


def test_a_clock_that_was_never_set_is_named() -> None:
    assert doctor.clock_check(datetime(1970, 1, 1, tzinfo=UTC)).ok is False
    assert doctor.clock_check(datetime.now(UTC)).ok is True


async def test_a_log_nobody_started_is_not_a_fault_and_one_that_is_down_is(tmp_path: Path) -> None:
    (never,) = await doctor.nats_checks(SiteConfig(), tmp_path, no_problems)
    async with server(tmp_path):
        pass
    (down,) = await doctor.nats_checks(SiteConfig(), tmp_path, no_problems)

    assert (never.ok, down.ok) == (None, False)
    assert down.fix == "start `gpuq up`"


async def test_a_login_that_is_refused_is_named(tmp_path: Path) -> None:
    async with server(tmp_path):
        right = load_credentials(tmp_path)
        save_credentials(tmp_path, msgspec.structs.replace(right, password="wrong"))
        (check,) = await doctor.nats_checks(SiteConfig(), tmp_path, no_problems)

    assert check.ok is False
    assert "Authorization Violation" in check.detail
    assert right.password not in check.detail


async def test_a_login_that_may_not_use_jetstream_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "STREAMS_ANSWER_S", 0.3)
    async with server(tmp_path):
        right = load_credentials(tmp_path)
        producer = right.producer
        save_credentials(tmp_path, msgspec.structs.replace(right, user=producer.user, password=producer.password))
        (check,) = await doctor.nats_checks(SiteConfig(), tmp_path, no_problems)

    assert check.ok is False
    assert "answers, JetStream does not: " in check.detail


async def test_each_problem_with_the_streams_is_a_check(tmp_path: Path) -> None:
    async def two(connection: Connection) -> list[str]:
        return ["stream A: x", "stream B: y"]

    async with server(tmp_path):
        checks = await doctor.nats_checks(SiteConfig(), tmp_path, two)

    assert [(check.name, check.ok, check.detail) for check in checks][1:3] == [
        ("streams", False, "stream A: x"),
        ("streams", False, "stream B: y"),
    ]


async def test_the_clock_of_the_log_is_compared_once_there_is_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def make(connection: Connection) -> list[str]:
        await connection.js.add_stream(name="GPUQ_LOG", subjects=["gpuq.submit.*"])
        return []

    async with server(tmp_path):
        before = (await doctor.nats_checks(SiteConfig(), tmp_path, no_problems))[-1]
        after = (await doctor.nats_checks(SiteConfig(), tmp_path, make))[-1]
        monkeypatch.setattr(doctor, "datetime", _Yesterday)
        apart = (await doctor.nats_checks(SiteConfig(), tmp_path, no_problems))[-1]

    assert [check.name for check in (before, after, apart)] == ["clock of the log"] * 3
    assert (before.ok, after.ok, apart.ok) == (None, True, False)
    assert "86400" in apart.detail or "86399" in apart.detail


class _Yesterday(datetime):
    @classmethod
    def now(cls, tz: object = None) -> datetime:
        return datetime.fromtimestamp(datetime.now(UTC).timestamp() - 86_400, UTC)


async def test_a_machine_without_a_device_is_not_faulty_and_one_with_a_broken_driver_is() -> None:
    (none,) = await doctor.device_checks(Finder(), expected=False)
    (no_driver,) = await doctor.device_checks(Finder(problems=["no driver"]), expected=False)
    (broken,) = await doctor.device_checks(Finder(problems=["the driver does not answer"]), expected=True)
    parent = Device(id="GPU-1", kind="gpu", name="A", unschedulable="it is cut into slices")
    (useless,) = await doctor.device_checks(
        Finder(parent, problems=["GPU-1 (A): it is cut into slices"]), expected=False
    )
    good, bad = await doctor.device_checks(
        Finder(Device(id="GPU-2", kind="gpu", name="B"), parent, problems=["x"]), expected=False
    )

    assert (none.ok, no_driver.ok, broken.ok, useless.ok) == (None, None, False, False)
    assert (good.ok, bad.ok) == (True, False)
    assert (broken.detail, good.detail) == ("the driver does not answer", "B (GPU-2)")


async def test_a_gpu_that_is_only_declared_needs_no_driver() -> None:
    declared = Device(id="gpu0", kind="gpu", name="declared")
    good, no_driver = await doctor.device_checks(
        Finder(declared, problems=["no driver"]), expected=False, named=["gpu0"], declared=["gpu0"]
    )

    assert (good.ok, no_driver.ok) == (True, None)


async def test_a_device_that_a_runtime_names_and_that_is_not_there_is_a_fault() -> None:
    good, bad = await doctor.device_checks(
        Finder(Device(id="cpu", kind="cpu", name="host memory"), problems=["runtime a may use gpu9"]),
        expected=False,
        named=["cpu", "gpu9"],
    )

    assert (good.ok, bad.ok) == (True, False)


@pytest.mark.parametrize(
    ("vendor", "device_class", "found"),
    [
        *(("0x10de", "0x030000", True), ("0x10de", "0x030200", True)),
        *(("0x10de", "0x040300", False), ("0x8086", "0x030000", False), (None, "0x030000", False)),
    ],
)
def test_an_nvidia_card_is_seen_without_its_driver(
    tmp_path: Path, vendor: str | None, device_class: str, found: bool
) -> None:
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "class").write_text(device_class + "\n")
    if vendor is not None:
        (tmp_path / "0000:01:00.0" / "vendor").write_text(vendor + "\n")

    assert doctor.has_nvidia_hardware(tmp_path) is found
    assert doctor.has_nvidia_hardware(tmp_path / "missing") is False


async def test_a_driver_that_hangs_is_a_check_and_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hangs(Finder):
        async def find(self) -> tuple[Device, ...]:
            await asyncio.Event().wait()
            return ()

    monkeypatch.setattr(doctor, "DEVICES_ANSWER_S", 0.01)
    (check,) = await doctor.device_checks(Hangs(), expected=True)

    assert (check.ok, check.detail) == (False, "the driver did not answer within 0.01 s")


@pytest.mark.parametrize(
    ("provider", "code", "ok"),
    [
        *(("ollama", 200, True), ("ollama", 503, False), ("ollama", 404, False)),
        *(("llamacpp", 200, True), ("llamacpp", 503, None), ("llamacpp", 500, False)),
    ],
)
async def test_a_runtime_is_judged_by_its_answer(provider: str, code: int, ok: bool | None) -> None:
    async with http(status(code)) as url:
        check = await look_at_runtime(url + "/", provider)

    assert check.ok is ok
    assert f"{url}/" in check.detail


async def test_a_runtime_that_is_not_there_is_named_with_the_repair() -> None:
    async with http(status(200)) as url:
        pass
    check = await look_at_runtime(url)

    assert (check.name, check.ok) == ("runtime r", False)
    assert check.detail == f"{url}/api/version: {url} cannot be reached: Connection refused"
    assert check.fix == "start it, or correct url or provider of the runtime r"


async def test_a_runtime_that_does_not_answer_is_a_check_and_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "RUNTIME_ANSWER_S", 0.05)
    async with http(None) as url:
        check = await look_at_runtime(url)

    assert (check.ok, check.detail) == (False, f"{url}/api/version: no answer within 0.05 s")


async def test_a_runtime_that_answers_a_byte_at_a_time_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "RUNTIME_ANSWER_S", 0.05)
    async with http(b"HTTP/1.1 200 OK\r\nX-Slow: ", then_hold=True) as url:
        check = await look_at_runtime(url)

    assert (check.ok, check.detail) == (False, f"{url}/api/version: no answer within 0.05 s")


@pytest.mark.parametrize("url", ["127.0.0.1:11434", "ftp://host", "http://host:notaport"])
async def test_a_url_that_is_none_is_a_check(url: str) -> None:
    check = await look_at_runtime(url)

    assert (check.ok, check.fix) == (False, "start it, or correct url or provider of the runtime r")


async def test_what_is_no_http_at_all_is_a_check() -> None:
    async with http(b"SSH-2.0-OpenSSH\r\n") as url:
        assert (await look_at_runtime(url)).ok is False


async def test_without_a_declared_runtime_a_missing_ollama_is_not_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    async with http(status(200)) as url:
        monkeypatch.setattr(doctor, "_OLLAMA_URL", url)
        (there,) = await doctor.runtime_checks([], find_runtimes=True)
    (gone,) = await doctor.runtime_checks([], find_runtimes=True)
    (none,) = await doctor.runtime_checks([], find_runtimes=False)

    assert (there.ok, gone.ok, none.ok) == (True, None, None)


def test_the_demo_is_optional() -> None:
    missing = doctor.demo_check("no_such_module")

    assert (missing.ok, missing.fix) == (None, "pip install 'gpukeeper[demo]'")
    assert doctor.demo_check("json").ok is True
