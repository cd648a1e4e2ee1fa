"""What a steward makes of what an engine says, and of what operators ask."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from gpukeeper.agents.config import AgentConfig, RuntimeConfig
from gpukeeper.agents.containers.port import ContainerFailure, ContainerState, Status
from gpukeeper.agents.containers.steward import Steward
from gpukeeper.events.reasons import Reason
from gpukeeper.events.runtime import Act
from support.scripted_engine import ScriptedEngine

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


class Desk:
    """A steward with a clock that a test moves."""

    def __init__(self) -> None:
        self.engine = ScriptedEngine()
        self.now_s = 1000.0
        runtimes = (
            RuntimeConfig(name="r", provider="container", container="box"),
            RuntimeConfig(name="bare", provider="ollama", url="http://127.0.0.1:1"),
        )
        self.steward = Steward(
            AgentConfig(host="h", runtimes=runtimes), self.engine, monotonic_s=lambda: self.now_s, wall=lambda: NOW
        )

    async def crash(self, times: int) -> ContainerState:
        state = await self.steward.look("box")
        for _ in range(times):
            self.now_s += 5
            self.engine.restart_count += 1
            state = await self.steward.look("box")
        return state


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.mark.parametrize("act", ["begin", "restart"])
async def test_c34_a_container_that_crash_loops_is_not_started_by_us_again(desk: Desk, act: Act) -> None:
    state = await desk.crash(35)

    outcome = await desk.steward.perform("r", act)

    assert state.crash_looping is not None
    assert "35 in all" in state.crash_looping
    assert (outcome.done, outcome.reason) == (False, Reason.CRASH_LOOPING)
    assert "crash-looping" in outcome.detail
    assert desk.engine.acts == []


async def test_a_container_that_crash_loops_may_be_stopped_and_stays_barred_until_the_window_is_over(
    desk: Desk,
) -> None:
    await desk.crash(3)
    desk.engine.after = {"stop": "exited", "start": "running"}

    stopped = await desk.steward.perform("r", "stop")
    desk.now_s += 580
    barred = await desk.steward.perform("r", "begin")
    desk.now_s += 10
    begun = await desk.steward.perform("r", "begin")

    assert (stopped.done, barred.reason, begun.done) == (True, Reason.CRASH_LOOPING, True)
    assert desk.engine.acts == ["stop", "start"]


async def test_an_engine_that_is_silent_for_a_while_makes_nobody_forget_a_crash_loop(desk: Desk) -> None:
    await desk.crash(3)
    desk.engine.failure = ContainerFailure("slow", "no answer")

    state = await desk.steward.look("box")

    assert (state.status, state.error) == ("unknown", "no answer")
    assert state.crash_looping is not None


async def test_a_container_that_was_removed_and_made_again_is_innocent(desk: Desk) -> None:
    await desk.crash(3)
    desk.engine.failure = ContainerFailure("missing", "No such container: box")
    gone = await desk.steward.look("box")
    desk.engine.failure = None
    desk.engine.restart_count = 0

    again = await desk.steward.look("box")

    assert (gone.status, gone.crash_looping, again.crash_looping) == ("missing", None, None)


async def test_restarts_of_a_container_made_within_the_window_count_at_the_first_look(desk: Desk) -> None:
    desk.engine.created_at = "2026-01-01T11:55:00.123456789Z"
    desk.engine.restart_count = 20

    state = await desk.steward.look("box")

    assert state.crash_looping is not None


async def test_a_container_made_again_that_already_restarted_often_is_no_less_guilty(desk: Desk) -> None:
    await desk.steward.look("box")
    desk.engine.id, desk.engine.created_at = "c2", "2026-01-01T11:59:00Z"
    desk.engine.restart_count = 3

    assert (await desk.steward.look("box")).crash_looping is not None


@pytest.mark.parametrize(
    "created_at", ["2026-01-01T11:45:00Z", "2026-01-01T12:00:10Z", "", "soon", "2026-01-01T11:59:00"]
)
async def test_restarts_from_before_the_first_look_are_no_evidence_otherwise(desk: Desk, created_at: str) -> None:
    desk.engine.created_at = created_at
    desk.engine.restart_count = 20

    assert (await desk.steward.look("box")).crash_looping is None


async def test_a_runtime_without_a_container_cannot_be_acted_on(desk: Desk) -> None:
    for name in ("bare", "nobody", "box"):
        outcome = await desk.steward.perform(name, "stop")

        assert (outcome.done, outcome.reason) == (False, Reason.NO_CONTAINER)
    assert await desk.steward.state_of("bare") is None
    assert desk.engine.acts == []


@pytest.mark.parametrize(
    ("before", "act", "acts"),
    [
        *(("running", "begin", []), ("exited", "begin", ["start"]), ("paused", "begin", ["unpause"])),
        *(("exited", "stop", []), ("running", "stop", ["stop"]), ("paused", "stop", ["unpause", "stop"])),
        *(("running", "restart", ["restart"]), ("paused", "restart", ["unpause", "restart"])),
        *(("exited", "restart", ["restart"]), ("created", "begin", ["start"])),
    ],
)
async def test_an_act_does_what_the_state_leaves_to_do(desk: Desk, before: Status, act: Act, acts: list[str]) -> None:
    desk.engine.status = before
    desk.engine.after = {"start": "running", "stop": "exited", "restart": "running", "unpause": "running"}

    outcome = await desk.steward.perform("r", act)

    assert outcome.done, outcome.detail
    assert desk.engine.acts == acts


async def test_an_act_that_the_engine_accepts_and_that_changes_nothing_is_not_done(desk: Desk) -> None:
    stopped = await desk.steward.perform("r", "stop")
    desk.engine.status = "exited"
    begun = await desk.steward.perform("r", "begin")

    assert (stopped.done, stopped.detail) == (False, "box is running after it was stopped")
    assert (begun.done, begun.detail) == (False, "begun, and its container box is stopped (exit code 1)")


async def test_an_act_on_what_cannot_be_looked_at_is_refused_with_the_engines_words(desk: Desk) -> None:
    desk.engine.failure = ContainerFailure("denied", "no permission to use the socket")

    outcome = await desk.steward.perform("r", "stop")

    assert (outcome.reason, outcome.detail) == (Reason.CONTAINER_ENGINE, "no permission to use the socket")
    assert desk.engine.acts == []
