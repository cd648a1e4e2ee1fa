"""What a producer submits: the job's body, decoded strictly, with problems that name field, value and remedy."""

from __future__ import annotations

import difflib
import hashlib
import re
from typing import Annotated, Any, Literal, cast, get_args

import msgspec

from gpukeeper.events.fact import Record
from gpukeeper.events.ids import TOKEN_PATTERN, TOKEN_RULE
from gpukeeper.events.work import ROLES, ChatMessage, ObjectRef, Strict, Task, Work, task_of

NAME_PATTERN = r"^[^\x00-\x1f\x7f]*$(?!\n)"

Token = Annotated[str, msgspec.Meta(pattern=TOKEN_PATTERN)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256, pattern=NAME_PATTERN)]
Megabytes = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=2_592_000)]

Place = Literal["any", "gpu", "cpu"]
OnCapacity = Literal["wait", "reject"]
#: Of a model after a job: it stays for the runtime's keep-alive, goes at once, or stays until it is unpinned.
Residency = Literal["keep", "unload", "pin"]

#: CloudEvents type of a submission sent in an envelope.
SUBMITTED = "gpuq.job.submitted.v1"

#: Larger bodies belong in the object store.
INLINE_BYTES_MAX = 65_536

#: The id of the CloudEvent that brings a submission is repeated in the answer.
EVENT_ID_CHARS_MAX = 256

#: Lists and objects inside one another. A limit of our own, so that whether a body is readable does not depend on how
#: much of the stack its reader has left.
NESTING_MAX = 100


class Need(Strict, frozen=True, kw_only=True):
    """Memory a job asks for, in MB of 2^20 bytes. A missing figure is unknown, not 0."""

    #: On each of its devices.
    vram_mb: Megabytes | None = None
    #: Of the host's own memory.
    ram_mb: Megabytes | None = None
    #: On the host's disk.
    disk_mb: Megabytes | None = None
    #: How many GPUs of one host at once: claimed on all of them or on none.
    gpus: Annotated[int, msgspec.Meta(ge=1, le=64)] | None = None


class Deadlines(Strict, frozen=True, kw_only=True):
    """How long the job may spend in each phase, in seconds; the site's policy fills what is missing."""

    queue_s: Seconds | None = None
    load_s: Seconds | None = None
    first_byte_s: Seconds | None = None
    idle_s: Seconds | None = None
    run_s: Seconds | None = None


class JobSpec(Work, frozen=True, kw_only=True):
    """One submission. ``model`` and one of ``prompt``, ``messages``, ``input`` (or ``body``) are required."""

    model: Name
    #: Chosen by the producer, it makes a repeated submission one job.
    id: Token | None = None
    kind: Token = "inference"
    #: The name of one runtime in a host's registry; any runtime that has the model otherwise.
    runtime: Token | None = None
    host: Token | None = None
    device: Token | None = None
    #: The host that took the job: preferred on a tie.
    origin: Token | None = None
    place: Place = "any"
    priority: Annotated[int, msgspec.Meta(ge=-1000, le=1000)] | None = None
    need: Need = Need()
    deadlines: Deadlines = Deadlines()
    on_capacity: OnCapacity | None = None
    #: What happens to the model after the job: the runtime's own policy where it is not given.
    residency: Residency | None = None
    labels: dict[str, str] | None = None
    #: The body (``prompt`` and so on) in the object store, with ``task`` saying what it is.
    body: ObjectRef | None = None
    task: Task | None = None


class Problem(Record, frozen=True, kw_only=True):
    """One thing that is wrong with a submission."""

    #: Where: ``need.vram_mb``, ``messages[0].role``, ``data.need.vram_mb`` in a CloudEvent; empty for the whole.
    path: str
    message: str
    #: What was sent there, shortened.
    value: str | None = None


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A readable submission."""

    spec: JobSpec
    task: Task
    #: SHA-256 of the spec in canonical form: the same body has the same digest however it was written.
    digest: str
    #: The id of the CloudEvent it came in, where it did.
    event_id: str | None = None


class _Event(msgspec.Struct, frozen=True):
    specversion: str
    type: str = ""
    id: str = ""
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Probe(msgspec.Struct, frozen=True):
    """Only looks whether the object is a CloudEvent, without building the rest."""

    specversion: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_decode_probe = msgspec.json.Decoder(_Probe).decode
_decode_event = msgspec.json.Decoder(_Event).decode
_decode_spec = msgspec.json.Decoder(JobSpec).decode
_encode = msgspec.json.Encoder(order="deterministic").encode

_AT = re.compile(r" - at `\$?\.?(?P<path>[^`]*)`$")
_UNKNOWN_FIELD = re.compile(r"contains unknown field `(?P<field>[^`]*)`")
_MISSING_FIELD = re.compile(r"missing required field `(?P<field>[^`]*)`")

_FIELDS: dict[str, tuple[str, ...]] = {
    "": tuple(f.encode_name for f in msgspec.structs.fields(JobSpec)),
    "need": tuple(f.encode_name for f in msgspec.structs.fields(Need)),
    "deadlines": tuple(f.encode_name for f in msgspec.structs.fields(Deadlines)),
    "messages[]": tuple(f.encode_name for f in msgspec.structs.fields(ChatMessage)),
}
#: Each makes a job of another task; a job has one.
_BODIES = ("prompt", "messages", "input", "workflow", "analysis")
_DEFAULTS: dict[str, Any] = {f.name: f.default for f in msgspec.structs.fields(JobSpec)}
#: What may stand in a field with a closed list of values.
_CHOICES: dict[str, tuple[str, ...]] = {
    "place": get_args(Place),
    "on_capacity": get_args(OnCapacity),
    "residency": get_args(Residency),
    "task": get_args(Task),
    "messages[].role": ROLES,
}
_INDEX = re.compile(r"\[\d+\]")

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def parse_submission(raw: bytes) -> Submission | tuple[Problem, ...]:
    """Read a submission: a bare job body or a CloudEvent around one. Pure, and total over all bytes."""
    unreadable = _unreadable(raw)
    if unreadable is not None:
        return (unreadable,)
    try:
        is_event = _decode_probe(raw).specversion is not msgspec.UNSET
        if not is_event:
            return _parse_body(raw)
        event = _decode_event(raw)
    except msgspec.ValidationError as error:
        return (_explain(str(error), raw),)
    except msgspec.DecodeError as error:
        return (Problem(path="", message=f"not JSON: {error}", value=_shorten(raw.decode())),)
    if event.type != SUBMITTED:
        return (_problem("type", f"must be {SUBMITTED!r}", event.type),)
    if len(event.id) > EVENT_ID_CHARS_MAX:
        return (_problem("id", f"at most {EVENT_ID_CHARS_MAX} characters", event.id),)
    if event.data is msgspec.UNSET:
        return (Problem(path="data", message="required, but missing: the job's body as JSON"),)
    found = _parse_body(event.data, event_id=event.id or None)
    if isinstance(found, Submission):
        return found
    return tuple(msgspec.structs.replace(problem, path=_join("data", problem.path)) for problem in found)


def _unreadable(raw: bytes) -> Problem | None:
    """What no decoder need look at."""
    if raw.startswith(_BYTE_ORDER_MARK):
        return Problem(path="", message="begins with a byte order mark: send UTF-8 without one")
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        shown = _shorten(raw.decode("utf-8", "replace"))
        return Problem(path="", message=f"not UTF-8: {error.reason} at byte {error.start}", value=shown)
    if _nests_deeper(raw, NESTING_MAX):
        return Problem(path="", message=f"nested too deeply: at most {NESTING_MAX} lists and objects in one another")
    return None


def _nests_deeper(raw: bytes, limit: int) -> bool:
    if raw.count(b"[") + raw.count(b"{") <= limit:
        return False
    depth = 0
    for bracket in _BRACKET.finditer(_STRING.sub(b"", raw)):
        depth += 1 if bracket[0] in b"[{" else -1
        if depth > limit:
            return True
    return False


def _parse_body(body: bytes | msgspec.Raw, *, event_id: str | None = None) -> Submission | tuple[Problem, ...]:
    try:
        spec = _decode_spec(body)
    except msgspec.ValidationError as error:
        return (_explain(str(error), body),)
    return check(spec, event_id=event_id)


def check(spec: JobSpec, *, event_id: str | None = None) -> Submission | tuple[Problem, ...]:
    """The rules that types cannot say."""
    problems: list[Problem] = []
    task = task_of(spec)
    if spec.body is not None:
        if any(getattr(spec, name) is not None for name in _BODIES):
            problems.append(Problem(path="body", message=f"give either body or one of {', '.join(_BODIES)}"))
        if spec.task is None:
            problems.append(Problem(path="task", message="with body, say what it is: " + ", ".join(get_args(Task))))
        task = spec.task
    elif task is None:
        problems.append(Problem(path="", message=f"give exactly one of {', '.join(_BODIES)}"))
    elif spec.task not in (None, task):
        problems.append(_problem("task", f"the body given is for {task!r}", spec.task))
    if spec.messages is not None and not spec.messages:
        problems.append(Problem(path="messages", message="must hold at least one message", value="[]"))
    if spec.device is not None and spec.host is None:
        problems.append(_problem("device", "name its host too: devices are known by host and id", spec.device))
    if (spec.need.gpus or 1) > 1 and spec.device is not None:
        problems.append(
            _problem("device", f"names one, and need.gpus asks for {spec.need.gpus}: give one of the two", spec.device)
        )
    if (spec.need.gpus or 1) > 1 and spec.place == "cpu":
        problems.append(_problem("place", f"is cpu, and need.gpus asks for {spec.need.gpus}", spec.place))
    if problems or task is None:
        return tuple(problems)
    digest = hashlib.sha256(encode_spec(spec)).hexdigest()
    return Submission(spec=spec, task=task, digest=digest, event_id=event_id)


def encode_spec(spec: JobSpec) -> bytes:
    """The canonical JSON of a spec: sorted keys, and no field that says what would hold without it."""
    # The encoder's own omission of defaults goes by identity, so a default that was sent would be kept.
    said = {name: getattr(spec, name) for name in spec.__struct_fields__ if getattr(spec, name) != _DEFAULTS[name]}
    return _encode(said)


def _explain(error: str, body: bytes | msgspec.Raw) -> Problem:
    """Turn msgspec's sentence into field, value and remedy."""
    at = _AT.search(error)
    path = at["path"] if at else ""
    message = error[: at.start()] if at else error
    if unknown := _UNKNOWN_FIELD.search(message):
        field = _shorten(unknown["field"])
        allowed = _FIELDS.get(_INDEX.sub("[]", path), ())
        close = difflib.get_close_matches(field, allowed, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"allowed: {', '.join(allowed)}" if allowed else ""
        return Problem(path=_join(path, field), message=f"unknown field; {hint}".rstrip("; "))
    if missing := _MISSING_FIELD.search(message):
        return Problem(path=_join(path, missing["field"]), message="required, but missing")
    if repr(TOKEN_PATTERN) in message:
        message = f"must be {TOKEN_RULE}"
    elif repr(NAME_PATTERN) in message:
        message = "must have no control characters"
    elif message.startswith("Invalid enum value"):
        message = f"must be one of {', '.join(_CHOICES.get(_INDEX.sub('[]', path), ()))}"
    return _problem(path, message, _value_at(body, path))


def _join(path: str, field: str) -> str:
    return f"{path}.{field}" if path and field else path or field


def _value_at(body: bytes | msgspec.Raw, path: str) -> Any:
    """The value that stands at ``path``, for showing it; None where it cannot be found."""
    try:
        value: Any = msgspec.json.decode(body)
        steps: list[str] = re.findall(r"[^.\[\]]+", path)
        for step in steps:
            value = cast("Any", value[int(step)] if isinstance(value, list) else value[step])
    except (
        msgspec.MsgspecError,
        RecursionError,
        UnicodeDecodeError,
        KeyError,
        IndexError,
        ValueError,
        TypeError,
    ):
        return None
    return value


def _problem(path: str, message: str, value: Any) -> Problem:
    if value is None:
        return Problem(path=path, message=message)
    shown = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return Problem(path=path, message=message, value=_shorten(shown))


def _shorten(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
