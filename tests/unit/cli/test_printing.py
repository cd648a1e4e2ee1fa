"""What reaches a terminal is harmless, and what reaches a program is exact."""

from __future__ import annotations

import json

import pytest

from gpukeeper.cli import printing


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ✓ 漢字", "plain ✓ 漢字"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("a\x00b\x7fc\x9bd", "a\\x00b\\x7fc\\x9bd"),
        ("right\u202eto left\u2066", "right\\u202eto left\\u2066"),
        ("line\u2028end", "line\\u2028end"),
        ("back\rover", "back\\rover"),
    ],
)
def test_control_characters_are_shown_as_escapes(text: str, shown: str) -> None:
    assert printing.safe(text) == shown


def test_newlines_stay_in_text_and_not_in_lines() -> None:
    assert printing.safe("a\n\tb") == "a\n\tb"
    assert printing.one_line("a\n\tb") == "a\\n\\tb"


def test_a_line_is_cut_to_its_limit() -> None:
    assert printing.one_line("x" * 600, 10) == "x" * 9 + "…"
    assert printing.one_line("x" * 10, 10) == "x" * 10


def test_json_stays_on_one_line_for_readers_that_split_at_unicode_breaks() -> None:
    document = {"text": "a\u2028b\u2029c\x85d\ne", "nan": float("nan")}
    text = printing.json_text(document)

    assert text.splitlines() == [text]
    assert json.loads(text) == {"text": "a\u2028b\u2029c\x85d\ne", "nan": None}


def test_a_table_in_a_pipe_is_aligned_and_cuts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    wide = printing.sheet(("id", "text"), [("a", "x" * 300), ("long-id", None)], title="two")
    printing.print_sheets([wide, printing.sheet(("id",), [], title="none")])

    assert capsys.readouterr().out == f"two\nid       text\na        {'x' * 300}\nlong-id\n\nnone\n"


def test_cells_are_escaped() -> None:
    made = printing.sheet(("a",), [("[red]\x1b[31m\n",)], title="t\n")

    assert (made.rows, made.title) == ([["[red]\\x1b[31m\\n"]], "t\\n")
