"""From options and a file to one well-formed submission, or to an error that names the field."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gpukeeper.cli.errors import Refused, WrongUsage
from gpukeeper.cli.submission import BODY_BYTES_MAX, Asked, checked, enveloped, fields_of, merged, pack, unchecked
from gpukeeper.events.objects import digest_of
from gpukeeper.events.spec import INLINE_BYTES_MAX, Submission, encode_spec, parse_submission


def submission(**fields: Any) -> Submission:
    return checked(None, {"model": "m", **fields}, new_id="new")


def test_options_become_fields_and_what_is_not_said_is_left_out() -> None:
    asked = Asked(
        model="m",
        prompt="p",
        max_tokens=5,
        vram_mb=7,
        deadlines=("run=60", "queue=1.5"),
        labels=("a=b=c",),
        options=("num_ctx=4096", "mirostat=true", "grammar=x"),
    )

    assert fields_of(asked) == {
        "model": "m",
        "max_tokens": 5,
        "prompt": "p",
        "need": {"vram_mb": 7},
        "deadlines": {"run_s": 60.0, "queue_s": 1.5},
        "labels": {"a": "b=c"},
        "options": {"num_ctx": 4096, "mirostat": True, "grammar": "x"},
    }


def test_a_prompt_beside_messages_is_the_last_of_them() -> None:
    asked = Asked(prompt="and you?", messages=("system:be: brief", "user:hi"))

    assert [(each["role"], each["content"]) for each in fields_of(asked)["messages"]] == [
        ("system", "be: brief"),
        ("user", "hi"),
        ("user", "and you?"),
    ]
    assert fields_of(Asked(prompt="hi", chat=True)) == {"messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(WrongUsage, match="--chat needs a PROMPT"):
        fields_of(Asked(chat=True))


def test_one_text_to_embed_is_a_text_and_several_are_a_list() -> None:
    assert fields_of(Asked(embed=("a",))) == {"input": "a"}
    assert fields_of(Asked(embed=("a", "b"))) == {"input": ["a", "b"]}


GRAPH = {"3": {"class_type": "KSampler", "inputs": {"seed": 1}}}


@pytest.mark.parametrize("file", [GRAPH, {"prompt": GRAPH, "client_id": "me"}])
def test_a_graph_is_a_workflow_and_its_model_goes_without_saying(file: dict[str, Any]) -> None:
    given = fields_of(Asked(workflow=json.dumps(file).encode()))

    assert given == {"workflow": GRAPH}
    assert checked(None, given, new_id="new").task == "workflow"
    assert checked(None, given, new_id="new").spec.model == "comfyui"
    assert checked(None, {**given, "model": "pictures"}, new_id="new").spec.model == "pictures"
    assert checked(b'{"model": "mine"}', given, new_id="new").spec.model == "mine"


def test_a_query_is_an_analysis_and_needs_a_model() -> None:
    given = fields_of(Asked(analysis=b'{"moves": [["B", "Q16"]]}'))

    assert given == {"analysis": {"moves": [["B", "Q16"]]}}
    assert checked(None, {**given, "model": "katago"}, new_id="new").task == "analysis"
    with pytest.raises(Refused, match="model: required"):
        checked(None, given, new_id="new")


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (b"{", "--workflow: not JSON"),
        (b"\xff", "--workflow: not JSON"),
        (b"[]", "--workflow: must be a JSON object"),
        (b"{}", "--workflow: must be a JSON object"),
        (b'{"nodes": [], "links": []}', r"Export \(API\)"),
        (b'{"prompt": 3}', "prompt must be a graph"),
        (b'{"3": {"inputs": {}}}', "node '3' has no class_type"),
        (b'{"3": []}', "node '3' has no class_type"),
    ],
)
def test_a_file_that_is_no_graph_is_refused_with_the_reason(file: bytes, words: str) -> None:
    with pytest.raises(WrongUsage, match=words):
        fields_of(Asked(workflow=file))


def test_a_graph_beside_a_prompt_is_refused() -> None:
    given = fields_of(Asked(workflow=json.dumps(GRAPH).encode(), prompt="and this"))

    with pytest.raises(Refused, match="exactly one of prompt, messages, input, workflow, analysis"):
        checked(None, given, new_id="new")


def test_a_large_graph_moves_to_the_object_store() -> None:
    large = {"3": {"class_type": "Text", "inputs": {"text": "x" * INLINE_BYTES_MAX}}}

    packed = pack(submission(workflow=large))

    assert packed.body is not None
    assert msgspec.json.decode(packed.body) == {"workflow": large}
    assert (packed.spec.workflow, packed.spec.task) == (None, "workflow")
    with pytest.raises(Refused, match="give either body or one of"):
        checked(encode_spec(packed.spec), {"workflow": GRAPH}, new_id="new")


def test_options_stand_over_the_file_and_keep_what_it_nests() -> None:
    file = json.dumps({"model": "a", "priority": 3, "deadlines": {"run_s": 1, "idle_s": 2}}).encode()

    assert merged(file, {"model": "b", "deadlines": {"run_s": 9.0}}) == {
        "model": "b",
        "priority": 3,
        "deadlines": {"run_s": 9.0, "idle_s": 2},
    }


def test_the_id_is_the_given_one_else_the_files_else_a_new_one() -> None:
    file = b'{"model": "m", "prompt": "p", "id": "from-file"}'

    assert checked(file, {"id": "given"}, new_id="new").spec.id == "given"
    assert checked(file, {}, new_id="new").spec.id == "from-file"
    assert submission(prompt="p").spec.id == "new"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_json_cannot_say_is_refused_and_not_changed(value: float) -> None:
    with pytest.raises(Refused, match=r"temperature = '.*': must be a finite number"):
        submission(prompt="p", temperature=value)


def test_bytes_of_the_command_line_that_are_no_text_are_refused() -> None:
    with pytest.raises(Refused, match=r"prompt = .*: not UTF-8"):
        submission(prompt="a\udcffb")


def test_without_checks_a_file_is_sent_byte_for_byte() -> None:
    assert unchecked(b"\xff{", {}, new_id="new") == b"\xff{"
    assert json.loads(unchecked(None, {"temperature": "hot"}, new_id="new")) == {"temperature": "hot", "id": "new"}
    with pytest.raises(WrongUsage, match="no JSON object"):
        unchecked(b"[]", {"id": "x"}, new_id="new")


def test_a_small_body_stays_in_the_log() -> None:
    packed = pack(submission(prompt="p"))

    assert (packed.body, packed.spec.prompt) == (None, "p")


@pytest.mark.parametrize("field", ["prompt", "input"])
def test_a_large_body_moves_under_its_own_digest_with_its_settings(field: str) -> None:
    large = submission(**{field: "x" * INLINE_BYTES_MAX}, seed=3, labels={"a": "b"})
    first, again = pack(large), pack(large)
    assert first.body is not None
    assert first.spec.body is not None

    assert first == again
    assert first.spec.body.object == first.spec.body.digest == digest_of(first.body)
    assert msgspec.json.decode(first.body) == {field: "x" * INLINE_BYTES_MAX, "seed": 3}
    assert (first.spec.prompt, first.spec.seed, first.spec.labels) == (None, None, {"a": "b"})
    assert len(encode_spec(first.spec)) < 1000
    parsed = parse_submission(encode_spec(first.spec))
    assert isinstance(parsed, Submission)
    assert parsed.task == large.task


def test_a_body_above_the_limit_is_refused() -> None:
    with pytest.raises(Refused, match=r"a job may have 64\.0 MiB at most"):
        pack(submission(prompt="x" * BODY_BYTES_MAX))


def test_what_is_no_body_and_still_large_is_refused() -> None:
    with pytest.raises(Refused, match="shorten the labels"):
        pack(submission(prompt="p", labels={"a": "x" * INLINE_BYTES_MAX}))


def test_the_envelope_holds_the_spec_unchanged() -> None:
    made = submission(prompt="a\u2028b")
    body = enveloped(made.spec, event_id="e1", source="/tests", time="2025-10-19T14:00:00Z")
    parsed = parse_submission(body)

    assert isinstance(parsed, Submission)
    assert (parsed.spec, parsed.digest, parsed.event_id) == (made.spec, made.digest, "e1")
