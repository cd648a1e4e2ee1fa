"""The published description of the events: JSON Schema, an AsyncAPI document and an index, generated from the code.

``python -m gpukeeper.events.schema --write docs/events`` writes them, ``--check docs/events`` says which are stale.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from gpukeeper import __version__
from gpukeeper.events import subjects
from gpukeeper.events.ask import Answer, ErrorAnswer, Question
from gpukeeper.events.catalog import FACTS
from gpukeeper.events.envelope import CONTENT_TYPE, Envelope
from gpukeeper.events.fact import Fact
from gpukeeper.events.ids import TOKEN_PATTERN, TOKEN_RULE
from gpukeeper.events.readings import Heartbeat
from gpukeeper.events.spec import SUBMITTED, JobSpec

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


class Channel(msgspec.Struct, frozen=True, kw_only=True):
    """One family of subjects. ``{…}`` in the address stands for one token."""

    name: str
    address: str
    stream: str
    description: str
    #: Whether gpukeeper writes here; it only reads the others.
    writes: bool = True
    #: Whether an append names the last sequence of its subject that it rests on.
    conditional: bool = True


CHANNELS: tuple[Channel, ...] = (
    Channel(
        name="submit",
        address=subjects.SUBMIT_PREFIX + "{producer}",
        stream=subjects.LOG_STREAM,
        description="Jobs that producers submit, as a bare body or in a CloudEvent.",
        writes=False,
        conditional=False,
    ),
    Channel(
        name="operator",
        address=subjects.COMMAND_PREFIX + "{actor}",
        stream=subjects.LOG_STREAM,
        description="What an operator asked for.",
        writes=False,
        conditional=False,
    ),
    Channel(
        name="job",
        address="gpuq.ev.job.{job}",
        stream=subjects.LOG_STREAM,
        description="What became of a job: accepted or rejected first, exactly one end, notes after it.",
    ),
    Channel(
        name="route",
        address="gpuq.ev.route.{host}.{job}",
        stream=subjects.LOG_STREAM,
        description="Where a job was sent, on a subject of the host it was sent to.",
    ),
    Channel(
        name="device",
        address="gpuq.ev.device.{host}.{device}",
        stream=subjects.LOG_STREAM,
        description="A device and the claims on its slots. The sequence of a claim is its epoch.",
    ),
    Channel(
        name="runtime",
        address="gpuq.ev.runtime.{host}.{runtime}",
        stream=subjects.LOG_STREAM,
        description="A registered runtime of a host.",
    ),
    Channel(
        name="host",
        address="gpuq.ev.host.{host}",
        stream=subjects.LOG_STREAM,
        description="An agent came or went.",
    ),
    Channel(
        name="site",
        address=subjects.SITE,
        stream=subjects.LOG_STREAM,
        description="The site as a whole.",
    ),
    Channel(
        name="beat",
        address="gpuq.hb.{host}",
        stream=subjects.BEATS_STREAM,
        description="Heartbeats: an agent is alive, and this is what it sees. They age out.",
        conditional=False,
    ),
)
_BY_NAME = {channel.name: channel for channel in CHANNELS}


def channel_of(fact: type[Fact]) -> Channel:
    """Where facts of this kind stand: their tag's second word, but for heartbeats."""
    return _BY_NAME["beat" if fact is Heartbeat else fact.TYPE.split(".")[1]]


def documents() -> dict[str, str]:
    """Every generated file: name -> contents."""
    found = {f"{fact.TYPE}.json": _text(fact_schema(fact)) for fact in FACTS}
    found["envelope.json"] = _text(envelope_schema())
    found["submission.json"] = _text(submission_schema())
    found["question.json"] = _text(_standalone(Question, title=f"request to {subjects.ASK_JOB}"))
    found["answer.json"] = _text(answer_schema())
    found["asyncapi.json"] = _text(asyncapi())
    found["README.md"] = _index()
    return found


def fact_schema(fact: type[Fact]) -> dict[str, Any]:
    """JSON Schema of the ``data`` of one fact. Fields that it does not know are allowed: newer versions add some."""
    return _standalone(fact, title=fact.TYPE)


def envelope_schema() -> dict[str, Any]:
    """JSON Schema of the envelope around every fact."""
    return _standalone(Envelope, title="envelope")


def submission_schema() -> dict[str, Any]:
    """JSON Schema of the body that producers send. Fields that it does not know are refused."""
    return _standalone(JobSpec, title=SUBMITTED)


def answer_schema() -> dict[str, Any]:
    """JSON Schema of what a question about a job is answered with: an answer, or an error."""
    references, components = msgspec.json.schema_components([Answer, ErrorAnswer], ref_template="#/$defs/{name}")
    return {
        "$schema": _DIALECT,
        "title": f"reply from {subjects.ASK_JOB}",
        "anyOf": list(references),
        "$defs": components,
    }


def asyncapi() -> dict[str, Any]:
    """AsyncAPI 3.0. What JetStream adds stands under ``x-jetstream``, as the NATS binding knows queue groups only."""
    _, schemas = msgspec.json.schema_components([Envelope, JobSpec, *FACTS], ref_template="#/components/schemas/{name}")
    names = {fact: _name_of(fact, schemas) for fact in FACTS}
    messages = {fact.TYPE: _message(fact, names[fact]) for fact in FACTS}
    messages |= _submissions()
    in_channel: dict[str, list[str]] = {channel.name: [] for channel in CHANNELS}
    in_channel["submit"] = list(_submissions())
    for fact in FACTS:
        in_channel[channel_of(fact).name].append(fact.TYPE)
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "gpukeeper",
            "version": __version__,
            "description": (
                "Every submission, decision and measurement of a site, as events on NATS JetStream. Stored events are "
                f"CloudEvents in structured mode ({CONTENT_TYPE}). They carry no Content-Type header: every reader "
                "would have to parse it on every message, and the envelope says the same."
            ),
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": CONTENT_TYPE,
        "channels": {channel.name: _channel(channel, in_channel[channel.name]) for channel in CHANNELS},
        "operations": {channel.name: _operation(channel, in_channel[channel.name]) for channel in CHANNELS},
        "components": {"messages": messages, "schemas": schemas},
    }


def _standalone(kind: type[msgspec.Struct], *, title: str) -> dict[str, Any]:
    (_,), components = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    own = components.pop(kind.__name__)
    return {"$schema": _DIALECT, **own, "title": title, **({"$defs": components} if components else {})}


def _name_of(fact: type[Fact], schemas: dict[str, Any]) -> str:
    """What msgspec calls it: the class's name, or the whole path where two classes share a name."""
    whole = f"{fact.__module__}.{fact.__qualname__}".replace(".", "_")
    return whole if whole in schemas else fact.__name__


def _message(fact: type[Fact], schema_name: str) -> dict[str, Any]:
    return {
        "name": fact.TYPE,
        "summary": _summary(fact),
        "contentType": CONTENT_TYPE,
        "headers": _headers(conditional=channel_of(fact).conditional),
        "payload": _enveloped(fact.TYPE, schema_name),
    }


def _submissions() -> dict[str, Any]:
    headers = _headers(conditional=False)
    return {
        SUBMITTED: {
            "name": SUBMITTED,
            "summary": "A job's body in a CloudEvent.",
            "contentType": CONTENT_TYPE,
            "headers": headers,
            "payload": {
                "type": "object",
                "required": ["specversion", "type", "data"],
                "properties": {
                    "specversion": {"const": "1.0"},
                    "type": {"const": SUBMITTED},
                    "id": {"type": "string"},
                    "data": {"$ref": "#/components/schemas/JobSpec"},
                },
            },
        },
        "job": {
            "name": "job",
            "summary": "A job's bare body.",
            "contentType": "application/json",
            "headers": headers,
            "payload": {"$ref": "#/components/schemas/JobSpec"},
        },
    }


def _enveloped(tag: str, schema_name: str) -> dict[str, Any]:
    return {
        "allOf": [
            {"$ref": "#/components/schemas/Envelope"},
            {
                "type": "object",
                "properties": {"type": {"const": tag}, "data": {"$ref": f"#/components/schemas/{schema_name}"}},
            },
        ]
    }


def _headers(*, conditional: bool) -> dict[str, Any]:
    properties: dict[str, Any] = {
        "Nats-Msg-Id": {"type": "string", "description": "The event's id: a repeated publish is stored once."}
    }
    if conditional:
        properties["Nats-Expected-Last-Subject-Sequence"] = {
            "type": "string",
            "pattern": "^[0-9]+$",
            "description": "The subject's last sequence that the decision rests on; 0 = the subject is empty.",
        }
    return {"type": "object", "properties": properties}


def _channel(channel: Channel, messages: Sequence[str]) -> dict[str, Any]:
    parameters = [part[1:-1] for part in channel.address.split(".") if part.startswith("{")]
    return {
        "address": channel.address,
        "description": channel.description,
        "parameters": {name: {"description": f"One token: {TOKEN_RULE}."} for name in parameters},
        "messages": {_key(tag): {"$ref": f"#/components/messages/{tag}"} for tag in messages},
        "x-jetstream": {
            "stream": channel.stream,
            "expected-last-subject-sequence": channel.conditional,
            "token-pattern": TOKEN_PATTERN,
        },
    }


def _operation(channel: Channel, messages: Sequence[str]) -> dict[str, Any]:
    """As the site sees it: it sends its facts, and receives what producers and operators publish."""
    return {
        "action": "send" if channel.writes else "receive",
        "channel": {"$ref": f"#/channels/{channel.name}"},
        "messages": [{"$ref": f"#/channels/{channel.name}/messages/{_key(tag)}"} for tag in messages],
    }


def _key(tag: str) -> str:
    """Keys of a channel's messages may hold no dots."""
    return tag.replace(".", "_")


def _index() -> str:
    lines = [
        "# Events",
        "",
        "Generated by `python -m gpukeeper.events.schema --write docs/events`; do not edit.",
        "",
        "- [asyncapi.json](asyncapi.json): channels, messages and operations (AsyncAPI 3.0).",
        "- [envelope.json](envelope.json): the CloudEvents envelope around every fact (JSON Schema).",
        f"- [submission.json](submission.json): the body of a submission, `{SUBMITTED}` (JSON Schema).",
        f"- [question.json](question.json), [answer.json](answer.json): asking `{subjects.ASK_JOB}`, and its reply.",
        "- One JSON Schema for the `data` of each fact, below.",
        "",
        "| type | subject | what happened |",
        "|---|---|---|",
    ]
    lines += [f"| [`{f.TYPE}`]({f.TYPE}.json) | `{channel_of(f).address}` | {_summary(f)} |" for f in FACTS]
    return "\n".join(lines) + "\n"


def _summary(fact: type[Fact]) -> str:
    return (fact.__doc__ or "").strip().splitlines()[0].replace("|", "\\|")


def _text(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def write(folder: Path) -> None:
    """Write every file into ``folder``, and remove what is generated no more."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in stale(folder):
        (folder / name).unlink(missing_ok=True)
    for name, text in documents().items():
        (folder / name).write_text(text, encoding="utf-8")


def stale(folder: Path) -> list[str]:
    """Names of the files in ``folder`` that are missing, changed, or generated no more."""
    wanted = documents()
    present = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*") if path.is_file()}
    return sorted(name for name in wanted.keys() | present.keys() if wanted.get(name) != present.get(name))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpukeeper.events.schema", description=__doc__)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--write", type=Path, metavar="DIR", help="write the documents")
    group.add_argument("--check", type=Path, metavar="DIR", help="say which documents are stale")
    options = parser.parse_args(arguments)
    if options.write is not None:
        write(options.write)
        return 0
    found = stale(options.check)
    for name in found:
        sys.stderr.write(f"{options.check / name} is stale: run `python -m gpukeeper.events.schema --write`\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
