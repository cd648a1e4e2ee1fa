"""Says in words what is wrong with a configuration: the path, the value, and what would be right."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
from msgspec import inspect

from gpukeeper.events.ids import TOKEN_PATTERN, TOKEN_RULE

#: msgspec ends its messages so; the path is absent for the top level.
_AT = re.compile(r"(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?", re.DOTALL)
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(?P<key>.*)`", re.DOTALL)
_MISSING_FIELD = re.compile(r"Object missing required field `(?P<key>.*)`", re.DOTALL)
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")
_TOML_TYPES = {"object": "table", "str": "string", "int": "integer", "bool": "boolean", "null": "nothing"}
_SHOWN_CHARS_MAX = 80
#: What somebody wrote beside such a word may be a secret, and errors end up in logs.
_SECRET = re.compile(r"passw|token|secret|seed|creds", re.IGNORECASE)


def explain(error: msgspec.ValidationError, raw: Mapping[str, Any], model: type[msgspec.Struct]) -> str:
    """One sentence: path, value and what is allowed. ``raw`` is what was decoded into ``model``."""
    found = _AT.fullmatch(str(error))
    assert found is not None  # the pattern takes any text
    what, path = found["what"], (found["path"] or "").removeprefix(".")
    steps = _steps(path)
    if unknown := _UNKNOWN_FIELD.fullmatch(what):
        return _unknown_key(path, unknown["key"], _value_at(raw, steps), _fields_of(_type_at(model, steps)))
    if missing := _MISSING_FIELD.fullmatch(what):
        return f"{path + '.' if path else ''}{missing['key']}: missing, and there is no default"
    value = show(_value_at(raw, steps))
    if what.startswith("Invalid enum value"):
        allowed = ", ".join(show(each) for each in _allowed(_type_at(model, steps)))
        return f"{path} = {value}: must be one of {allowed}"
    return f"{path} = {value}: {_in_toml_words(what)}"


def show(value: object) -> str:
    """``value`` as TOML would have it, cut to a bounded length."""
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)  # on one line, with escapes as TOML has them
    elif isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, Mapping):
        text = "a table"
    elif isinstance(value, list):
        text = "a list"
    else:
        text = "nothing" if value is None else str(value)
    return text if len(text) <= _SHOWN_CHARS_MAX else text[: _SHOWN_CHARS_MAX - 3] + "..."


def show_unless_secret(key: str, value: object) -> str:
    """``value`` as :func:`show` has it, or a mask where ``key`` speaks of a secret."""
    return "(hidden)" if _SECRET.search(key) else show(value)


def _unknown_key(path: str, key: str, table: object, known: Sequence[str]) -> str:
    where = f"{path}.{key}" if path else key
    value = show_unless_secret(key, cast("Mapping[str, object]", table)[key]) if isinstance(table, Mapping) else "?"
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known keys are {', '.join(known)}"
    return f"{where} = {value}: unknown key; {hint}"


def _in_toml_words(what: str) -> str:
    words = re.sub(r"`([^`]*)`", lambda match: _toml_type(match[1]), what)
    words = words.replace(f"matching regex {TOKEN_PATTERN!r}", f"of {TOKEN_RULE}")
    return words[:1].lower() + words[1:]


def _toml_type(words: str) -> str:
    names = [_TOML_TYPES.get(word, word) for word in words.split(" | ") if word != "null"]
    return " or ".join(names) or "nothing"


def _steps(path: str) -> list[str | int]:
    return [int(index) if index else key for key, index in _STEP.findall(path)]


def _value_at(raw: object, steps: Sequence[str | int]) -> object:
    value: Any = raw
    for step in steps:
        value = value[step]
    return value


def _type_at(model: type[msgspec.Struct], steps: Sequence[str | int]) -> inspect.Type:
    found: inspect.Type = inspect.type_info(model)
    for step in steps:
        if isinstance(found, inspect.StructType):
            found = next(field.type for field in found.fields if field.encode_name == step)
        elif isinstance(found, inspect.VarTupleType):
            found = found.item_type
        found = _without_null(found)
    return found


def _without_null(found: inspect.Type) -> inspect.Type:
    if isinstance(found, inspect.UnionType):
        rest = [each for each in found.types if not isinstance(each, inspect.NoneType)]
        if len(rest) == 1:
            return rest[0]
    return found


def _fields_of(found: inspect.Type) -> list[str]:
    return [field.encode_name for field in found.fields] if isinstance(found, inspect.StructType) else []


def _allowed(found: inspect.Type) -> list[object]:
    return list(found.values) if isinstance(found, inspect.LiteralType) else []
