"""What the state of its container means for a runtime. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from gpukeeper.agents.containers.port import ContainerState
from gpukeeper.events.readings import RuntimeReading

_LOOPS = "is crash-looping"


def is_crash_looping(reading: RuntimeReading) -> bool:
    """Whether a reading that went through :func:`with_container` says so."""
    return not reading.healthy and _LOOPS in (reading.error or "")


def trouble(state: ContainerState) -> str | None:
    """Why nothing in this container can work now, in words; None where it may, or where nobody can say."""
    shown = f"its container {state.name}"
    if state.crash_looping is not None:
        return f"{shown} {_LOOPS}: {state.crash_looping}{_last_words(state)}"
    match state.status:
        case "running" | "unknown":
            return None
        case "missing":
            return f"{shown} does not exist"
        case "paused":
            return f"{shown} is paused: it keeps its memory and does nothing"
        case "restarting":
            return f"{shown} keeps ending and is being restarted{_last_words(state)}"
        case "created":
            return f"{shown} was never started, or could not be{_last_words(state)}"
        case "removing":
            return f"{shown} is being removed"
        case "exited" | "dead":
            return f"{shown} is stopped{_last_words(state)}"


def with_container(reading: RuntimeReading, state: ContainerState) -> RuntimeReading:
    """``reading`` of a runtime, given the state of the container it is said to run in.

    Unhealthy with words where the container cannot work. Where the engine could not be asked, the runtime's own
    answer decides, and only its failure gets the engine's words too.
    """
    why = trouble(state)
    if why is not None:
        if reading.healthy:
            # Something answers at the runtime's URL, though its container does not run: they do not belong together.
            also = "" if state.status in ("running", "restarting") else "; yet something answers in its place"
            return replace(reading, healthy=False, error=why + also)
        return replace(reading, healthy=False, error=_joined(why, reading.error))
    if state.status == "unknown" and not reading.healthy:
        engine = f"nor can its container {state.name} be looked at: {state.error or 'no further word'}"
        return replace(reading, error=_joined(reading.error or "it does not answer", engine))
    return reading


def _last_words(state: ContainerState) -> str:
    """What is known of its last end."""
    words: list[str] = []
    if state.exit_code:
        words.append(f"exit code {state.exit_code}")
    if state.oom_killed:
        words.append("killed for lack of the host's memory")
    if state.error:
        words.append(state.error)
    return f" ({'; '.join(words)})" if words else ""


def _joined(first: str, second: str | None) -> str:
    return first if not second or second == first else f"{first}; {second}"
