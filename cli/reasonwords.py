"""Reason codes in words, for people. The code itself is always shown beside them."""

from __future__ import annotations

from collections.abc import Mapping

from gpukeeper.events.reasons import Reason

#: By code: a reason equals its text.
WORDS: Mapping[str, str] = {
    Reason.CAPACITY: "every device that could take it is in use",
    Reason.NO_ROUTE: "no live host offers what it asks for",
    Reason.DENIED: "the live readings of the device did not allow it",
    Reason.HANDED_BACK: "its agent gave it back before it had started",
    Reason.CLAIM_LAPSED: "its claim lapsed before it had started",
    Reason.INVALID: "the submission is malformed",
    Reason.DUPLICATE_ID: "the id belongs to a job with another body",
    Reason.UNKNOWN_KIND: "no such kind of job is configured",
    Reason.UNKNOWN_HOST: "no host of that name ever joined",
    Reason.UNKNOWN_DEVICE: "there is no such device",
    Reason.UNKNOWN_RUNTIME: "no host lists such a runtime",
    Reason.UNKNOWN_MODEL: "no runtime has the model",
    Reason.NEED_EXCEEDS_DEVICES: "it needs more than any device has",
    Reason.INSUFFICIENT: "too little memory is free on the device",
    Reason.DEVICE_UNKNOWN: "the device could not be read",
    Reason.DEVICE_LOST: "the device is lost",
    Reason.RUNTIME_UNREACHABLE: "the runtime does not answer",
    Reason.RESIDENCY_UNKNOWN: "the runtime did not say what it holds",
    Reason.NEED_UNKNOWN: "nobody said how much memory the model takes",
    Reason.DEVICE_BLOCKED: "an owner of the device's memory did not let go",
    Reason.DRAINED: "an operator took the device out of service",
    Reason.MODEL_MISSING: "the runtime lacks the model and may not fetch it",
    Reason.PINNED: "it is pinned",
    Reason.IN_GRACE: "it has not been idle for long enough yet",
    Reason.OWNER_BUSY: "it works, loads, or a job holds it",
    Reason.ACTIVITY_UNKNOWN: "nobody can tell whether it works, and unknown is not idle",
    Reason.NOT_RELEASABLE: "it has no safe way to let go, or may not be asked to",
    Reason.OTHER_DEVICE: "it does not sit on this device, or nobody can tell how much of it",
    Reason.UNMANAGED: "it is not in the registry, so it is never touched",
    Reason.NOT_NEEDED: "less is enough",
    Reason.HANDOFF_TIMEOUT: "an owner agreed to let go and did not within its time",
    Reason.RELEASE_FAILED: "an owner refused to let go, or the device does not show that it did",
    Reason.PROVISION_FAILED: "the model could not be fetched",
    Reason.RUN_LOST: "the runtime knows nothing of the run any more",
    Reason.UNSUPPORTED_TASK: "this kind of runtime cannot do such a task",
    Reason.CPU_FALLBACK: "the model does not sit in VRAM as intended",
    Reason.PLACEMENT_UNKNOWN: "nobody can tell where the model sits",
    Reason.PLACEMENT_DISPUTED: "runtime and device disagree about where the model sits",
    Reason.LOAD_FAILED: "the runtime could not load the model",
    Reason.RUNTIME_ERROR: "the runtime answered with an error",
    Reason.RUNTIME_BUSY: "the runtime's own queue is full",
    Reason.RUNTIME_BAD_REPLY: "the runtime's answer broke its protocol",
    Reason.RUNTIME_EMPTY_REPLY: "the runtime answered with nothing",
    Reason.RUNTIME_CUT: "the runtime's answer ended in the middle",
    Reason.BODY_MISSING: "the body in the object store is gone or changed",
    Reason.DEADLINE: "a clock of the job ran out",
    Reason.CANCELLED: "somebody cancelled it",
    Reason.AGENT_STOPPING: "the agent was stopped",
    Reason.INTERNAL: "a fault in gpukeeper itself",
    Reason.OUTCOME_UNKNOWN: "its agent fell silent while it ran",
    Reason.UNKNOWN_JOB: "there is no such job",
    Reason.ALREADY_ENDED: "the job has ended already",
    Reason.NO_CONTAINER: "the runtime's registry entry names no container",
    Reason.CRASH_LOOPING: "its container keeps restarting",
    Reason.CONTAINER_ENGINE: "the container engine refused or could not be asked",
    Reason.INVALID_COMMAND: "the command is malformed",
}


def in_words(code: str, detail: str = "") -> str:
    """``capacity: every device that could take it is in use (cpu: no free slot)``; empty for no reason."""
    if not code:
        return detail
    words = WORDS.get(code)
    said = f"{code}: {words}" if words else code
    return f"{said} ({detail})" if detail else said
