"""What may be asked about a job, and what is answered: the wire format of ``gpuq.ask.job``. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from gpukeeper.events.ids import TOKEN_PATTERN, TOKEN_RULE
from gpukeeper.events.spec import Problem, Token
from gpukeeper.events.work import JobResult, ObjectRef, Strict

WAIT_S_MAX = 60.0
WAIT_S_DEFAULT = 10.0
#: Far more than any question takes.
QUESTION_BYTES_MAX = 4096

Until = Literal["known", "answered", "ended"]
#: What a submission is that nobody has answered; the other phases are those of a job.
SUBMITTED_PHASE = "submitted"

#: Why there is no answer. ``unknown_*``: not within the wait. ``busy``, ``stopping``, ``log_unavailable``: ask again.
Code = Literal["invalid", "unknown_job", "unknown_submission", "busy", "stopping", "log_unavailable", "internal"]
_RETRYABLE: frozenset[Code] = frozenset({"busy", "stopping", "log_unavailable"})


class Question(Strict, frozen=True, kw_only=True):
    """Exactly one of ``job`` (its handle) and ``submission_seq`` (from the acknowledgement of its submission)."""

    job: Token | None = None
    submission_seq: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)] | None = None
    #: The answer comes when this holds: the submission is in the log, it is answered, the job has ended.
    until: Until = "answered"
    #: The answer comes after this many seconds at the latest, whatever holds then.
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=WAIT_S_MAX)] = WAIT_S_DEFAULT

    @property
    def key(self) -> int | str:
        """What it is about: a sequence of the log, or a job's handle."""
        if self.job is not None:
            return self.job
        assert self.submission_seq is not None, "parse_question() lets nothing else through"
        return self.submission_seq


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the job, as of ``seq``. The fields with a default are there only where they say something."""

    #: None while the submission is not answered.
    job: str | None
    #: The submission that made the job: an earlier one than that asked about, where that was a repetition.
    submission_seq: int
    #: ``submitted``, or where the job is.
    phase: str
    ended: bool
    #: Whether the wait was over before what was waited for.
    timed_out: bool
    reason: str
    detail: str
    attempt: int
    #: Where it was sent last.
    host: str | None
    device: str | None
    #: 1 is the next; None where it does not wait.
    queue_place: int | None
    tokens: int
    #: The newest event on the job's subject, or the submission while it is not answered.
    seq: int
    problems: tuple[Problem, ...] | msgspec.UnsetType = msgspec.UNSET
    result: JobResult | msgspec.UnsetType = msgspec.UNSET
    #: The result in the object store, where it was too large for an event.
    result_ref: ObjectRef | msgspec.UnsetType = msgspec.UNSET
    #: Fields that should be here and are not: too large for one message, or not kept any more.
    omitted: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why there is no answer."""

    code: Code
    message: str

    @property
    def retryable(self) -> bool:
        """Whether the same question may be answered later, with no change by who asks."""
        return self.code in _RETRYABLE


class AskError(msgspec.Struct, frozen=True):
    """A refusal, and whether the same question may be answered later with no change by who asks."""

    code: str
    message: str
    retryable: bool


class ErrorAnswer(msgspec.Struct, frozen=True):
    """The bytes of a refusal."""

    error: AskError


_decode = msgspec.json.Decoder(Question).decode
_encode = msgspec.json.Encoder().encode


def parse_question(raw: bytes) -> Question | Refusal:
    """Read a question. Total over all bytes."""
    if len(raw) > QUESTION_BYTES_MAX:
        return _invalid(f"{len(raw)} bytes; a question has at most {QUESTION_BYTES_MAX}")
    try:
        question = _decode(raw)
    except msgspec.ValidationError as error:
        return _invalid(str(error).replace(f"matching regex {TOKEN_PATTERN!r}", f"of {TOKEN_RULE}"))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return _invalid(f"not JSON: {error}")
    if (question.job is None) == (question.submission_seq is None):
        return _invalid("give exactly one of job and submission_seq")
    return question


def encode_refusal(refusal: Refusal) -> bytes:
    return _encode(ErrorAnswer(AskError(refusal.code, refusal.message, refusal.retryable)))


def encode_answer(answer: Answer, bytes_max: int) -> bytes:
    """The bytes of an answer, without its largest fields where it would be longer than ``bytes_max``."""
    encoded = _encode(answer)
    for field in ("result", "problems"):
        if len(encoded) <= bytes_max:
            break
        if getattr(answer, field) is not msgspec.UNSET:
            left_out = () if answer.omitted is msgspec.UNSET else answer.omitted
            changes = {field: msgspec.UNSET, "omitted": (*left_out, field)}
            answer = msgspec.structs.replace(answer, **changes)
            encoded = _encode(answer)
    return encoded


def _invalid(message: str) -> Refusal:
    return Refusal(code="invalid", message=message)
