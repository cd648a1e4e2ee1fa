"""``gpuq up``: parts are started in order, kept running, stopped in reverse, and never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpukeeper.cli.configuration import Loaded
from gpukeeper.cli.credentials import load_credentials
from gpukeeper.cli.exitcodes import Exit
from gpukeeper.cli.processes import Child
from gpukeeper.cli.restarts import RestartPolicy
from gpukeeper.cli.siteconfig import NatsConfig, SiteConfig
from gpukeeper.cli.supervisor import Part, Supervisor
from gpukeeper.cli.up import up
from gpukeeper.events.errors import GpukeeperError, LogUnavailable
from support.programs import ended, obedient, pids, run_up, stubborn
from support.waiting import is_running, until

pytestmark = pytest.mark.processes

FAST = RestartPolicy(first_s=0.001, longest_s=0.001, deaths_max=2)


class Whole:
    """A supervisor over programs in one folder, run by the test itself."""

    def __init__(self, folder: Path, *parts: Part, verbose: bool = False) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.ready = asyncio.Event()
        self.supervisor = Supervisor(
            parts,
            log_folder=folder,
            environ=os.environ,
            say=self.said.append,
            verbose=verbose,
            restarts=FAST,
            on_ready=self.ready.set,
        )
        self.run = asyncio.create_task(self.supervisor.run())

    async def result(self) -> int:
        return await asyncio.wait_for(self.run, 30)

    async def up(self, *names: str) -> list[int]:
        """The latest process of each of ``names``, once each is up."""
        return [(await until(lambda name=name: pids(self.folder, name), f"{name} is up"))[-1] for name in names]


Start = Callable[..., Whole]


@pytest.fixture
async def start() -> AsyncGenerator[Start]:
    """Starts a :class:`Whole`; whatever a failed test left running is stopped at once."""
    started: list[Whole] = []

    def begin(folder: Path, *parts: Part, verbose: bool = False) -> Whole:
        started.append(Whole(folder, *parts, verbose=verbose))
        return started[-1]

    yield begin
    for whole in started:
        whole.supervisor.stop(at_once=True)
        await asyncio.wait({whole.run}, timeout=30)


def part(folder: Path, name: str, **settings: object) -> Part:
    return Part(name=name, argv=obedient(folder, name), **settings)  # pyright: ignore[reportArgumentType]


async def test_parts_are_stopped_in_the_reverse_order_of_their_start(tmp_path: Path, start: Start) -> None:
    whole = start(tmp_path, *(part(tmp_path, name) for name in ("nats", "scheduler", "agent")))
    running = await whole.up("nats", "scheduler", "agent")
    whole.supervisor.stop()

    assert await whole.result() == 0
    assert ended(tmp_path) == ["agent", "scheduler", "nats"]
    assert not any(map(is_running, running))


async def test_a_part_starts_only_when_the_one_before_it_is_ready(tmp_path: Path, start: Start) -> None:
    gate = asyncio.Event()

    async def ready(child: Child) -> None:
        await gate.wait()

    whole = start(tmp_path, part(tmp_path, "nats", ready=ready), part(tmp_path, "agent"))
    await whole.up("nats")
    before = pids(tmp_path, "agent")
    gate.set()
    await whole.up("agent")
    await asyncio.wait_for(whole.ready.wait(), 30)
    whole.supervisor.stop()

    assert before == []
    assert await whole.result() == 0


async def test_a_stop_while_a_part_is_not_ready_yet_does_not_wait_for_it(tmp_path: Path, start: Start) -> None:
    async def never(child: Child) -> None:
        await asyncio.Event().wait()

    whole = start(tmp_path, part(tmp_path, "nats", ready=never), part(tmp_path, "agent"))
    await whole.up("nats")
    whole.supervisor.stop()

    assert await whole.result() == 0
    assert (ended(tmp_path), pids(tmp_path, "agent")) == (["nats"], [])


async def test_a_part_that_is_killed_is_started_again(tmp_path: Path, start: Start) -> None:
    whole = start(tmp_path, part(tmp_path, "nats"), part(tmp_path, "agent"))
    _, agent = await whole.up("nats", "agent")
    os.kill(agent, signal.SIGKILL)
    await until(lambda: len(pids(tmp_path, "agent")) == 2, "the agent is up again")
    whole.supervisor.stop()

    assert await whole.result() == 0
    assert [line.partition(" ")[2] for line in whole.said] == [
        "agent: was killed by SIGKILL; starting it again in 0.001 s"
    ]
    assert "starting it again" in (tmp_path / "up.log").read_text()
    assert len(pids(tmp_path, "nats")) == 1


async def test_a_part_that_keeps_dying_ends_the_whole_with_its_last_lines(tmp_path: Path, start: Start) -> None:
    broken = Part(name="agent", argv=(sys.executable, "-I", "-c", "print('no GPU here'); raise SystemExit(3)"))
    whole = start(tmp_path, part(tmp_path, "nats"), broken)

    assert await whole.result() == Exit.MISCONFIGURED
    assert [line.partition(" ")[2] for line in whole.said] == [
        "agent: ended with status 3; starting it again in 0.001 s",
        "agent: ended with status 3; starting it again in 0.001 s",
        "agent: ended with status 3, 3 times in 60 s; its last lines:",
        *["  no GPU here"] * 3,
    ]
    # Whether it was up when the end came is a matter of time; left behind it must not be.
    assert not any(map(is_running, pids(tmp_path, "nats")))


class Hopeless(GpukeeperError):
    """Trying again will not help."""

    code = "server_failed"


class Hopeful(GpukeeperError):
    """Trying again may help."""

    retryable = True


async def test_a_part_that_can_never_be_ready_ends_the_whole_at_once(tmp_path: Path, start: Start) -> None:
    async def ready(child: Child) -> None:
        raise Hopeless("the store is damaged")

    whole = start(tmp_path, part(tmp_path, "nats", ready=ready), part(tmp_path, "agent"))

    assert await whole.result() == Exit.UNAVAILABLE
    assert next(line.partition(" ")[2] for line in whole.said) == "nats: the store is damaged"
    assert pids(tmp_path, "agent") == []


async def test_a_part_that_was_not_ready_is_stopped_and_tried_again(tmp_path: Path, start: Start) -> None:
    tried: list[int] = []

    async def ready(child: Child) -> None:
        tried.append(child.pid)
        if len(tried) == 1:
            raise Hopeful("not ready in time")

    whole = start(tmp_path, part(tmp_path, "nats", ready=ready))
    await asyncio.wait_for(whole.ready.wait(), 30)
    first, second = tried
    alive = [is_running(first), is_running(second)]
    whole.supervisor.stop()

    assert alive == [False, True]
    assert await whole.result() == 0


async def test_an_error_nobody_foresaw_stops_every_part_and_is_raised(tmp_path: Path, start: Start) -> None:
    async def ready(child: Child) -> None:
        raise ZeroDivisionError

    whole = start(tmp_path, part(tmp_path, "nats"), part(tmp_path, "agent", ready=ready))

    with pytest.raises(ZeroDivisionError):
        await whole.result()
    assert not any(map(is_running, pids(tmp_path, "nats") + pids(tmp_path, "agent")))


async def test_a_part_that_does_not_stop_is_killed_after_its_grace_and_named(tmp_path: Path, start: Start) -> None:
    slow = Part(name="agent", argv=stubborn(tmp_path, "agent"), stop_grace_s=0.05)
    whole = start(tmp_path, part(tmp_path, "nats"), slow)
    await whole.up("nats", "agent")
    whole.supervisor.stop()

    assert await whole.result() == 0
    assert [line.partition(" ")[2] for line in whole.said] == ["agent: did not stop within 0.05 s and was killed"]


async def test_a_second_ctrl_c_stops_everything_at_once(tmp_path: Path, start: Start) -> None:
    slow = Part(name="agent", argv=stubborn(tmp_path, "agent"), stop_grace_s=600)
    whole = start(tmp_path, part(tmp_path, "nats"), slow)
    running = await whole.up("nats", "agent")
    os.kill(os.getpid(), signal.SIGINT)
    await until(lambda: whole.said, "the first is noticed")
    # A SIGTERM is no second Ctrl-C. Signals arrive in order: when the other is seen, it has been handled.
    seen = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, seen.set)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGUSR1)
    await asyncio.wait_for(seen.wait(), 30)
    asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)
    hurried = whole.supervisor.at_once.is_set()
    os.kill(os.getpid(), signal.SIGINT)

    assert not hurried
    assert await whole.result() == 130
    assert [line.partition(" ")[2] for line in whole.said] == [
        "stopping after SIGINT; Ctrl-C stops at once",
        "stopping at once",
    ]
    assert not any(map(is_running, running))


async def test_with_verbose_each_line_of_a_part_follows_its_name(tmp_path: Path, start: Start) -> None:
    whole = start(tmp_path, part(tmp_path, "agent"), verbose=True)
    await until(lambda: whole.said, "the line arrives")
    whole.supervisor.stop()

    assert await whole.result() == 0
    assert whole.said == ["[agent] agent is up"]
    assert (tmp_path / "agent.log").read_text() == "agent is up\n"


# --- the whole of `gpuq up`, in a process of its own


@asynccontextmanager
async def running_up(tmp_path: Path, *, before: Sequence[str] = ()) -> AsyncGenerator[asyncio.subprocess.Process]:
    """A ``gpuq up`` that is ready; killed at the end where it still runs."""
    process = await start_up(tmp_path, before=before)
    try:
        await until(lambda: (tmp_path / "url").exists() and _all_up(tmp_path), "the site is up")
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def start_up(tmp_path: Path, *, before: Sequence[str] = ()) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *before,
        *run_up(tmp_path / "data", tmp_path),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=asyncio.subprocess.PIPE,
    )


def _all_up(tmp_path: Path) -> bool:
    """Whether both parts are up: which of them is first is a matter of time."""
    return all(pids(tmp_path, name) for name in ("scheduler", "agent"))


def nats_pid(tmp_path: Path) -> int:
    return int((tmp_path / "data" / "nats" / "nats.pid").read_text())


async def test_a_site_is_up_and_goes_down_with_sigterm(tmp_path: Path) -> None:
    async with running_up(tmp_path) as process:
        everybody = [nats_pid(tmp_path), *pids(tmp_path, "scheduler"), *pids(tmp_path, "agent")]
        alive = [is_running(pid) for pid in everybody]
        process.terminate()

        assert await asyncio.wait_for(process.wait(), 30) == 0
    assert alive == [True, True, True]
    assert ended(tmp_path) == ["agent", "scheduler"]
    assert not any(map(is_running, everybody))


async def test_under_nohup_in_a_script_it_outlives_the_terminal_and_still_heeds_ctrl_c(tmp_path: Path) -> None:
    ignoring = ("sh", "-c", 'trap "" HUP INT; exec "$@"', "sh")
    async with running_up(tmp_path, before=ignoring) as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGINT)
        _, said = await asyncio.wait_for(process.communicate(), 30)

    assert process.returncode == 0
    assert "stopping after SIGINT" in said.decode()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a death signal")
async def test_a_kill_of_the_supervisor_leaves_nobody_behind(tmp_path: Path) -> None:
    async with running_up(tmp_path) as process:
        everybody = [nats_pid(tmp_path), *pids(tmp_path, "scheduler"), *pids(tmp_path, "agent")]
        process.kill()
        await process.wait()

        await until(lambda: not any(map(is_running, everybody)), "every part ended")


async def test_a_site_comes_up_again_after_a_kill_with_the_same_logins(tmp_path: Path) -> None:
    async with running_up(tmp_path) as process:
        before = load_credentials(tmp_path / "data")
        process.kill()
        await process.wait()
    for path in (tmp_path / "url", *tmp_path.glob("agent.*"), *tmp_path.glob("scheduler.*")):
        path.unlink()

    async with running_up(tmp_path):
        assert load_credentials(tmp_path / "data").password == before.password


async def test_a_killed_server_comes_back_on_the_same_port_with_the_same_logins(tmp_path: Path) -> None:
    async with running_up(tmp_path):
        first = nats_pid(tmp_path)
        before = load_credentials(tmp_path / "data")
        (tmp_path / "data" / "site.json").unlink()  # written again when the server is ready
        os.kill(first, signal.SIGKILL)
        await until(lambda: (tmp_path / "data" / "site.json").exists(), "the server is ready again")
        await until(lambda: nats_pid(tmp_path) != first, "it has another process")

        assert load_credentials(tmp_path / "data") == before
        assert len(pids(tmp_path, "scheduler")) == 1


async def test_a_second_up_is_refused_and_names_the_first(tmp_path: Path) -> None:
    async with running_up(tmp_path) as first:
        second = await start_up(tmp_path)
        _, said = await asyncio.wait_for(second.communicate(), 30)

        assert second.returncode == 1
        assert f"is held by process {first.pid} on " in said.decode()
        assert "(gpuq up)" in said.decode()
        assert is_running(nats_pid(tmp_path))


async def test_somebody_elses_nats_that_is_not_there_is_said_at_once_and_no_server_is_made(tmp_path: Path) -> None:
    config = SiteConfig(nats=NatsConfig(url="nats://127.0.0.1:9"))

    with pytest.raises(LogUnavailable, match=r"no NATS server at nats://127\.0\.0\.1:9"):
        await up(Loaded(config=config), tmp_path, environ=os.environ, say=print)
    assert not (tmp_path / "nats").exists()
