"""The program as a whole: help, version, errors in one sentence, exit codes, the generated reference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpukeeper.cli import reference
from gpukeeper.cli.errors import NotFound, Refused, exit_code_of
from gpukeeper.cli.exitcodes import MEANINGS, Exit
from gpukeeper.cli.options import Where
from gpukeeper.events.errors import ConfigError, GpukeeperError, InvalidId, LogUnavailable, WaitTimedOut
from support.clisite import environment, run_gpuq

COMMANDS = (
    *("submit", "status", "result", "cancel", "watch", "queue", "devices", "events"),
    *("preview", "reclaim", "pin", "unpin", "drain", "resume", "runtime"),
    *("up", "scheduler", "agent", "doctor", "demo", "version"),
)
DOCS = Path(__file__).parents[3] / "docs"


def test_the_help_names_every_command() -> None:
    ran = run_gpuq("--help")

    assert ran.code == Exit.OK
    assert all(command in ran.out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    ran = run_gpuq(command, "--help")

    assert ran.code == Exit.OK
    assert f"gpuq {command}" in ran.out


def test_without_a_command_the_help_is_shown_with_exit_code_2() -> None:
    ran = run_gpuq()

    assert ran.code == Exit.USAGE
    assert "submit" in ran.out


@pytest.mark.parametrize("arguments", [("fly",), ("--fly",), ("status",), ("queue", "--watch=maybe")])
def test_a_wrong_command_line_is_one_sentence_and_exit_code_2(arguments: tuple[str, ...]) -> None:
    plain, as_json = run_gpuq(*arguments), run_gpuq(*arguments, "--json")

    assert (plain.code, as_json.code, plain.out) == (Exit.USAGE, Exit.USAGE, "")
    assert plain.err.startswith("gpuq: ")
    assert plain.err.count("\n") == 1
    assert as_json.document["error"]["exit"] == Exit.USAGE


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("runtime",), "Missing argument 'begin|stop|restart': one of begin, stop, restart (see --help)"),
        (("runtime", "bounce", "a", "b"), "'bounce' is not one of 'begin', 'stop', 'restart'"),
    ],
)
def test_a_choice_that_is_missing_or_wrong_is_told_in_plain_words(arguments: tuple[str, ...], words: str) -> None:
    ran = run_gpuq(*arguments)

    assert ran.code == Exit.USAGE
    assert words in ran.err
    assert "Value error" not in ran.err
    assert "\\n" not in ran.err


def test_the_version_is_shown_as_a_line_and_as_json() -> None:
    line, option, document = run_gpuq("version"), run_gpuq("--version"), run_gpuq("version", "--json")

    assert line.out == option.out
    assert line.out.startswith(f"gpuq {document.document['gpukeeper']} (Python ")


def test_help_and_shell_completion_import_nothing_heavy() -> None:
    code = (
        "import sys; from gpukeeper.cli.main import app; "
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, env=environment()
    )

    assert set(done.stdout.split()) & {"nats", "rich", "structlog", "msgspec", "aiohttp", "numpy", "pynvml"} == set()


def test_the_program_is_a_process_with_the_exit_code_and_shows_what_a_terminal_cannot_as_escapes() -> None:
    argv = [sys.executable, "-P", "-m", "gpukeeper.cli.main", "status", "\N{SNOWMAN}"]
    env = environment() | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=env)

    assert (done.returncode, done.stdout) == (Exit.USAGE, "")
    assert done.stderr == "gpuq: ID: '\\u2603' must be 1 to 64 of A-Z a-z 0-9 _ -\n"


PROGRAM = (sys.executable, "-P", "-m", "gpukeeper.cli.main")
WRONG = ("status", "not an id", "--json")


def in_shell(redirections: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program in a process whose streams the shell has redirected."""
    script = f'"$@" {redirections}'
    argv = ("sh", "-c", script, "sh", *PROGRAM, *arguments)
    return subprocess.run(argv, capture_output=True, text=True, check=False, env=environment())


def broken_pipe() -> int:
    """The end to write to of a pipe that nobody reads."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    return write_end


def test_an_error_that_nobody_reads_is_still_its_exit_code() -> None:
    end = broken_pipe()
    stdout_gone = subprocess.run([*PROGRAM, *WRONG], stdout=end, stderr=subprocess.PIPE, check=False, env=environment())
    both_gone = subprocess.run([*PROGRAM, *WRONG], stdout=end, stderr=end, check=False, env=environment())
    os.close(end)

    assert (stdout_gone.returncode, both_gone.returncode) == (Exit.USAGE, Exit.USAGE)
    assert stdout_gone.stderr.startswith(b"gpuq: ID: ")
    assert stdout_gone.stderr.count(b"\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_output_that_cannot_be_written_is_one_sentence_and_exit_code_7() -> None:
    done, wrong = in_shell(">/dev/full", "version", "--json"), in_shell(">/dev/full", *WRONG)
    silent = in_shell("2>/dev/full", *WRONG)

    assert (done.returncode, wrong.returncode, silent.returncode) == (Exit.MISCONFIGURED, Exit.USAGE, Exit.USAGE)
    assert done.stderr == "gpuq: the output cannot be written: No space left on device\n"
    assert wrong.stderr.count("\n") == 2
    assert json.loads(silent.stdout)["error"]["exit"] == Exit.USAGE


def test_json_in_a_pipe_is_utf8_whatever_the_locale_can_say() -> None:
    argv = [*PROGRAM, "status", "\N{LATIN SMALL LETTER U WITH DIAERESIS}\N{SNOWMAN}", "--json"]
    done = subprocess.run(
        argv, capture_output=True, check=False, env=environment() | {"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}
    )

    assert "\N{LATIN SMALL LETTER U WITH DIAERESIS}\N{SNOWMAN}" in json.loads(done.stdout)["error"]["message"]


def test_a_current_folder_that_is_gone_is_said_to_be(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    script = 'cd "$1" && rmdir "$1" && shift && "$@"'
    argv = ("sh", "-c", script, "sh", str(folder), *PROGRAM, "status", "a")
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment())

    assert done.returncode == Exit.MISCONFIGURED
    assert done.stderr == "gpuq: the current folder does not exist any more: change to another one\n"


def test_a_program_without_standard_streams_does_what_it_is_told() -> None:
    done, wrong = in_shell(">&- 2>&- <&-", "version"), in_shell("2>&-", *WRONG)

    assert (done.returncode, wrong.returncode) == (Exit.OK, Exit.USAGE)
    assert json.loads(wrong.stdout)["error"]["exit"] == Exit.USAGE


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (LogUnavailable(), Exit.UNAVAILABLE),
        (WaitTimedOut(), Exit.TIMED_OUT),
        (NotFound(), Exit.NOT_FOUND),
        (Refused(), Exit.REFUSED),
        (InvalidId(), Exit.USAGE),
        (ConfigError(), Exit.MISCONFIGURED),
        (GpukeeperError(), Exit.MISCONFIGURED),
    ],
)
def test_every_error_has_its_exit_code(error: GpukeeperError, status: Exit) -> None:
    assert exit_code_of(error) is status


def test_every_exit_code_has_a_meaning() -> None:
    assert set(MEANINGS) == set(Exit)


def test_an_option_after_the_command_stands_over_one_before_it() -> None:
    before = Where(config=Path("a"), data=Path("b"), nats="nats://c")

    assert Where(data=Path("d")).over(before) == Where(Path("a"), Path("d"), "nats://c")
    assert Where(data=Path("d")).over(None) == Where(data=Path("d"))


def test_the_page_about_the_command_line_is_what_the_commands_say() -> None:
    page = (DOCS / "cli.md").read_text()

    assert page == reference.render(), "run: python -m gpukeeper.cli.reference > docs/cli.md"
    assert all(f"### `gpuq {command}`" in page for command in COMMANDS)
    assert all(f"| {int(code)} |" in page for code in Exit)
