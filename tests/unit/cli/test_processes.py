"""Programs whose output is bounded, and that end when they are told to."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpukeeper.cli import processes
from gpukeeper.cli.processes import BoundedLog, Child, command_line
from support.programs import obedient, pids, stubborn
from support.waiting import is_running, until


def python(source: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", "-c", source)


async def output_of(argv: tuple[str, ...], folder: Path) -> tuple[int, tuple[str, ...]]:
    log = BoundedLog(folder / "log", tail_lines=100)
    child = await Child.start(argv, log=log)
    return await child.wait(), log.tail()


async def test_both_streams_and_a_last_line_without_an_end_are_kept(tmp_path: Path) -> None:
    program = "import os; os.write(1, b'a\\nb'); os.write(2, b'c\\n\\nlast'); raise SystemExit(3)"

    assert await output_of(python(program), tmp_path) == (3, ("a", "bc", "", "last"))
    assert (tmp_path / "log").read_text() == "a\nbc\n\nlast\n"


async def test_a_line_without_an_end_cannot_fill_the_memory(tmp_path: Path) -> None:
    _, lines = await output_of(python("print('x' * 100_000, end='')"), tmp_path)

    assert sum(map(len, lines)) == 100_000
    assert max(map(len, lines)) == processes.LINE_BYTES_MAX


async def test_bytes_that_are_no_text_do_not_stop_the_output(tmp_path: Path) -> None:
    assert await output_of(python("import os; os.write(1, b'\\xff\\nok\\n')"), tmp_path) == (0, ("\ufffd", "ok"))


async def test_a_program_that_does_not_exist_ends_with_127_and_says_so(tmp_path: Path) -> None:
    code, lines = await output_of(("/nonexistent/program",), tmp_path)

    assert (code, lines) == (127, ("cannot start /nonexistent/program: No such file or directory",))


async def test_the_end_of_a_program_is_seen_though_its_own_child_keeps_the_output_open(tmp_path: Path) -> None:
    source = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)"
    code, lines = await output_of(python(source), tmp_path)
    os.kill(int(lines[0]), 9)

    assert code == 0


async def test_stopping_sends_sigterm_and_may_be_asked_twice(tmp_path: Path) -> None:
    child = await Child.start(obedient(tmp_path, "a"), log=BoundedLog(tmp_path / "log"))
    await until(lambda: pids(tmp_path, "a"), "the program is up")

    assert [await child.stop(10), await child.stop(10)] == [0, 0]


async def test_a_program_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    child = await Child.start(stubborn(tmp_path, "a"), log=BoundedLog(tmp_path / "log"))
    await until(lambda: pids(tmp_path, "a"), "the program is up")

    assert await child.stop(0.05) == -9


async def test_a_program_is_killed_before_its_grace_ends_when_told_at_once(tmp_path: Path) -> None:
    child = await Child.start(stubborn(tmp_path, "a"), log=BoundedLog(tmp_path / "log"))
    await until(lambda: pids(tmp_path, "a"), "the program is up")
    at_once = asyncio.Event()
    at_once.set()

    assert await asyncio.wait_for(child.stop(600, at_once=at_once), 30) == -9


def test_a_log_keeps_one_older_generation_and_no_more(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "log", bytes_max=100, tail_lines=2)
    for number in range(100):
        log.write_line(b"line %02d" % number)
    log.close()

    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "log.1"]
    assert all(path.stat().st_size <= 100 for path in tmp_path.iterdir())
    assert (tmp_path / "log").read_text().endswith("line 99\n")
    assert log.tail() == ("line 98", "line 99")
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_a_log_file_that_cannot_be_written_is_told_once_and_stops_nobody(tmp_path: Path) -> None:
    said: list[str] = []
    log = BoundedLog(tmp_path / "missing" / "log", echo=said.append)
    log.write_line(b"a")
    log.write_line(b"b")

    assert said == [f"{tmp_path}/missing/log: cannot be written: No such file or directory", "a", "b"]
    assert log.tail() == ("a", "b")


def test_a_terminal_that_is_gone_is_told_in_the_file_and_stops_nobody(tmp_path: Path) -> None:
    def gone(line: str) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    log = BoundedLog(tmp_path / "log", echo=gone)
    log.write_line(b"a")
    log.write_line(b"b")
    log.close()

    lines = (tmp_path / "log").read_text().splitlines()
    assert lines == ["a", "the terminal cannot be written to: [Errno 32] Broken pipe", "b"]


@pytest.mark.parametrize(
    "look",
    [
        command_line,
        pytest.param(
            processes._command_line_from_ps,  # pyright: ignore[reportPrivateUsage]
            marks=pytest.mark.skipif(shutil.which("ps") is None, reason="there is no ps here"),
        ),
    ],
)
async def test_the_command_line_of_a_living_process_is_known_and_of_an_ended_one_not(
    tmp_path: Path, look: Callable[[int], str | None]
) -> None:
    child = await Child.start(obedient(tmp_path, "a"), log=BoundedLog(tmp_path / "log"))
    await until(lambda: pids(tmp_path, "a"), "the program is up")
    living = look(child.pid)
    await child.stop(10)

    assert str(tmp_path) in (living or "")
    assert look(child.pid) is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a death signal")
async def test_a_program_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c"),
        "import asyncio, pathlib, sys\n"
        "from gpukeeper.cli.processes import BoundedLog, Child\n"
        "from support.programs import obedient\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "async def main():\n"
        "    child = await Child.start(obedient(folder, 'a'), log=BoundedLog(folder / 'log'))\n"
        "    await child.wait()\n"
        "asyncio.run(main())\n",
        str(tmp_path),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    (child,) = await until(lambda: pids(tmp_path, "a"), "the program is up")
    parent.kill()
    await parent.wait()

    await until(lambda: not is_running(child), "the program ended with its parent")
