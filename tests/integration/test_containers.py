"""Containers on a real Docker engine: every state in words, acts that are seen to have worked, and nothing unlisted."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from gpukeeper.agents.config import AgentConfig, RuntimeConfig
from gpukeeper.agents.containers.docker_engine import DockerEngine
from gpukeeper.agents.containers.port import ContainerFailure
from gpukeeper.agents.containers.standing import trouble
from gpukeeper.agents.containers.steward import Steward
from gpukeeper.cli import doctor
from gpukeeper.events.reasons import Reason
from support.dockerd import DockerDaemon
from support.wait import until_answered, until_found

pytest_plugins = ["support.docker_fixture"]


@asynccontextmanager
async def steward_of(*containers: str, url: str) -> AsyncGenerator[Steward]:
    """A steward whose runtimes are named as their containers."""
    runtimes = tuple(RuntimeConfig(name=each, provider="container", container=each) for each in containers)
    steward = Steward.of_host(AgentConfig(host="h", runtimes=runtimes), base_url=url)
    try:
        yield steward
    finally:
        await steward.close()


async def test_an_operator_begins_stops_and_restarts_a_container(docker_engine: DockerDaemon) -> None:
    docker_engine.make("acts", "sleep", "1000", start=False)
    async with steward_of("acts", url=docker_engine.url) as steward:
        fresh = await steward.look("acts")
        begun = await steward.perform("acts", "begin")
        running = await steward.look("acts")
        restarted = await steward.perform("acts", "restart")
        again = await steward.look("acts")
        stopped = await steward.perform("acts", "stop")

    assert [outcome.done for outcome in (begun, restarted, stopped)] == [True, True, True]
    assert (fresh.status, running.status, again.status) == ("created", "running", "running")
    assert running.started_at != again.started_at
    assert again.restart_count == 0
    assert docker_engine.status("acts") == "exited"


async def test_a_paused_container_says_so_and_goes_on_or_stops_when_told(docker_engine: DockerDaemon) -> None:
    docker_engine.make("frozen", "sleep", "1000")
    async with steward_of("frozen", url=docker_engine.url) as steward:
        await steward.engine.pause("frozen")
        paused = await steward.look("frozen")
        begun = await steward.perform("frozen", "begin")
        went_on = docker_engine.status("frozen")
        await steward.engine.pause("frozen")
        stopped = await steward.perform("frozen", "stop")

    assert "is paused" in (trouble(paused) or "")
    assert (begun.done, went_on, stopped.done) == (True, "running", True)
    assert docker_engine.status("frozen") == "exited"


async def test_c34_a_container_that_keeps_ending_is_found_to_loop_and_not_begun(docker_engine: DockerDaemon) -> None:
    docker_engine.make("loops", "false", restart="unless-stopped")
    async with steward_of("loops", url=docker_engine.url) as steward:

        async def looping() -> bool:
            return (await steward.look("loops")).crash_looping is not None

        await until_answered(looping, "the container loops")
        begun = await steward.perform("loops", "begin")
        stopped = await steward.perform("loops", "stop")
        state = await steward.look("loops")

    assert (begun.done, begun.reason) == (False, Reason.CRASH_LOOPING)
    assert stopped.done, stopped.detail
    assert state.status == "exited"
    assert state.crash_looping is not None


async def test_a_container_that_cannot_start_answers_with_the_engines_words(docker_engine: DockerDaemon) -> None:
    docker_engine.make("broken", "/no/such/program", start=False)
    async with steward_of("broken", url=docker_engine.url) as steward:
        begun = await steward.perform("broken", "begin")
        state = await steward.look("broken")

    assert (begun.done, begun.reason) == (False, Reason.CONTAINER_ENGINE)
    assert "/no/such/program: no such file or directory" in begun.detail
    assert "/no/such/program: no such file or directory" in (trouble(state) or "")
    assert state.exit_code == 127


async def test_a_container_that_ends_at_once_is_not_begun(docker_engine: DockerDaemon) -> None:
    docker_engine.make("short", "false", start=False)
    async with steward_of("short", url=docker_engine.url) as steward:

        async def refused() -> bool:
            return not (await steward.perform("short", "begin")).done

        # It may still have been running when it was looked at; then it is begun once more.
        await until_answered(refused, "an act that came to nothing")
        state = await steward.look("short")

    assert state.status in ("exited", "running")


async def test_a_container_that_is_removed_under_us_is_missing_and_comes_back_when_it_is_made_again(
    docker_engine: DockerDaemon,
) -> None:
    docker_engine.make("gone", "sleep", "1000")
    async with steward_of("gone", url=docker_engine.url) as steward:
        before = await steward.look("gone")
        docker_engine.remove("gone")
        missing = await steward.look("gone")
        outcomes = [await steward.perform("gone", act) for act in ("begin", "stop", "restart")]
        docker_engine.make("gone", "sleep", "1000")
        after = await steward.look("gone")

    assert (before.status, missing.status, after.status) == ("running", "missing", "running")
    assert before.id != after.id
    assert [(one.done, one.detail) for one in outcomes] == [(False, "the container gone does not exist")] * 3


async def test_what_the_registry_does_not_name_is_never_touched(docker_engine: DockerDaemon) -> None:
    made = docker_engine.make("foreign", "sleep", "1000")
    engine = DockerEngine(["mine"], base_url=docker_engine.url)
    try:
        for name in ("foreign", made["Id"], made["Id"][:12], "mine/../foreign", ""):
            for call in (engine.inspect, engine.start, engine.stop, engine.restart, engine.pause, engine.unpause):
                with pytest.raises(ContainerFailure) as caught:
                    await call(name)
                assert caught.value.fault == "unlisted"
            with pytest.raises(ContainerFailure, match="never touched"):
                await engine.exec(name, ("true",))
            with pytest.raises(ContainerFailure, match="never touched"):
                await engine.file_bytes(name, "/bin/sh")
    finally:
        await engine.close()
    assert docker_engine.status("foreign") == "running"


# --- programs inside


async def test_a_program_inside_a_container_is_spoken_to_line_by_line(docker_engine: DockerDaemon) -> None:
    docker_engine.make("cats", "sleep", "1000")
    engine = DockerEngine(["cats"], base_url=docker_engine.url)
    try:
        program = await engine.exec("cats", ("sh", "-c", "echo oops >&2; read a; echo got $a; exit 7"))
        await program.write(b"x" * 100_000 + b"\n")
        line = await program.line()
        end = await program.line()
        code = await program.exit_code()
        again = await program.line()
        complaint = program.complaint
        killed = await program.kill()
    finally:
        await engine.close()

    assert line == b"got " + b"x" * 100_000
    assert (end, again, code, complaint, killed) == (None, None, 7, "oops", True)


async def test_killing_a_program_ends_what_it_started_and_nothing_else(docker_engine: DockerDaemon) -> None:
    docker_engine.make("family", "sleep", "1000")
    engine = DockerEngine(["family"], base_url=docker_engine.url)
    try:
        doomed = await engine.exec("family", ("sh", "-c", "sleep 2001 & sleep 2002 & echo up; cat; wait"))
        spared = await engine.exec("family", ("sh", "-c", "echo up; sleep 3001"))
        assert (await doomed.line(), await spared.line()) == (b"up", b"up")
        before = await doomed.ended()
        killed = await doomed.kill()
        left = docker_engine.processes("family", "sleep")
        await spared.kill()
    finally:
        await engine.close()

    assert (before, killed) == (False, True)
    assert "sleep 1000" in left
    assert any("3001" in words for words in left)
    assert not any("2001" in words or "2002" in words for words in left)


async def test_a_program_whose_container_is_removed_has_ended(docker_engine: DockerDaemon) -> None:
    docker_engine.make("short-lived", "sleep", "1000")
    engine = DockerEngine(["short-lived"], base_url=docker_engine.url)
    try:
        program = await engine.exec("short-lived", ("cat",))
        await program.write(b"up\n")
        assert await program.line() == b"up"
        docker_engine.remove("short-lived")
        line = await program.line()
        ended = await program.kill()
    finally:
        await engine.close()

    assert (line, ended) == (None, True)


async def test_a_program_that_is_not_there_is_refused_or_ends_with_the_engines_code(
    docker_engine: DockerDaemon,
) -> None:
    docker_engine.make("empty", "sleep", "1000")
    docker_engine.make("off", "sleep", "1000", start=False)
    engine = DockerEngine(["empty", "off"], base_url=docker_engine.url)
    try:
        with pytest.raises(ContainerFailure, match="not running"):
            await engine.exec("off", ("true",))
        program = await engine.exec("empty", ("/no/such/program",))
        said = await program.line()
        code = await program.exit_code()
        await program.kill()
        sizes = (await engine.file_bytes("empty", "/bin/katago"), await engine.file_bytes("empty", "/no/such/file"))
    finally:
        await engine.close()

    assert b"/no/such/program" in (said or b"")
    assert code in (126, 127)
    assert sizes[0] is not None
    assert sizes[0] > 100
    assert sizes[1] is None


async def test_an_engine_that_goes_away_and_comes_back_is_found_again(docker_engine: DockerDaemon) -> None:
    own = DockerDaemon(Path(tempfile.mkdtemp(prefix="gpuq-docker-")))
    try:
        own.start()
        own.make("kept", "sleep", "1000")
        async with steward_of("kept", url=own.url) as steward:
            before = await steward.look("kept")
            program = await steward.engine.exec("kept", ("cat",))
            await program.write(b"up\n")
            assert await program.line() == b"up"
            own.halt()
            away = await steward.look("kept")
            cut = await program.line()
            proven = await program.kill()
            own.launch()
            back = await steward.look("kept")
            begun = await steward.perform("kept", "begin")
            gone = await program.kill()
    finally:
        own.stop()

    assert (before.status, away.status, back.status) == ("running", "unknown", "exited")
    assert "no container engine at " in away.error
    assert (cut, proven, gone) == (None, False, True)
    assert begun.done, begun.detail


# --- engines that are not there, may not be used, are too old, hang, or are none


async def test_an_engine_that_is_absent_is_a_state_and_no_crash(tmp_path: Path) -> None:
    async with steward_of("box", url=f"unix://{tmp_path}/none.sock") as steward:
        state = await steward.look("box")
        outcome = await steward.perform("box", "begin")

    assert (state.status, state.crash_looping) == ("unknown", None)
    assert "no container engine at " in state.error
    assert "No such file or directory" in state.error
    assert (outcome.done, outcome.reason) == (False, Reason.CONTAINER_ENGINE)


async def test_a_socket_that_nobody_listens_on_is_an_absent_engine(tmp_path: Path) -> None:
    async with answering(tmp_path, b""):
        pass
    async with steward_of("box", url=f"unix://{tmp_path}/s") as steward:
        state = await steward.look("box")

    assert "no container engine at " in state.error


@contextmanager
def unprivileged() -> Generator[None]:
    """Root may use every socket; anybody else may not."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


async def test_a_socket_without_permission_is_a_state_that_says_what_to_do(tmp_path: Path) -> None:
    async with answering(tmp_path, b"") as url, steward_of("box", url=url) as steward:
        (tmp_path / "s").chmod(0o000)
        with unprivileged():
            state = await steward.look("box")

    assert state.status == "unknown"
    assert "no permission to use unix://" in state.error or "Permission denied" in state.error


async def test_an_engine_that_is_too_old_says_which_it_would_take(tmp_path: Path) -> None:
    async with (
        answering(tmp_path, b'{"Version":"1.9.1","ApiVersion":"1.21"}') as url,
        steward_of("box", url=url) as steward,
    ):
        state = await steward.look("box")

    assert (state.status, state.error) == ("unknown", "the engine's API is 1.21; 1.25 or newer is needed")


@pytest.mark.parametrize("body", [b"<html>hello</html>", b"{}", b"[]", b'{"ApiVersion":"new"}', b"null"])
async def test_what_answers_and_is_no_engine_is_a_state(tmp_path: Path, body: bytes) -> None:
    async with answering(tmp_path, body) as url, steward_of("box", url=url) as steward:
        state = await steward.look("box")

    assert state.status == "unknown"
    assert state.error


async def test_an_engine_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    async with answering(tmp_path, None) as url:
        engine = DockerEngine(["box"], base_url=url, answer_s=0.1)
        try:
            with pytest.raises(ContainerFailure) as caught:
                await engine.inspect("box")
        finally:
            await engine.close()

    assert caught.value.fault == "slow"


async def test_an_act_that_hangs_keeps_no_look_waiting(tmp_path: Path) -> None:
    asked, hold = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while request := await reader.readline():
                while (await reader.readline()).strip():
                    pass
                body = b'{"Version":"24.0","ApiVersion":"1.43"}'
                if b"/stop" in request:
                    asked.set()
                    await hold.wait()
                    return
                if b"/containers/" in request:
                    body = b'{"Id":"a","RestartCount":0,"State":{"Status":"running"}}'
                head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body)
                await writer.drain()
        finally:
            writer.close()

    server = await asyncio.start_unix_server(serve, tmp_path / "s")
    async with steward_of("box", url=f"unix://{tmp_path}/s") as steward:
        stopping = asyncio.create_task(steward.perform("box", "stop"))
        await asked.wait()
        during = await steward.look("box")
        hold.set()
        outcome = await stopping
    server.close()
    await server.wait_closed()

    assert (during.status, stopping.done()) == ("running", True)
    assert (outcome.done, outcome.reason) == (False, Reason.CONTAINER_ENGINE)


@asynccontextmanager
async def answering(folder: Path, body: bytes | None) -> AsyncGenerator[str]:
    """A server on a Unix socket that answers every request with ``body``; None: never."""
    path = folder / "s"
    hold = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readline():
                while (await reader.readline()).strip():
                    pass
                if body is None:
                    await hold.wait()
                    return
                head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body)
                await writer.drain()
        except OSError:
            return
        finally:
            writer.close()

    server = await asyncio.start_unix_server(serve, path)
    try:
        yield f"unix://{path}"
    finally:
        hold.set()
        server.close()
        await server.wait_closed()


# --- gpuq doctor


async def test_doctor_looks_at_the_engine_only_where_a_runtime_names_a_container(
    docker_engine: DockerDaemon, tmp_path: Path
) -> None:
    docker_engine.make("looked-at", "sleep", "1000")
    docker_engine.make("asleep", "sleep", "1000", start=False)
    runtimes = [
        RuntimeConfig(name="a", provider="container", container="looked-at"),
        RuntimeConfig(name="b", provider="container", container="asleep"),
        RuntimeConfig(name="c", provider="katago", container="nowhere"),
    ]
    bare = RuntimeConfig(name="d", provider="ollama", url="http://127.0.0.1:1")

    none = await doctor.container_checks([bare], base_url=f"unix://{tmp_path}/none")
    checks = await doctor.container_checks([*runtimes, bare], base_url=docker_engine.url)
    (absent,) = await doctor.container_checks(runtimes, base_url=f"unix://{tmp_path}/none")

    assert none == []
    assert [(check.name, check.ok) for check in checks] == [
        ("containers", True),
        ("container looked-at", True),
        ("container asleep", None),
        ("container nowhere", False),
    ]
    assert (absent.name, absent.ok, absent.fix) == ("containers", False, "install or start Docker, or set $DOCKER_HOST")


def test_the_engine_for_tests_is_a_real_one(docker_engine: DockerDaemon) -> None:
    assert until_found(lambda: docker_engine.client.version()["Version"], "its version")
