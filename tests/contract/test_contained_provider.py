"""The contract of providers that are reached through a container, on a real Docker engine.

What the contract says of text models is in ``test_provider.py``; here is what fits those that serve none.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
import pytest_asyncio

from gpukeeper.agents.config import AgentConfig, RuntimeConfig
from gpukeeper.agents.containers.steward import Steward
from gpukeeper.agents.runtimes.katago import KataGo
from gpukeeper.agents.runtimes.port import Done, Provider, RuntimeFailure, Token
from gpukeeper.agents.runtimes.registry import build
from gpukeeper.agents.stopping import StopProof
from gpukeeper.events.errors import ConfigError
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import JobResult, Work
from support.dockerd import NETWORK, DockerDaemon
from support.fake_http import Fault
from support.llamacpp_fake import FakeLlamaCpp
from support.wait import until_answered

pytest_plugins = ["support.docker_fixture"]


class Subject:
    """A provider and the container that it is reached through."""

    def __init__(self, docker: DockerDaemon, config: RuntimeConfig) -> None:
        assert config.container is not None
        self.docker = docker
        self.container = config.container
        self.steward = Steward.of_host(AgentConfig(host="h", runtimes=(config,)), base_url=docker.url)
        self.provider: Provider = build(config, steward=self.steward)

    async def close(self) -> None:
        await self.provider.close()
        await self.steward.close()


@pytest_asyncio.fixture(params=["katago", "container"])
async def at(request: pytest.FixtureRequest, docker_engine: DockerDaemon) -> AsyncGenerator[Subject]:
    docker_engine.make("contracted", "sleep", "1000")
    found = Subject(docker_engine, RuntimeConfig(name="r", provider=request.param, container="contracted"))
    yield found
    await found.close()
    docker_engine.remove("contracted")


@pytest_asyncio.fixture
async def go(docker_engine: DockerDaemon) -> AsyncGenerator[Subject]:
    docker_engine.make("kata", "sleep", "1000")
    found = Subject(docker_engine, RuntimeConfig(name="go", provider="katago", container="kata"))
    yield found
    await found.close()
    docker_engine.remove("kata")


async def analysed(go: Subject, *, model: str = "katago", **analysis: object) -> tuple[list[str], JobResult]:
    """The texts of all tokens, and the result."""
    items = [item async for item in go.provider.run(model, "analysis", Work(analysis=analysis), on_cpu=False)]
    *tokens, done = items
    assert isinstance(done, Done)
    return [token.text for token in tokens if isinstance(token, Token)], done.result


# --- both


async def test_look_reads_health(at: Subject) -> None:
    reading = await at.provider.look()

    assert (reading.runtime, reading.healthy, reading.error) == ("r", True, None)
    assert reading.models is not None


async def test_a_container_that_stops_is_removed_or_paused_makes_it_unhealthy_in_words(at: Subject) -> None:
    said: list[str | None] = []
    await at.steward.engine.pause(at.container)
    said.append((await at.provider.look()).error)
    await at.steward.engine.unpause(at.container)
    await at.steward.engine.stop(at.container)
    said.append((await at.provider.residency()).error)
    at.docker.remove(at.container)
    said.append((await at.provider.residency()).error)

    assert "is paused" in (said[0] or "")
    assert "is stopped" in (said[1] or "")
    assert said[2] == "its container contracted does not exist"


async def test_a_model_it_has_not_is_neither_found_nor_loaded_nor_sized(at: Subject) -> None:
    reading = await at.provider.look()

    assert at.provider.find(reading, "nobody/has-this") is None
    assert await at.provider.model_bytes("nobody/has-this") is None
    with pytest.raises(RuntimeFailure) as caught:
        await at.provider.load("nobody/has-this", on_cpu=False)
    assert caught.value.reason is Reason.LOAD_FAILED
    assert "nobody/has-this" in caught.value.detail


async def test_a_task_it_cannot_do_is_refused_before_anything_starts(at: Subject) -> None:
    with pytest.raises(RuntimeFailure) as caught:
        async for _ in at.provider.run("katago", "generate", Work(prompt="x"), on_cpu=False):
            pass

    assert caught.value.reason is Reason.UNSUPPORTED_TASK
    assert at.docker.processes(at.container, "katago") == []


async def test_it_fetches_nothing(at: Subject) -> None:
    assert not at.provider.pulls
    with pytest.raises(RuntimeFailure) as caught:
        async for _ in at.provider.pull("katago"):
            pass
    assert caught.value.reason is Reason.MODEL_MISSING


async def test_closing_twice_is_no_error(at: Subject) -> None:
    await at.provider.close()
    await at.provider.close()


def test_without_a_container_or_a_way_to_its_engine_there_is_no_provider() -> None:
    with pytest.raises(ConfigError, match="no way to the container engine"):
        build(RuntimeConfig(name="r", provider="katago", container="kg"))
    steward = Steward.of_host(AgentConfig(host="h"))
    with pytest.raises(ConfigError, match="no container"):
        build(RuntimeConfig(name="r", provider="container"), steward=steward)


# --- a plain container


async def plain(docker: DockerDaemon, **fields: object) -> Subject:
    config = RuntimeConfig(name="r", provider="container", container="held", **fields)  # type: ignore[arg-type]
    return Subject(docker, config)


@pytest.mark.parametrize(
    ("release", "releases"), [("auto", "none"), ("none", "none"), ("pause", "none"), ("stop", "all")]
)
async def test_a_container_is_stopped_for_its_memory_only_where_its_entry_says_so(
    docker_engine: DockerDaemon, release: str, releases: str
) -> None:
    docker_engine.make("held", "sleep", "1000")
    at = await plain(docker_engine, release=release)
    try:
        assert at.provider.releases == releases
        if releases == "none":
            with pytest.raises(RuntimeFailure) as caught:
                await at.provider.release(None)
            assert caught.value.reason is Reason.NOT_RELEASABLE
            assert docker_engine.status("held") == "running"
        else:
            with pytest.raises(RuntimeFailure):
                await at.provider.release("one-model")
            assert docker_engine.status("held") == "running"
            await at.provider.release(None)
            assert docker_engine.status("held") == "exited"
            assert (await at.provider.look()).resident == ()
    finally:
        await at.close()
        docker_engine.remove("held")


@pytest.mark.parametrize(("sole_client", "activity"), [(False, "unknown"), (True, "idle")])
async def test_whether_a_container_works_is_unknown_unless_nobody_else_uses_it(
    docker_engine: DockerDaemon, sole_client: bool, activity: str
) -> None:
    docker_engine.make("held", "sleep", "1000")
    at = await plain(docker_engine, sole_client=sole_client)
    try:
        reading = await at.provider.look()
        signs = await at.provider.signs("m")
        at.docker.remove("held")
    finally:
        await at.close()

    assert (reading.activity, reading.resident, reading.models) == (activity, None, ())
    assert signs.activity == activity


async def test_a_url_must_answer_200_too(docker_engine: DockerDaemon) -> None:
    docker_engine.make("held", "sleep", "1000")
    async with FakeLlamaCpp() as server:
        at = await plain(docker_engine, url=server.url + "/health")
        try:
            well = await at.provider.look()
            server.faults["/health"] = Fault("status")
            ill = await at.provider.look()
            docker_engine.remove("held")
        finally:
            await at.close()

    assert (well.healthy, ill.healthy) == (True, False)
    assert "status 5" in (ill.error or "")


async def test_a_health_check_of_the_container_counts(docker_engine: DockerDaemon) -> None:
    second = 1_000_000_000
    check = {"test": ["CMD", "false"], "interval": second // 5, "retries": 1, "timeout": second}
    docker_engine.make("held", "sleep", "1000", healthcheck=check)
    at = await plain(docker_engine)
    try:

        async def ill() -> str | None:
            error = (await at.provider.look()).error or ""
            return error if "unhealthy" in error else None

        error = await until_answered(ill, "its health check to say so")
    finally:
        await at.close()
        docker_engine.remove("held")

    assert error == "the health check of its container held says unhealthy"


# --- KataGo


async def test_loading_starts_the_engine_which_stays_until_it_is_released(go: Subject) -> None:
    before = await go.provider.look()
    await go.provider.load("katago", on_cpu=False)
    await go.provider.load("go", on_cpu=False)
    held = await go.provider.look()
    running = go.docker.processes("kata", "katago")
    await go.provider.release(None)
    after = await go.provider.look()

    assert (before.resident, before.activity, before.models) == ((), "idle", ("katago", "go"))
    row = go.provider.find(held, "katago")
    assert row is not None
    assert row == go.provider.find(held, "go")
    assert row.size_bytes == NETWORK == await go.provider.model_bytes("go")
    assert len(running) == 1
    assert (after.resident, go.docker.processes("kata", "katago")) == ((), [])


async def test_an_analysis_gives_progress_and_the_answer_under_the_jobs_own_id(go: Subject) -> None:
    tokens, result = await analysed(go, model="go", rules="chinese", id="mine", moves=[["B", "Q4"]])

    assert tokens == [""]
    assert result.output == {"id": "mine", "isDuringSearch": False, "turnNumber": 0, "rootInfo": {"visits": 8}}
    assert (result.text, result.message, result.model) == (None, None, "katago")


async def test_an_analysis_of_several_turns_gives_them_in_order(go: Subject) -> None:
    _, result = await analysed(go, analyzeTurns=[0, 1])

    assert [answer["turnNumber"] for answer in result.output] == [0, 1]
    assert all("id" not in answer for answer in result.output)


async def test_what_the_engine_refuses_is_an_error_with_its_words_and_it_goes_on(go: Subject) -> None:
    with pytest.raises(RuntimeFailure) as caught:
        await analysed(go, rules="bad")
    _, result = await analysed(go, rules="chinese")

    assert caught.value.reason is Reason.RUNTIME_ERROR
    assert caught.value.detail == "KataGo: Could not parse rules: bad (field rules)"
    assert result.output["rootInfo"] == {"visits": 8}


async def test_an_analysis_that_is_a_command_to_the_engine_is_refused(go: Subject) -> None:
    with pytest.raises(RuntimeFailure) as caught:
        await analysed(go, action="terminate_all")

    assert caught.value.reason is Reason.UNSUPPORTED_TASK


async def test_an_engine_that_crashes_under_a_job_is_told_with_its_last_words_and_started_anew(go: Subject) -> None:
    with pytest.raises(RuntimeFailure) as caught:
        await analysed(go, rules="crash")
    gone = await go.provider.look()
    _, result = await analysed(go, rules="chinese")

    assert caught.value.reason is Reason.RUNTIME_CUT
    assert "KataGo ended with exit code 134" in caught.value.detail
    assert "StringError" in caught.value.detail
    assert gone.resident == ()
    assert result.output


async def test_a_container_that_is_removed_under_a_job_ends_it_and_is_proven_gone(go: Subject) -> None:
    async with aclosing(
        go.provider.run("katago", "analysis", Work(analysis={"rules": "slow"}), on_cpu=False)
    ) as running:
        assert await anext(running) == Token("")
        go.docker.remove("kata")
        with pytest.raises(RuntimeFailure) as caught:
            await anext(running)

    assert caught.value.reason is Reason.RUNTIME_CUT
    assert (await go.provider.signs("katago")).activity == "idle"
    assert not (await go.provider.look()).healthy


async def test_a_run_that_is_left_early_ends_the_engine_and_leaves_the_runtime_usable(go: Subject) -> None:
    async with aclosing(
        go.provider.run("katago", "analysis", Work(analysis={"rules": "slow"}), on_cpu=False)
    ) as running:
        async for item in running:
            assert item == Token("")
            break
        during = await go.provider.signs("katago")
    proof = StopProof(during)
    after = await go.provider.signs("katago")
    left = go.docker.processes("kata", "katago")
    _, result = await analysed(go, rules="chinese")

    assert during.activity == "busy"
    assert not StopProof(during).shown_by(during)
    assert proof.shown_by(after)
    assert left == []
    assert result.output


async def test_a_run_that_is_cancelled_ends_the_engine(go: Subject) -> None:
    begun = asyncio.Event()

    async def run() -> None:
        async with aclosing(
            go.provider.run("katago", "analysis", Work(analysis={"rules": "slow"}), on_cpu=False)
        ) as running:
            async for _ in running:
                begun.set()

    task = asyncio.create_task(run())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert go.docker.processes("kata", "katago") == []


async def test_a_run_that_is_left_early_costs_no_other_job_its_answer(go: Subject) -> None:
    async with (
        aclosing(go.provider.run("katago", "analysis", Work(analysis={"rules": "slow"}), on_cpu=False)) as stays,
    ):
        assert await anext(stays) == Token("")
        async with aclosing(
            go.provider.run("katago", "analysis", Work(analysis={"rules": "slow"}), on_cpu=False)
        ) as leaves:
            assert await anext(leaves) == Token("")
        still_there = len(go.docker.processes("kata", "katago"))
        with pytest.raises(RuntimeFailure) as refused:
            await go.provider.release(None)
        _, result = await analysed(go, rules="chinese")

    assert still_there == 1
    assert refused.value.reason is Reason.OWNER_BUSY
    assert result.output


async def test_runs_at_once_do_not_mix(go: Subject) -> None:
    results = await asyncio.gather(*(analysed(go, rules="chinese", id=str(number)) for number in range(4)))

    assert [result.output["id"] for _, result in results] == ["0", "1", "2", "3"]
    assert len(go.docker.processes("kata", "katago")) == 1


async def test_an_engine_that_cannot_start_fails_the_load_with_its_own_words(go: Subject) -> None:
    touch = await go.steward.engine.exec("kata", ("sh", "-c", ": > /app/refuse"))
    assert await touch.line() is None
    await touch.kill()

    with pytest.raises(RuntimeFailure) as caught:
        await go.provider.load("katago", on_cpu=False)

    assert caught.value.reason is Reason.LOAD_FAILED
    assert "KataGo ended with exit code 3: " in caught.value.detail
    assert "CUDA error: out of memory" in caught.value.detail
    assert (await go.provider.look()).resident == ()


async def test_a_command_that_is_not_in_the_image_fails_the_load_with_the_engines_words(
    docker_engine: DockerDaemon,
) -> None:
    docker_engine.make("bare", "sleep", "1000")
    config = RuntimeConfig(name="go", provider="katago", container="bare", command=("/no/such/katago",))
    at = Subject(docker_engine, config)
    try:
        with pytest.raises(RuntimeFailure) as caught:
            await at.provider.load("katago", on_cpu=False)
        size = await at.provider.model_bytes("katago")
    finally:
        await at.close()
        docker_engine.remove("bare")

    assert caught.value.reason is Reason.LOAD_FAILED
    assert "/no/such/katago" in caught.value.detail
    assert size is None


async def test_a_load_that_is_given_up_leaves_no_engine_behind(docker_engine: DockerDaemon) -> None:
    docker_engine.make("slow-start", "sleep", "1000")
    command = ("sh", "-c", "echo up >&2; sleep 4001; exec katago")
    config = RuntimeConfig(name="go", provider="katago", container="slow-start", command=command)
    at = Subject(docker_engine, config)
    try:
        loading = asyncio.create_task(at.provider.load("katago", on_cpu=False))

        async def started() -> bool:
            return bool(docker_engine.processes("slow-start", "4001"))

        await until_answered(started, "the load to begin")
        busy = (await at.provider.signs("katago")).activity
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        left = docker_engine.processes("slow-start", "4001")
        idle = (await at.provider.signs("katago")).activity
    finally:
        await at.close()
        docker_engine.remove("slow-start")

    assert (busy, left, idle) == ("busy", [], "idle")


async def test_closing_ends_the_engine(go: Subject) -> None:
    assert isinstance(go.provider, KataGo)
    await go.provider.load("katago", on_cpu=False)
    await go.provider.close()

    assert go.docker.processes("kata", "katago") == []
