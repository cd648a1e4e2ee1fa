"""From options and a file to one submission that is known to be well formed. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from gpukeeper.cli.errors import Refused, WrongUsage
from gpukeeper.cli.quantities import size
from gpukeeper.cli.words import problems_in_words
from gpukeeper.events.envelope import Envelope
from gpukeeper.events.objects import digest_of
from gpukeeper.events.spec import (
    INLINE_BYTES_MAX,
    SUBMITTED,
    JobSpec,
    Problem,
    Submission,
    encode_spec,
    parse_submission,
)
from gpukeeper.events.work import ObjectRef, Work

#: The largest body of a job: it goes through the object store, and into the memory of an agent.
BODY_BYTES_MAX = 64 * 1_048_576
#: What a workflow names as its model where it names none.
WORKFLOW_MODEL = "comfyui"
_CLOCKS = ("queue", "load", "first_byte", "idle", "run")
_WORK_FIELDS = tuple(field.encode_name for field in msgspec.structs.fields(Work))
_encode = msgspec.json.Encoder(order="deterministic").encode


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says about a job; None and empty where it says nothing."""

    model: str | None = None
    prompt: str | None = None
    chat: bool = False
    #: ``role:text`` each.
    messages: Sequence[str] = ()
    embed: Sequence[str] = ()
    #: Bytes of a file with a JSON object each: a graph of ComfyUI, a query of an analysis engine.
    workflow: bytes | None = None
    analysis: bytes | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    #: ``name=JSON`` each.
    options: Sequence[str] = ()
    id: str | None = None
    kind: str | None = None
    runtime: str | None = None
    host: str | None = None
    device: str | None = None
    place: str | None = None
    priority: int | None = None
    vram_mb: int | None = None
    gpus: int | None = None
    on_capacity: str | None = None
    #: ``clock=seconds`` each.
    deadlines: Sequence[str] = ()
    #: ``name=text`` each.
    labels: Sequence[str] = ()


class Packed(msgspec.Struct, frozen=True):
    """A submission ready to be sent: the spec for the log, and the body for the object store where it is large."""

    spec: JobSpec
    body: bytes | None


def fields_of(asked: Asked) -> dict[str, Any]:
    """The fields of the submission that the command line gives.

    Raises:
        WrongUsage: an option is not of its form.
    """
    given: dict[str, Any] = {
        name: value
        for name in (
            *("model", "max_tokens", "temperature", "seed", "id", "kind", "runtime", "host", "device"),
            *("place", "priority", "on_capacity"),
        )
        if (value := getattr(asked, name)) is not None
    }
    given |= _body_of(asked)
    need = {"vram_mb": asked.vram_mb, "gpus": asked.gpus}
    if any(value is not None for value in need.values()):
        given["need"] = {name: value for name, value in need.items() if value is not None}
    if asked.deadlines:
        given["deadlines"] = dict(_deadline(each) for each in asked.deadlines)
    if asked.labels:
        given["labels"] = dict(_pair("--label", each) for each in asked.labels)
    if asked.options:
        given["options"] = {
            name: _json_or_text(value) for name, value in (_pair("--option", each) for each in asked.options)
        }
    return given


def merged(file: bytes | None, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """The file's job with the fields of the command line over it; None where the file is no JSON object."""
    if file is None:
        return {**_defaults(given), **given}
    try:
        found: Any = msgspec.json.decode(file)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    if not isinstance(found, dict):
        return None
    base = cast("dict[str, Any]", found)
    if "specversion" in base and isinstance(base.get("data"), dict):
        base = cast("dict[str, Any]", base["data"])  # a CloudEvent: this command makes an envelope of its own
    for name in ("need", "deadlines", "labels", "options"):
        inner = base.get(name)
        if name in given and isinstance(inner, dict):
            base = {**base, name: {**cast("dict[str, Any]", inner), **given[name]}}
            given = {key: value for key, value in given.items() if key != name}
    return {**_defaults({**base, **given}), **base, **given}


def _defaults(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What goes without saying: a graph names its models itself, so every workflow asks for the same one."""
    return {"model": WORKFLOW_MODEL} if "workflow" in fields else {}


def checked(file: bytes | None, given: Mapping[str, Any], *, new_id: str) -> Submission:
    """One well-formed submission with an id: the given one, the file's, else ``new_id``.

    Raises:
        Refused: names each field, its value, and what would be right.
    """
    fields = merged(file, given)
    if fields is None:
        assert file is not None
        parsed = parse_submission(file)
        # What is no JSON object has no fields to add to, and the parser says why it is none.
        raise refused(parsed if isinstance(parsed, tuple) else (Problem(path="", message="must be a JSON object"),))
    fields.setdefault("id", new_id)
    try:
        problems = tuple(_unencodable(fields))
        parsed = problems or parse_submission(msgspec.json.encode(fields))
    except RecursionError:
        parsed = (Problem(path="", message="nested too deeply"),)
    if isinstance(parsed, tuple):
        raise refused(parsed)
    return parsed


def unchecked(file: bytes | None, given: Mapping[str, Any], *, new_id: str) -> bytes:
    """The bytes to send as they are, right or wrong: the file's own, where the command line adds nothing to them."""
    if file is not None and not given:
        return file
    fields = merged(file, given)
    if fields is None:
        raise WrongUsage("options cannot be added to a file that is no JSON object; leave them out, or correct it")
    fields.setdefault("id", new_id)
    return json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogateescape")


def pack(submission: Submission) -> Packed:
    """Move a large body to the object store, under its own digest: the same body is the same job.

    Raises:
        Refused: it is larger than :data:`BODY_BYTES_MAX`, or what stays in the log is too large.
    """
    spec = submission.spec
    if spec.body is not None or len(encode_spec(spec)) <= INLINE_BYTES_MAX:
        return Packed(spec, None)
    body = _encode(Work(**{name: getattr(spec, name) for name in _WORK_FIELDS}))
    if len(body) > BODY_BYTES_MAX:
        raise too_large(len(body))
    digest = digest_of(body)
    bare = msgspec.structs.replace(
        spec,
        **dict.fromkeys(_WORK_FIELDS),
        body=ObjectRef(object=digest, size=len(body), digest=digest),
        task=submission.task,
    )
    rest = len(encode_spec(bare))
    if rest > INLINE_BYTES_MAX:
        message = f"what is no body takes {size(rest)}, at most {size(INLINE_BYTES_MAX)}: shorten the labels"
        raise refused((Problem(path="labels", message=message),))
    return Packed(bare, body)


def enveloped(spec: JobSpec, *, event_id: str, source: str, time: str) -> bytes:
    """The CloudEvent of a submission."""
    assert spec.id is not None
    return _encode(
        Envelope(
            specversion="1.0",
            id=event_id,
            source=source,
            type=SUBMITTED,
            subject=spec.id,
            time=time,
            data=msgspec.Raw(encode_spec(spec)),
            correlationid=spec.id,
        )
    )


def refused(problems: tuple[Problem, ...]) -> Refused:
    """The error for a submission that is not sent."""
    shown = [msgspec.to_builtins(problem) for problem in problems]
    return Refused(f"not submitted: {problems_in_words(problems)}", problems=shown)


def too_large(count: int | None) -> Refused:
    """The error for a body above the limit; ``count`` None where nobody counted to the end."""
    got = "more" if count is None else size(count)
    return refused((Problem(path="", message=f"a job may have {size(BODY_BYTES_MAX)} at most, and this has {got}"),))


def _body_of(asked: Asked) -> dict[str, Any]:
    """What the job is: a prompt, messages, an input, a workflow or an analysis. More than one stays, for the parser."""
    given: dict[str, Any] = {}
    messages = [_message(each) for each in asked.messages]
    if asked.chat and asked.prompt is None and not messages:
        raise WrongUsage("--chat needs a PROMPT or --message")
    if asked.prompt is not None:
        if asked.chat or messages:
            messages.append({"role": "user", "content": asked.prompt})
        else:
            given["prompt"] = asked.prompt
    if messages:
        given["messages"] = messages
    if asked.embed:
        given["input"] = asked.embed[0] if len(asked.embed) == 1 else list(asked.embed)
    if asked.workflow is not None:
        given["workflow"] = _graph(_object("--workflow", asked.workflow))
    if asked.analysis is not None:
        given["analysis"] = _object("--analysis", asked.analysis)
    return given


def _object(option: str, file: bytes) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        WrongUsage: it is none, with the place.
    """
    try:
        found: Any = msgspec.json.decode(file)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise WrongUsage(f"{option}: not JSON: {error}") from error
    if not isinstance(found, dict) or not found:
        raise WrongUsage(f"{option}: must be a JSON object that is not empty")
    return cast("dict[str, Any]", found)


def _graph(found: dict[str, Any]) -> dict[str, Any]:
    """The graph in a file for ComfyUI, with or without the ``prompt`` around it that its own interface asks for.

    Raises:
        WrongUsage: it is what the editor saves, which ComfyUI itself does not run.
    """
    if "nodes" in found and "links" in found:
        raise WrongUsage("--workflow: saved for the editor; save it again with 'Export (API)', which the server runs")
    graph: Any = found.get("prompt") if set(found) <= {"prompt", "client_id", "extra_data"} else found
    if not isinstance(graph, dict):
        raise WrongUsage("--workflow: prompt must be a graph of nodes")
    for name, node in cast("dict[str, Any]", graph).items():
        if not isinstance(node, dict) or "class_type" not in node:
            raise WrongUsage(f"--workflow: node {name[:80]!r} has no class_type: not a graph in the API format")
    return cast("dict[str, Any]", graph)


def _message(text: str) -> dict[str, str]:
    role, colon, content = text.partition(":")
    if not colon:
        raise WrongUsage(f"--message {text[:80]!r}: must be ROLE:TEXT, such as 'user:Hello'")
    return {"role": role.strip(), "content": content}


def _pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise WrongUsage(f"{option} {text[:80]!r}: must be NAME=VALUE")
    return name, value


def _deadline(text: str) -> tuple[str, float]:
    name, value = _pair("--deadline", text)
    if name not in _CLOCKS:
        raise WrongUsage(f"--deadline {text[:80]!r}: the clocks are {', '.join(_CLOCKS)}")
    try:
        return f"{name}_s", float(value)
    except ValueError:
        raise WrongUsage(f"--deadline {text[:80]!r}: must be CLOCK=SECONDS, such as run=60") from None


def _json_or_text(value: str) -> Any:
    try:
        return msgspec.json.decode(value)
    except (msgspec.MsgspecError, RecursionError):
        return value


def _unencodable(value: Any, path: str = "") -> list[Problem]:
    """What JSON cannot say: it would be changed on its way, so it is refused."""
    if isinstance(value, float) and not math.isfinite(value):
        return [Problem(path=path, message="must be a finite number", value=str(value))]
    if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        shown = value.encode("utf-8", "backslashreplace").decode()[:80]
        return [Problem(path=path, message="not UTF-8", value=shown)]
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return [found for key, inner in items for found in _unencodable(inner, f"{path}.{key}" if path else key)]
    if isinstance(value, list):
        rows = enumerate(cast("list[Any]", value))
        return [found for place, inner in rows for found in _unencodable(inner, f"{path}[{place}]")]
    return []
