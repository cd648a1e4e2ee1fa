"""What a container's state means for the runtime in it."""

from __future__ import annotations

import pytest

from gpukeeper.agents.containers.docker_engine import read_state
from gpukeeper.agents.containers.port import ContainerFailure, ContainerState, Status
from gpukeeper.agents.containers.standing import trouble, with_container
from gpukeeper.events.readings import RuntimeReading
from gpukeeper.events.reasons import Reason

AT = "2026-01-01T00:00:00Z"
WELL = RuntimeReading(runtime="r", read_at=AT, healthy=True, activity="idle", models=("m",))
SILENT = RuntimeReading(runtime="r", read_at=AT, healthy=False, error="connection refused")


def state(status: Status, **fields: object) -> ContainerState:
    return ContainerState(name="box", read_at=AT, status=status, **fields)  # type: ignore[arg-type]


def test_a_running_container_changes_nothing() -> None:
    assert with_container(WELL, state("running")) is WELL
    assert with_container(SILENT, state("running")) is SILENT


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("exited", "its container box is stopped"),
        ("dead", "its container box is stopped"),
        ("created", "was never started"),
        ("paused", "is paused: it keeps its memory"),
        ("restarting", "keeps ending and is being restarted"),
        ("removing", "is being removed"),
        ("missing", "its container box does not exist"),
    ],
)
def test_a_container_that_cannot_work_makes_its_runtime_unhealthy_in_words(status: Status, words: str) -> None:
    for reading in (WELL, SILENT):
        seen = with_container(reading, state(status))

        assert not seen.healthy
        assert seen.error is not None
        assert words in seen.error
    assert "connection refused" in (with_container(SILENT, state(status)).error or "")


def test_what_answers_while_the_container_is_stopped_is_named_as_something_else() -> None:
    assert "something answers in its place" in (with_container(WELL, state("exited")).error or "")


def test_c34_a_crash_looping_container_is_unhealthy_even_while_it_answers() -> None:
    seen = with_container(WELL, state("running", crash_looping="it was restarted 5 times", exit_code=1))

    assert not seen.healthy
    assert seen.error == "its container box is crash-looping: it was restarted 5 times (exit code 1)"


def test_an_engine_that_cannot_be_asked_matters_only_where_the_runtime_is_silent() -> None:
    unknown = state("unknown", error="no permission")

    assert with_container(WELL, unknown) is WELL
    silent = with_container(SILENT, unknown)
    assert not silent.healthy
    assert silent.error == "connection refused; nor can its container box be looked at: no permission"


def test_the_words_of_a_start_that_failed_after_a_reboot_are_kept() -> None:
    answer = {
        "Id": "abc",
        "Created": AT,
        "RestartCount": 0,
        "State": {
            "Status": "exited",
            "Running": False,
            "Restarting": False,
            "OOMKilled": False,
            "ExitCode": 128,
            "Error": "error gathering device information: stat /dev/nvidia-uvm-tools: no such file or directory",
        },
    }

    seen = read_state("box", answer, AT)

    assert seen.exit_code == 128
    assert trouble(seen) == (
        "its container box is stopped (exit code 128; error gathering device information: "
        "stat /dev/nvidia-uvm-tools: no such file or directory)"
    )


def test_a_container_that_ran_out_of_memory_says_so() -> None:
    assert "killed for lack of the host's memory" in (trouble(state("exited", oom_killed=True, exit_code=137)) or "")


def test_a_state_that_no_version_of_ours_knows_is_unknown_with_the_engines_word() -> None:
    seen = read_state("box", {"Id": "a", "State": {"Status": "hibernating"}}, AT)

    assert (seen.status, seen.error) == ("unknown", "the engine calls its state 'hibernating'")
    assert seen.restart_count is None


@pytest.mark.parametrize("answer", [None, [], {}, {"Id": "a"}, {"Id": "a", "State": {"Status": 3}}, "<html>"])
def test_an_answer_that_is_none_is_a_bad_reply(answer: object) -> None:
    with pytest.raises(ContainerFailure) as caught:
        read_state("box", answer, AT)

    assert (caught.value.fault, caught.value.reason) == ("bad_reply", Reason.CONTAINER_ENGINE)
