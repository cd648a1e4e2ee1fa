"""The closed list of reason codes. Every wait, refusal and end of a job names one of them."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Why a job waits, was refused or ended. The comment says what a user can do about it.

    A code that a newer version wrote is carried as it is: it equals its text and is in no list here.
    """

    # --- waits
    CAPACITY = "capacity"  #: every device that could take the job is in use: wait, or free one
    NO_ROUTE = "no_route"  #: no live host offers what the job asks for: start or repair one
    DENIED = "denied"  #: the agent's live readings did not allow the job: see its `denied` event
    HANDED_BACK = "handed_back"  #: the agent gave the job back before it had started
    CLAIM_LAPSED = "claim_lapsed"  #: the claim lapsed before the job had started: queued again, a few times

    # --- refusals at submission
    INVALID = "invalid"  #: the submission is malformed: the problems name the fields
    DUPLICATE_ID = "duplicate_id"  #: the id belongs to a job with another body: choose another id
    UNKNOWN_KIND = "unknown_kind"  #: the kind is not configured
    UNKNOWN_HOST = "unknown_host"  #: no host of that name has ever joined
    UNKNOWN_DEVICE = "unknown_device"  #: the named device does not exist
    UNKNOWN_RUNTIME = "unknown_runtime"  #: no host lists a runtime of that name
    UNKNOWN_MODEL = "unknown_model"  #: no runtime has the model
    NEED_EXCEEDS_DEVICES = "need_exceeds_devices"  #: larger than every device even when empty

    # --- refusals by the agent's live decision
    INSUFFICIENT = "insufficient"  #: too little usable memory on the device now
    DEVICE_UNKNOWN = "device_unknown"  #: the device could not be read: unknown is never free
    DEVICE_LOST = "device_lost"  #: the device fell off the bus
    RUNTIME_UNREACHABLE = "runtime_unreachable"  #: the runtime does not answer
    RESIDENCY_UNKNOWN = "residency_unknown"  #: the runtime did not say what it holds
    NEED_UNKNOWN = "need_unknown"  #: nobody declared or reported how much memory the model takes

    DEVICE_BLOCKED = "device_blocked"  #: an owner of its memory did not let go: see its `reclaim_failed` event
    DRAINED = "drained"  #: an operator took the device out of service: `gpuq resume` puts it back
    MODEL_MISSING = "model_missing"  #: the runtime lacks the model and may not fetch it: see `pull` in the registry

    # --- why an owner of memory stays
    PINNED = "pinned"  #: somebody pinned it: `gpuq unpin`
    IN_GRACE = "in_grace"  #: not idle for long enough yet
    OWNER_BUSY = "owner_busy"  #: it works, or loads, or a job holds it
    ACTIVITY_UNKNOWN = "activity_unknown"  #: nobody can tell whether it works: unknown is not idle
    NOT_RELEASABLE = "not_releasable"  #: it has no safe way to let go, or may not be asked to
    OTHER_DEVICE = "other_device"  #: it does not sit on this device, or nobody can tell
    UNMANAGED = "unmanaged"  #: it is not in the registry: never touched
    NOT_NEEDED = "not_needed"  #: others that hold less are enough

    # --- ends
    HANDOFF_TIMEOUT = "handoff_timeout"  #: an owner accepted to let go and did not within its time
    RELEASE_FAILED = "release_failed"  #: an owner refused to let go, or the device does not show that it did
    PROVISION_FAILED = "provision_failed"  #: the model could not be fetched: the event has the runtime's words
    RUN_LOST = "run_lost"  #: the runtime knows nothing of the run any more: it is not run again
    UNSUPPORTED_TASK = "unsupported_task"  #: this kind of runtime cannot do such a task
    CPU_FALLBACK = "cpu_fallback"  #: the model does not sit in VRAM as intended
    PLACEMENT_UNKNOWN = "placement_unknown"  #: figures missing or impossible: never a pass
    PLACEMENT_DISPUTED = "placement_disputed"  #: the runtime's figures and the device's reading disagree
    LOAD_FAILED = "load_failed"  #: the runtime could not load the model
    RUNTIME_ERROR = "runtime_error"  #: the runtime answered with an error
    RUNTIME_BUSY = "runtime_busy"  #: the runtime refused because its own queue is full
    RUNTIME_BAD_REPLY = "runtime_bad_reply"  #: the runtime's answer is not what its protocol says
    RUNTIME_EMPTY_REPLY = "runtime_empty_reply"  #: the runtime answered with nothing
    RUNTIME_CUT = "runtime_cut"  #: the connection ended in mid-answer
    BODY_MISSING = "body_missing"  #: the external body is gone or does not match its digest
    DEADLINE = "deadline"  #: a clock of the job expired: the event names it
    CANCELLED = "cancelled"  #: somebody cancelled it: the event names the actor
    AGENT_STOPPING = "agent_stopping"  #: the agent was told to stop and its grace ended
    INTERNAL = "internal"  #: a fault in gpukeeper itself: the agent's log has the traceback; please report it
    OUTCOME_UNKNOWN = "outcome_unknown"  #: the claim lapsed while the job ran: nobody knows how it ended

    # --- refused commands
    UNKNOWN_JOB = "unknown_job"  #: no such job
    ALREADY_ENDED = "already_ended"  #: the job has ended; ends are final
    NO_CONTAINER = "no_container"  #: the runtime's registry entry names no container
    CRASH_LOOPING = "crash_looping"  #: its container keeps restarting: repair it first
    CONTAINER_ENGINE = "container_engine"  #: the container engine refused or could not be asked
    INVALID_COMMAND = "invalid_command"  #: the command is malformed

    @classmethod
    def _missing_(cls, value: object) -> Reason | None:
        if not isinstance(value, str):
            return None
        carried = str.__new__(cls, value)
        carried._name_ = value.upper()
        carried._value_ = value
        return carried
