"""A job's body: in its submission, or in the object store that the submission names."""

from __future__ import annotations

import msgspec

from gpukeeper.agents.room import HostRoom
from gpukeeper.agents.writer import patiently
from gpukeeper.events.objects import get_body
from gpukeeper.events.spec import Need, Residency, Submission, parse_submission
from gpukeeper.events.work import Task, Work, task_of


class Body(msgspec.Struct, frozen=True):
    """What to do, and what it needs."""

    task: Task
    model: str
    work: Work
    need: Need
    residency: Residency | None = None


class BodyMissing(msgspec.Struct, frozen=True):
    """The body is gone, or is not what the submission says."""

    detail: str


async def fetch_body(room: HostRoom, submission_seq: int) -> Body | BodyMissing:
    """Read the body of the job that was submitted at ``submission_seq``."""
    stored = await patiently(lambda: room.log.get(submission_seq))
    parsed = None if stored is None else parse_submission(stored.body)
    if not isinstance(parsed, Submission):
        return BodyMissing(f"no readable submission at sequence {submission_seq}")
    spec = parsed.spec
    ref = spec.body
    if ref is None:
        return Body(parsed.task, spec.model, spec, spec.need, spec.residency)
    raw = await patiently(lambda: get_body(room.payloads, ref))
    if raw is None:
        return BodyMissing(f"object {ref.object} is gone or was changed")
    try:
        work = msgspec.json.decode(raw, type=Work)
    except (msgspec.MsgspecError, RecursionError) as error:
        return BodyMissing(f"object {ref.object} is no body of a job: {error}")
    if task_of(work) != parsed.task:
        return BodyMissing(f"object {ref.object} holds no body for {parsed.task!r}")
    return Body(parsed.task, spec.model, with_settings(work, spec), spec.need, spec.residency)


def with_settings(work: Work, spec: Work) -> Work:
    """``work`` with the settings that only ``spec`` gives: a body in the object store may leave them in the log."""
    names = [field.name for field in msgspec.structs.fields(Work)]
    missing = [name for name in names if getattr(work, name) is None and getattr(spec, name) is not None]
    return msgspec.structs.replace(work, **{name: getattr(spec, name) for name in missing})
