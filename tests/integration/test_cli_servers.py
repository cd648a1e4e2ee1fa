"""`gpuq` with a NATS server that somebody else runs, with and without a scheduler."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from gpukeeper.cli.exitcodes import Exit
from gpukeeper.events.connection import NatsSettings, connect
from gpukeeper.events.streams import ensure_site
from support.clisite import Ran, read_until, run_gpuq, start, stop
from support.nats import NatsServer

pytestmark = pytest.mark.processes

_CONFIG = """\
[host]
name = "theirs"
[nats]
url = "{url}"
user = "{user}"
password_file = "password"
[agent]
find_devices = false
find_runtimes = false
[[devices]]
id = "cpu"
source = "cpu"
"""


class Theirs:
    """An account on a server that is not ours."""

    def __init__(self, settings: NatsSettings, folder: Path) -> None:
        self.url = settings.servers[0]
        self.settings = settings
        self.folder = folder
        (folder / "password").write_text(f"{settings.password}\n")
        self.config = folder / "gpuq.toml"
        self.config.write_text(_CONFIG.format(url=self.url, user=settings.user))

    def where(self) -> tuple[str, ...]:
        return ("--config", str(self.config), "--data", str(self.folder / "data"))

    def gpuq(self, *arguments: str) -> Ran:
        return run_gpuq(*self.where(), *arguments)

    def create_streams(self) -> None:
        async def create() -> None:
            connection = await connect(self.settings, name="tests")
            try:
                await ensure_site(connection)
            finally:
                await connection.close()

        asyncio.run(create())


@pytest.fixture
def theirs(nats_server: NatsServer, tmp_path: Path) -> Theirs:
    return Theirs(nats_server.settings(), tmp_path)


@pytest.mark.parametrize("command", [("queue",), ("submit", "-m", "m", "x"), ("cancel", "x"), ("events",), ("watch",)])
def test_a_server_without_a_site_is_exit_code_4_and_names_what_creates_one(
    theirs: Theirs, command: tuple[str, ...]
) -> None:
    ran = theirs.gpuq(*command)

    assert ran.code == Exit.UNAVAILABLE
    assert "this server has no stream GPUQ_LOG: `gpuq up` or `gpuq scheduler` creates it" in ran.err


def test_doctor_names_the_streams_that_are_missing(theirs: Theirs) -> None:
    missing = theirs.gpuq("doctor")
    theirs.create_streams()
    there = theirs.gpuq("doctor", "--json")

    assert (missing.code, there.code) == (Exit.MISCONFIGURED, Exit.OK)
    assert "stream GPUQ_LOG does not exist yet" in missing.out


def test_without_a_scheduler_a_submission_is_stored_and_says_so(theirs: Theirs) -> None:
    theirs.create_streams()
    ran = theirs.gpuq("submit", "--model", "m", "Hello", "--id", "early")
    document = theirs.gpuq("submit", "--model", "m", "Hello", "--id", "early-2", "--json").document
    status = theirs.gpuq("status", "early", "--json").document
    words = theirs.gpuq("status", "early").out
    queue = theirs.gpuq("queue").out
    waited = theirs.gpuq("submit", "--model", "m", "Hello", "--id", "early-3", "--wait", "--timeout", "1.5")
    cancelled = theirs.gpuq("cancel", "early", "--timeout", "0.2")
    nothing = theirs.gpuq("devices").out

    assert (ran.code, ran.out) == (Exit.OK, "early stored, not yet accepted: no scheduler is running\n")
    assert (document["state"], document["seq"]) == ("stored", 2)
    assert (status["phase"], status["submission_seq"]) == ("submitted", 1)
    assert "submitted as sequence 1, not yet accepted: no scheduler is running" in words
    assert queue.startswith("0 waiting, 2 submitted and not yet accepted\n")
    assert waited.code == Exit.TIMED_OUT
    assert cancelled.code == Exit.TIMED_OUT
    assert "stored and not answered within 0.2 s: no scheduler is running" in cancelled.err
    assert nothing.startswith("no host has joined yet")


def test_up_runs_scheduler_and_agent_against_a_server_that_somebody_else_runs(theirs: Theirs) -> None:
    theirs.create_streams()
    assert theirs.gpuq("submit", "--model", "m", "--id", "early", "Hello").code == Exit.OK
    process = start("up", "--nats", theirs.url, *theirs.where())
    try:
        said = read_until(process, "more:")
        devices = theirs.gpuq("devices", "--json").document
        early = theirs.gpuq("status", "early", "--json").document
        process.send_signal(signal.SIGINT)
        code = process.wait(60)
    finally:
        stop(process)

    assert said[0] == f"gpuq is up at {theirs.url}; data in {theirs.folder / 'data'}"
    assert [host["agent"] for host in devices["hosts"]] == ["live"]
    assert early["phase"] == "waiting"
    assert code == Exit.OK
    assert theirs.gpuq("devices", "--json").document["hosts"][0]["agent"] == "left"
    assert not (theirs.folder / "data" / "nats").exists()


def test_up_against_a_server_that_is_not_there_is_exit_code_4(theirs: Theirs) -> None:
    ran = theirs.gpuq("up", "--nats", "nats://127.0.0.1:9")

    assert ran.code == Exit.UNAVAILABLE
    assert "no NATS server at nats://127.0.0.1:9" in ran.err


def test_a_login_that_is_refused_is_exit_code_4_and_shows_no_secret(theirs: Theirs) -> None:
    (theirs.folder / "password").write_text("wrong-secret\n")
    ran = theirs.gpuq("queue", "--json")

    assert ran.code == Exit.UNAVAILABLE
    assert "Authorization Violation" in ran.err
    assert "wrong-secret" not in ran.err + ran.out


@pytest.mark.parametrize("part", ["scheduler", "agent"])
def test_one_part_alone_runs_until_it_is_told_to_stop(theirs: Theirs, part: str) -> None:
    process = start(part, *theirs.where())
    try:
        read_until(process, f"event={part}_started")
        process.terminate()
        code = process.wait(60)
    finally:
        stop(process)

    assert code == Exit.OK
