"""What KataGo's analysis engine takes and gives: one JSON object a line, told apart by ``id``. Pure."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from gpukeeper.agents.runtimes.failures import shown
from gpukeeper.agents.runtimes.port import RuntimeFailure
from gpukeeper.events.reasons import Reason


class Answer(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The fields that steer; the rest of a line is passed on as it is."""

    id: str | None = None
    error: str | None = None
    warning: str | None = None
    field: str | None = None
    action: str | None = None
    is_during_search: bool = False


_decoder = msgspec.json.Decoder(Answer)


def read(line: bytes) -> Answer:
    """One line of the engine's output.

    Raises:
        RuntimeFailure: it is not what the protocol says.
    """
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RuntimeFailure(Reason.RUNTIME_BAD_REPLY, f"KataGo: {error}: {shown(line)}") from error


def question(analysis: dict[str, Any], run_id: str) -> bytes:
    """The line that asks for ``analysis`` under an id of our own.

    Raises:
        RuntimeFailure: it is no analysis but a command to the engine, which would touch other jobs.
    """
    if "action" in analysis:
        raise RuntimeFailure(Reason.UNSUPPORTED_TASK, "an analysis with an action is a command to the whole engine")
    return msgspec.json.encode({**analysis, "id": run_id}) + b"\n"


def action(name: str, run_id: str, **more: str) -> bytes:
    """The line of a command to the engine."""
    return msgspec.json.encode({"id": run_id, "action": name, **more}) + b"\n"


def turns(analysis: dict[str, Any]) -> int:
    """How many final answers there will be: one for each turn that is asked for."""
    asked: object = analysis.get("analyzeTurns")
    return len(set(map(str, cast("list[object]", asked)))) if isinstance(asked, list) and asked else 1


def output(lines: list[bytes], analysis: dict[str, Any]) -> Any:
    """What a job gets: the answer, or a list of them in the order of their turns, with the job's own id where it
    had one."""
    answers: list[dict[str, Any]] = [msgspec.json.decode(line, type=dict[str, Any]) for line in lines]
    for answer in answers:
        answer.pop("id", None)
        if "id" in analysis:
            answer["id"] = analysis["id"]
    if turns(analysis) == 1:
        return answers[0]
    return sorted(answers, key=lambda answer: str(answer.get("turnNumber", "")).zfill(8))


def model_file(command: tuple[str, ...]) -> str | None:
    """The path behind ``-model``, where the command names one."""
    return next((command[at + 1] for at, word in enumerate(command[:-1]) if word == "-model"), None)
