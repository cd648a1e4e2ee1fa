from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from gpukeeper.events import schema, subjects
from gpukeeper.events.catalog import FACTS
from gpukeeper.events.codec import encode
from gpukeeper.events.fact import Fact
from gpukeeper.events.spec import JobSpec, Need, encode_spec, parse_submission
from support.facts import facts_of

DOCS = Path(__file__).parents[3] / "docs" / "events"


@cache
def validator(name: str) -> Draft202012Validator:
    document = json.loads(schema.documents()[name])
    Draft202012Validator.check_schema(document)
    return Draft202012Validator(document)


@cache
def message_validator(tag: str) -> Draft202012Validator:
    """For the whole message of one type, as the AsyncAPI document describes it."""
    document = json.loads(schema.documents()["asyncapi.json"])
    payload: dict[str, Any] = document["components"]["messages"][tag]["payload"]
    return Draft202012Validator(payload | {"components": document["components"]})


def test_the_files_in_the_repository_are_what_the_code_generates() -> None:
    assert schema.stale(DOCS) == [], "run `python -m gpukeeper.events.schema --write docs/events`"


def test_generating_twice_gives_the_same_bytes() -> None:
    assert schema.documents() == schema.documents()


@pytest.mark.parametrize("kind", FACTS, ids=lambda kind: kind.TYPE)
@settings(max_examples=15)
@given(st.data())
def test_what_the_code_writes_fits_the_schema(kind: type[Fact], data: st.DataObject) -> None:
    fact = data.draw(facts_of(kind))
    body = json.loads(encode(fact, event_id="e1", source="/s", subject="a", time="t", actor="mo", epoch=3))

    validator("envelope.json").validate(body)
    validator(f"{kind.TYPE}.json").validate(body["data"])
    message_validator(kind.TYPE).validate(body)


def test_a_fact_without_a_required_field_does_not_fit() -> None:
    assert not validator("gpuq.job.started.v1.json").is_valid({"job": "j1", "epoch": 3})
    assert not message_validator("gpuq.job.started.v1").is_valid({"type": "gpuq.job.started.v1", "data": {}})


def test_a_fact_with_a_field_of_a_newer_version_fits() -> None:
    assert validator("gpuq.job.started.v1.json").is_valid({"job": "j1", "epoch": 3, "attempt": 1, "mood": "good"})


@pytest.mark.parametrize(
    "body",
    [
        {"model": "m", "prompt": "p"},
        {"model": "m", "messages": [{"role": "user", "content": "hi"}], "id": "job-1", "need": {"vram_mb": 5}},
        {"model": "m", "prompt": "p", "modle": 1},
        {"model": "m", "prompt": "p", "id": "a.b"},
        {"model": "m", "prompt": "p", "place": "moon"},
        {"model": "m", "prompt": "p", "need": {"vram_mb": -1}},
        {"prompt": "p"},
        {"model": "m\n", "prompt": "p"},
    ],
)
def test_the_schema_of_a_submission_takes_what_the_code_takes(body: dict[str, Any]) -> None:
    taken = not isinstance(parse_submission(json.dumps(body).encode()), tuple)

    assert validator("submission.json").is_valid(body) == taken


def test_a_canonical_submission_fits_its_schema() -> None:
    spec = JobSpec(model="m", prompt="p", need=Need(vram_mb=5), labels={"a": "b"})

    validator("submission.json").validate(json.loads(encode_spec(spec)))


def test_every_address_falls_under_its_stream() -> None:
    patterns = {subjects.LOG_STREAM: subjects.LOG_SUBJECTS, subjects.BEATS_STREAM: subjects.BEAT_SUBJECTS}

    for channel in schema.CHANNELS:
        subject = re.sub(r"\{[a-z]+\}", "x", channel.address)
        assert any(subjects.matches(pattern, subject) for pattern in patterns[channel.stream]), channel.address


@pytest.mark.parametrize(
    ("name", "subject"),
    [
        ("submit", subjects.submit("x")),
        ("operator", subjects.command("x")),
        ("job", subjects.job("x")),
        ("route", subjects.route("x", "x")),
        ("device", subjects.device("x", "x")),
        ("runtime", subjects.runtime("x", "x")),
        ("host", subjects.host("x")),
        ("site", subjects.SITE),
        ("beat", subjects.beat("x")),
    ],
)
def test_addresses_are_the_subjects_that_the_code_builds(name: str, subject: str) -> None:
    (channel,) = [channel for channel in schema.CHANNELS if channel.name == name]

    assert re.sub(r"\{[a-z]+\}", "x", channel.address) == subject


@pytest.mark.parametrize("name", [name for name in schema.documents() if name.endswith(".json")])
def test_every_reference_leads_somewhere(name: str) -> None:
    text = schema.documents()[name]

    for reference in re.findall(r'"\$ref": "#/([^"]+)"', text):
        place = json.loads(text)
        for step in reference.split("/"):
            place = place[step]


def test_every_fact_is_in_one_channel_and_in_the_index() -> None:
    documents = schema.documents()
    channels = json.loads(documents["asyncapi.json"])["channels"].values()
    listed = [ref["$ref"].rpartition("/")[2] for channel in channels for ref in channel["messages"].values()]

    for fact in FACTS:
        assert listed.count(fact.TYPE) == 1
        assert f"| [`{fact.TYPE}`]({fact.TYPE}.json) |" in documents["README.md"]


def test_stale_files_are_named_and_writing_repairs_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema.write(tmp_path)
    assert schema.main(["--check", str(tmp_path)]) == 0
    (tmp_path / "envelope.json").write_text("{}")
    (tmp_path / "gpuq.job.old.v1.json").write_text("{}")
    (tmp_path / "README.md").unlink()

    assert schema.main(["--check", str(tmp_path)]) == 1
    assert schema.stale(tmp_path) == ["README.md", "envelope.json", "gpuq.job.old.v1.json"]
    assert "envelope.json is stale" in capsys.readouterr().err
    assert schema.main(["--write", str(tmp_path)]) == 0
    assert schema.stale(tmp_path) == []
