from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from gpukeeper.events import schema
from gpukeeper.events.ask import (
    QUESTION_BYTES_MAX,
    Answer,
    Question,
    Refusal,
    encode_answer,
    encode_refusal,
    parse_question,
)
from gpukeeper.events.spec import Problem
from gpukeeper.events.work import JobResult


def answer(**fields: object) -> Answer:
    given: dict[str, object] = {
        "job": "a",
        "submission_seq": 1,
        "phase": "succeeded",
        "ended": True,
        "timed_out": False,
        "reason": "",
        "detail": "",
        "attempt": 1,
        "host": "h1",
        "device": "g0",
        "queue_place": None,
        "tokens": 3,
        "seq": 9,
    }
    return Answer(**(given | fields))  # pyright: ignore[reportArgumentType]


def valid(name: str, document: Any) -> bool:
    return Draft202012Validator(json.loads(schema.documents()[name])).is_valid(document)


def test_a_question_names_a_job_or_a_submission_and_the_rest_has_defaults() -> None:
    assert parse_question(b'{"job":"a"}') == Question(job="a", until="answered", wait_s=10)
    asked = b'{"submission_seq":42,"until":"ended","wait_s":0}'
    assert parse_question(asked) == Question(submission_seq=42, until="ended", wait_s=0)
    assert valid("question.json", json.loads(asked))


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b'{"job":"\xff"}', "not JSON"),
        (b"[]", "Expected `object`"),
        (b"{}", "exactly one of job and submission_seq"),
        (b'{"job":null}', "exactly one of"),
        (b'{"job":"a","submission_seq":1}', "exactly one of"),
        (b'{"jop":"a"}', "unknown field `jop`"),
        (b'{"job":7}', "Expected `str"),
        (b'{"job":"a.b"}', "of 1 to 64 of A-Z a-z 0-9 _ -"),
        (b'{"job":"a\\n"}', "of 1 to 64 of A-Z a-z 0-9 _ -"),
        (b'{"submission_seq":0}', ">= 1"),
        (b'{"submission_seq":1.5}', "Expected `int | null`, got `float`"),
        (b'{"submission_seq":99999999999999999999}', "submission_seq"),
        (b'{"job":"a","until":"over"}', "Invalid enum value 'over'"),
        (b'{"job":"a","wait_s":61}', "<= 60"),
        (b'{"job":"a","wait_s":-1}', ">= 0"),
        (b'{"job":"a","wait_s":1e999}', "wait_s"),
        (b'{"job":"a"' + b" " * QUESTION_BYTES_MAX + b"}", "at most 4096"),
        (b'{"x":' + b"[" * 4000, "unknown field `x`"),
        (b'{"job":' + b"[" * 4000, "Expected `str"),
    ],
)
def test_a_question_that_is_none_is_refused_with_what_is_wrong(raw: bytes, says: str) -> None:
    refusal = parse_question(raw)

    assert isinstance(refusal, Refusal)
    assert refusal.code == "invalid"
    assert says in refusal.message
    told = json.loads(encode_refusal(refusal))
    assert told == {"error": {"code": "invalid", "message": refusal.message, "retryable": False}}
    assert valid("answer.json", told)


@pytest.mark.parametrize("code", ["busy", "stopping", "log_unavailable"])
def test_a_refusal_that_says_nothing_about_the_question_may_be_tried_again(code: str) -> None:
    assert json.loads(encode_refusal(Refusal(code=code, message="")))["error"]["retryable"] is True  # pyright: ignore[reportArgumentType]


def test_an_answer_is_what_its_schema_says_and_leaves_out_what_it_does_not_have() -> None:
    told = json.loads(encode_answer(answer(result=JobResult(text="hi")), 10_000))

    assert valid("answer.json", told)
    assert told["result"] == {"text": "hi"}
    assert told["queue_place"] is None
    assert not {"problems", "result_ref", "omitted"} & set(told)


def test_a_result_that_does_not_fit_in_one_message_is_left_out_and_named() -> None:
    whole = answer(result=JobResult(text="x" * 1000))
    size = len(encode_answer(whole, 10_000))

    assert "omitted" not in json.loads(encode_answer(whole, size))
    told = json.loads(encode_answer(whole, size - 1))
    assert told["omitted"] == ["result"]
    assert "result" not in told
    assert valid("answer.json", told)


def test_problems_that_do_not_fit_are_left_out_and_named() -> None:
    told = json.loads(encode_answer(answer(problems=(Problem(path="a", message="x" * 1000),)), 900))

    assert told["omitted"] == ["problems"]
    assert "problems" not in told
