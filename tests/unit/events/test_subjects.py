from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.events import subjects
from gpukeeper.events.errors import InvalidId

TOKENS = st.sampled_from(["a", "b", "gpuq", "ev", "job"])
PARTS = st.lists(TOKENS, min_size=1, max_size=5)
PATTERNS = st.tuples(st.lists(TOKENS | st.just("*"), min_size=0, max_size=4), st.booleans()).map(
    lambda drawn: [*drawn[0], ">"] if drawn[1] or not drawn[0] else drawn[0]
)


def expression(pattern: list[str]) -> re.Pattern[str]:
    """The same rule, said as a regular expression."""
    parts = {"*": r"[^.]+", ">": r"[^.]+(?:\.[^.]+)*"}
    return re.compile(r"\.".join(parts.get(part, re.escape(part)) for part in pattern))


@given(PATTERNS, PARTS)
def test_a_pattern_matches_what_its_regular_expression_matches(pattern: list[str], parts: list[str]) -> None:
    subject = ".".join(parts)

    assert subjects.matches(".".join(pattern), subject) == bool(expression(pattern).fullmatch(subject))


@given(PARTS, st.data())
def test_a_subject_with_parts_replaced_by_stars_still_matches(parts: list[str], data: st.DataObject) -> None:
    starred = [data.draw(st.sampled_from([part, "*"])) for part in parts]
    cut = data.draw(st.integers(0, len(parts) - 1))

    assert subjects.matches(".".join(starred), ".".join(parts))
    assert subjects.matches(".".join([*starred[:cut], ">"]), ".".join(parts))


@pytest.mark.parametrize(
    ("pattern", "subject"),
    [("gpuq.ev.>", "gpuq.ev"), ("gpuq.*", "gpuq.ev.job"), ("gpuq.ev.job.*", "gpuq.ev.jobs.a"), ("a.b", "a")],
)
def test_a_pattern_does_not_match_what_is_shorter_longer_or_another(pattern: str, subject: str) -> None:
    assert not subjects.matches(pattern, subject)


ONE: list[tuple[Callable[[str], str], str]] = [
    (subjects.submit, "gpuq.submit.x1"),
    (subjects.command, "gpuq.cmd.x1"),
    (subjects.job, "gpuq.ev.job.x1"),
    (subjects.host, "gpuq.ev.host.x1"),
    (subjects.beat, "gpuq.hb.x1"),
    (subjects.out, "gpuq.out.x1"),
]
TWO: list[tuple[Callable[[str, str], str], str]] = [
    (subjects.route, "gpuq.ev.route.x1.y2"),
    (subjects.device, "gpuq.ev.device.x1.y2"),
    (subjects.runtime, "gpuq.ev.runtime.x1.y2"),
]


@pytest.mark.parametrize(("build", "expected"), ONE)
def test_a_subject_of_one_id_refuses_what_is_no_token(build: Callable[[str], str], expected: str) -> None:
    assert build("x1") == expected
    for bad in ("", "a.b", "*", "a\n"):
        with pytest.raises(InvalidId):
            build(bad)


@pytest.mark.parametrize(("build", "expected"), TWO)
def test_a_subject_of_two_ids_refuses_either(build: Callable[[str, str], str], expected: str) -> None:
    assert build("x1", "y2") == expected
    for bad in (("", "y"), ("x", ">"), ("a.b", "c")):
        with pytest.raises(InvalidId):
            build(*bad)


def test_every_subject_of_the_log_falls_under_the_stream_and_no_other_does() -> None:
    in_log = [*(build("x") for build, _ in ONE[:4]), *(build("x", "y") for build, _ in TWO), subjects.SITE]

    for subject in in_log:
        assert any(subjects.matches(pattern, subject) for pattern in subjects.LOG_SUBJECTS), subject
    for subject in (subjects.beat("x"), subjects.out("x")):
        assert not any(subjects.matches(pattern, subject) for pattern in subjects.LOG_SUBJECTS), subject
    assert any(subjects.matches(pattern, subjects.beat("x")) for pattern in subjects.BEAT_SUBJECTS)


def test_an_agent_reads_what_is_about_its_host_and_nothing_else() -> None:
    followed = subjects.followed_by_agent("h1")

    def hears(subject: str) -> bool:
        return any(subjects.matches(pattern, subject) for pattern in followed)

    for build in (subjects.route, subjects.device, subjects.runtime):
        assert hears(build("h1", "x"))
        assert not hears(build("h2", "x"))
    assert hears(subjects.host("h1"))
    assert not hears(subjects.host("h2"))
    assert not hears(subjects.job("h1"))
