from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.events.ids import is_token
from gpukeeper.events.spec import NESTING_MAX, SUBMITTED, JobSpec, Problem, Submission, encode_spec, parse_submission

BODY: dict[str, Any] = {"model": "m", "prompt": "p"}


def body(**fields: Any) -> bytes:
    return json.dumps(BODY | fields).encode()


def event(data: object, **attributes: object) -> bytes:
    return json.dumps(
        {"specversion": "1.0", "id": "e1", "source": "/x", "type": SUBMITTED, "data": data} | attributes
    ).encode()


def read(raw: bytes) -> Submission:
    found = parse_submission(raw)
    assert isinstance(found, Submission), found
    return found


def problem_of(raw: bytes) -> Problem:
    """The one thing that is wrong."""
    found = parse_submission(raw)
    assert not isinstance(found, Submission)
    (problem,) = found
    return problem


# --- what is read


def test_a_bare_body_is_a_submission() -> None:
    submission = read(body(id="job-1", priority=5))

    assert (submission.spec.model, submission.spec.prompt, submission.spec.id) == ("m", "p", "job-1")
    assert submission.task == "generate"
    assert submission.event_id is None


@pytest.mark.parametrize(
    ("fields", "task"),
    [
        ({"prompt": "p"}, "generate"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "chat"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}, "chat"),
        ({"input": ["a", "b"]}, "embed"),
        ({"body": {"object": "o", "size": 1, "digest": "d"}, "task": "chat"}, "chat"),
    ],
)
def test_the_task_follows_from_the_body_that_is_given(fields: dict[str, Any], task: str) -> None:
    assert read(json.dumps({"model": "m"} | fields).encode()).task == task


def test_a_cloud_event_around_a_body_is_the_same_submission_as_the_bare_body() -> None:
    bare, wrapped = read(body()), read(event(BODY))

    assert bare.spec == wrapped.spec
    assert bare.digest == wrapped.digest
    assert wrapped.event_id == "e1"


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt":"p","model":"m"}',
        b' {\n"model" : "m",\t"prompt": "p" } ',
        b'{"model":"m","prompt":"\\u0070"}',
        b'{"model":"m","prompt":"p","kind":"inference","place":"any","priority":null}',
        b'{"model":"m","prompt":"p","need":{},"deadlines":{"run_s":null},"options":null}',
        b'{"model":"m","prompt":"x","prompt":"p"}',
    ],
)
def test_the_digest_does_not_depend_on_how_the_body_is_written(raw: bytes) -> None:
    assert read(raw).digest == read(body()).digest


def test_the_order_of_keys_inside_options_does_not_change_the_digest() -> None:
    one, other = read(body(options={"a": 1, "b": 2})), read(body(options={"b": 2, "a": 1}))

    assert one.digest == other.digest


@pytest.mark.parametrize("change", [{"prompt": "p "}, {"priority": 1}, {"options": {"a": 1}}, {"id": "x"}])
def test_another_body_has_another_digest(change: dict[str, Any]) -> None:
    assert read(body(**change)).digest != read(body()).digest


def test_the_digest_of_a_body_is_the_same_in_every_version() -> None:
    """A repeated submission after an upgrade must stay one job: new fields may not change old digests."""
    assert read(body()).digest == "9fd06a94d101c3dd0319ebf954cd66e959b7912b4e83ad2b99ecf5cdc097d9dd"


@pytest.mark.parametrize("text", ["a\u2028b\u2029c", "\x00\x7f", "😀", "\\u0000", ""])
def test_text_is_kept_as_it_was_sent(text: str) -> None:
    spec = read(body(prompt=text)).spec

    assert spec.prompt == text
    assert read(encode_spec(spec)).spec == spec


# --- what is refused


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not JSON"),
        (b"hello", "not JSON"),
        (b'{"model":"m"', "not JSON"),
        (b'{"model":"m","prompt":"p"} x', "trailing"),
        (b'{"model":"m","prompt":"p","temperature":NaN}', "not JSON"),
        (b'{"model":"m","prompt":"\\ud800x"}', "not JSON"),
        (b'{"model":"m","prompt":"\xff"}', "not UTF-8: invalid start byte at byte 23"),
        (b'{"model":"m","prompt":"p","zz":"\xff"}', "not UTF-8"),
        (json.dumps(BODY).encode("utf-16"), "not UTF-8"),
        (b"\xef\xbb\xbf" + body(), "byte order mark"),
        (b"[1]", "Expected `object`, got `array`"),
        (b"null", "Expected `object`, got `null`"),
        (b'"{}"', "Expected `object`, got `str`"),
        (b'{"model":"m"}', "exactly one of prompt, messages, input"),
        (body(input="x"), "exactly one of prompt, messages, input"),
    ],
)
def test_what_is_no_body_at_all_is_a_problem_of_the_whole(raw: bytes, message: str) -> None:
    problem = problem_of(raw)

    assert problem.path == ""
    assert message in problem.message


@pytest.mark.parametrize(
    ("raw", "path", "message", "value"),
    [
        (b'{"prompt":"p"}', "model", "required, but missing", None),
        (body(model=1), "model", "Expected `str`, got `int`", "1"),
        (body(model=""), "model", "length >= 1", ""),
        (body(model="x" * 257), "model", "length <= 256", "x" * 79 + "…"),
        (body(model="m\n"), "model", "must have no control characters", "m\n"),
        (body(need={"vram_mb": "5 GB"}), "need.vram_mb", "Expected `int | null`, got `str`", "5 GB"),
        (body(need={"vram_mb": -1}), "need.vram_mb", "Expected `int` >= 0", "-1"),
        (body(need={"vram_mb": 1.5}), "need.vram_mb", "got `float`", "1.5"),
        (body(deadlines={"run_s": 0}), "deadlines.run_s", "> 0", "0"),
        (body(priority=1001), "priority", "<= 1000", "1001"),
        (body(temperature=[]), "temperature", "got `array`", "[]"),
        (body(seed=2**63), "seed", "<= 9223372036854775807", "9223372036854775808"),
        (body(place="moon"), "place", "must be one of any, gpu, cpu", "moon"),
        (body(on_capacity="retry"), "on_capacity", "must be one of wait, reject", "retry"),
        (body(labels={"a": 1}), "labels[...]", "Expected `str`, got `int`", '{"a":1}'),
        (body(device="GPU-1"), "device", "name its host too", "GPU-1"),
        (body(task="chat"), "task", "the body given is for 'generate'", "chat"),
        (b'{"model":"m","messages":[]}', "messages", "at least one", "[]"),
        (
            b'{"model":"m","messages":[{"role":"usr"}]}',
            "messages[0].role",
            "must be one of system, user, assistant, tool",
            "usr",
        ),
        (b'{"model":"m","body":{"object":"o","size":1},"task":"chat"}', "body.digest", "required", None),
        (b'{"model":"m","body":{"object":"o","size":1,"digest":"d"}}', "task", "say what it is", None),
        (b'{"model":"m","prompt":"p","temperature":1e999}', "temperature", "out of range", None),
    ],
)
def test_a_wrong_field_is_named_with_what_would_be_right_and_what_was_sent(
    raw: bytes, path: str, message: str, value: str | None
) -> None:
    problem = problem_of(raw)

    assert problem.path == path
    assert message in problem.message
    assert problem.value == value


@pytest.mark.parametrize("field", ["id", "kind", "host", "runtime", "origin"])
@pytest.mark.parametrize("value", ["", "a.b", "a*", ">", "a b", "x" * 65, "x" * 300, "é", "a\n", "\n", "a\x00"])
def test_what_cannot_stand_in_a_subject_is_refused(field: str, value: str) -> None:
    problem = problem_of(body(**{field: value}))

    assert problem.path == field
    assert problem.message == "must be 1 to 64 of A-Z a-z 0-9 _ -"


@given(st.text(max_size=70))
def test_an_id_is_taken_exactly_when_it_may_stand_in_a_subject(value: str) -> None:
    found = parse_submission(body(id=value))

    assert isinstance(found, Submission) == is_token(value)


@pytest.mark.parametrize(
    ("raw", "path", "hint"),
    [
        (b'{"modle":"m","prompt":"p"}', "modle", "did you mean 'model'?"),
        (body(promt="p"), "promt", "did you mean 'prompt'?"),
        (body(need={"vram": 1}), "need.vram", "did you mean 'vram_mb'?"),
        (body(deadlines={"que_s": 1}), "deadlines.que_s", "did you mean 'queue_s'?"),
        (b'{"model":"m","messages":[{"role":"user","contnt":""}]}', "messages[0].contnt", "did you mean 'content'?"),
        (body(xyzzy=1), "xyzzy", "allowed: prompt, messages"),
    ],
)
def test_an_unknown_field_is_named_with_its_nearest_neighbour(raw: bytes, path: str, hint: str) -> None:
    problem = problem_of(raw)

    assert problem.path == path
    assert problem.message.startswith("unknown field; ")
    assert hint in problem.message


@pytest.mark.parametrize(
    ("raw", "path", "message"),
    [
        (event({"model": "m", "promt": "p"}), "data.promt", "did you mean 'prompt'?"),
        (event({"model": "m"}), "data", "exactly one"),
        (event("{}"), "data", "Expected `object`, got `str`"),
        (event(BODY, type="com.example.other"), "type", "must be 'gpuq.job.submitted.v1'"),
        (event(BODY, id=5), "id", "Expected `str`"),
        (event(BODY, specversion=1.0), "specversion", "Expected `str`"),
        (b'{"specversion":"1.0","type":"gpuq.job.submitted.v1","data_base64":"aGk="}', "data", "missing"),
    ],
)
def test_a_wrong_cloud_event_is_answered_with_the_path_in_what_was_sent(raw: bytes, path: str, message: str) -> None:
    problem = problem_of(raw)

    assert problem.path == path
    assert message in problem.message


def nested(place: str, depth: int) -> bytes:
    """A body with ``depth`` lists inside one another at ``place``."""
    return json.dumps(BODY | {place: "HERE"}).encode().replace(b'"HERE"', b"[" * depth + b"]" * depth)


@pytest.mark.parametrize("place", ["options", "model", "unknown"])
@pytest.mark.parametrize("depth", [NESTING_MAX, 990, 1_000, 100_000])
def test_nesting_is_refused_wherever_it_is_and_however_deep(place: str, depth: int) -> None:
    problem = problem_of(nested(place, depth))

    assert problem.path == ""
    assert problem.message.startswith("nested too deeply: at most 100 ")


def test_nesting_up_to_the_limit_is_read() -> None:
    raw = body(options={"a": "HERE"}).replace(b'"HERE"', b"[" * (NESTING_MAX - 2) + b"]" * (NESTING_MAX - 2))

    assert read(raw).spec.options is not None


def test_brackets_in_text_do_not_nest() -> None:
    text = '[{"\\' * 1_000

    assert read(body(prompt=text)).spec.prompt == text


def test_a_long_value_is_shown_shortened() -> None:
    problem = problem_of(body(priority="x" * 10_000))

    assert problem.value == "x" * 79 + "…"


# --- total


def keep_sane(found: Submission | tuple[Problem, ...]) -> None:
    if isinstance(found, Submission):
        assert len(found.digest) == 64
        assert read(encode_spec(found.spec)).digest == found.digest
        return
    assert found
    for problem in found:
        assert problem.message
        assert problem.value is None or len(problem.value) <= 80
        msgspec.json.encode(problem)


@given(st.binary(max_size=200))
def test_any_bytes_are_answered(raw: bytes) -> None:
    keep_sane(parse_submission(raw))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.sampled_from([*JobSpec.__struct_fields__, "specversion", "type", "data", "zz"])


@given(st.dictionaries(FIELDS, JSON, max_size=6), st.booleans())
def test_any_json_is_answered(fields: dict[str, Any], wrapped: bool) -> None:
    raw = event(BODY | fields) if wrapped else json.dumps(BODY | fields).encode()

    keep_sane(parse_submission(raw))


@given(st.data())
def test_any_damage_to_a_good_body_is_answered(data: st.DataObject) -> None:
    good = event(BODY | {"need": {"vram_mb": 5}, "messages": None, "labels": {"a": "b"}})
    place = data.draw(st.integers(0, len(good) - 1))
    length = data.draw(st.integers(0, 5))

    keep_sane(parse_submission(good[:place] + data.draw(st.binary(max_size=5)) + good[place + length :]))


def test_a_problem_repeats_little_of_what_was_sent() -> None:
    """Its rejection must fit into a message as the submission did."""
    long = "k" * 1_000_000
    for raw in (
        {"model": "m", "prompt": "x", long: 1},
        {"model": "m", "prompt": "x", "need": {long: 1}},
        {"model": "m", "prompt": "x", "labels": {long: 1}},
        {"model": long, "prompt": "x"},
        {"specversion": "1.0", "type": "gpuq.job.submitted.v1", "id": long, "data": {"model": "m", "prompt": "x"}},
        {"specversion": "1.0", "type": long, "id": "1", "data": {"model": "m", "prompt": "x"}},
        {"specversion": "1.0", "type": "gpuq.job.submitted.v1", "id": "1", "data": {long: 1}},
    ):
        found = parse_submission(msgspec.json.encode(raw))

        assert isinstance(found, tuple)
        assert len(msgspec.json.encode(found)) < 1_000
