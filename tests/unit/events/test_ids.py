from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.events.errors import InvalidId
from gpukeeper.events.ids import TOKEN_PATTERN, cleaned_token, is_token, job_id_at, require_token

GOOD = ["a", "A-Z_09", "GPU-8c5f3b1a-1111-2222-3333-444455556666", "1760883302-9f3a7c21", "x" * 64]
BAD = ["", ".", "a.b", "*", ">", "a b", "a\n", "\na", "é", "x" * 65, "a/b", "a\x00", "٣"]


@pytest.mark.parametrize("value", GOOD)
def test_ids_of_letters_digits_dashes_and_underscores_are_tokens(value: str) -> None:
    assert require_token(value, "job") == value
    assert re.search(TOKEN_PATTERN, value)


@pytest.mark.parametrize("value", BAD)
def test_what_would_break_a_subject_is_no_token(value: str) -> None:
    with pytest.raises(InvalidId) as raised:
        require_token(value, "host")

    assert raised.value.fields == {"field": "host", "value": value}
    assert not re.search(TOKEN_PATTERN, value)


def test_a_long_id_is_shown_shortened() -> None:
    with pytest.raises(InvalidId) as raised:
        require_token("x" * 10_000, "job")

    assert len(raised.value.message) < 200


@given(st.text(max_size=70))
def test_the_pattern_for_decoders_takes_what_the_check_takes(value: str) -> None:
    assert bool(re.search(TOKEN_PATTERN, value)) == is_token(value)


def test_a_job_id_is_the_second_and_the_place() -> None:
    assert job_id_at(0x9F3A7C21, 1_760_883_302_999_999_999) == "1760883302-9f3a7c21"


@given(st.integers(1, 2**63), st.integers(0, 2**62))
def test_a_job_id_is_a_token(seq: int, stored_ns: int) -> None:
    assert is_token(job_id_at(seq, stored_ns))


@given(st.text(max_size=70))
def test_a_cleaned_name_is_always_a_token_and_a_token_is_left_as_it_is(value: str) -> None:
    cleaned = cleaned_token(value)

    assert is_token(cleaned)
    assert (cleaned == value) == is_token(value)


@pytest.mark.parametrize(
    ("value", "cleaned"), [("\x1b[31mred", "__31mred"), ("caf\ufffd", "caf_"), ("", "_"), ("x" * 3_900, "x" * 64)]
)
def test_a_cleaned_name_can_still_be_recognised(value: str, cleaned: str) -> None:
    assert cleaned_token(value) == cleaned
