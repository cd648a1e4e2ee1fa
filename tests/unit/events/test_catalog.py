from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from pathlib import Path
from typing import get_type_hints

import msgspec
import pytest

import gpukeeper
from gpukeeper import events
from gpukeeper.events import device, runtime
from gpukeeper.events.catalog import BY_TYPE, FACTS
from gpukeeper.events.fact import Fact
from gpukeeper.events.job import ENDS
from gpukeeper.events.reasons import Reason
from gpukeeper.events.upcasters import STEPS

#: Reasons that people type, where the field is no reason code.
WORDS = {"gpuq.job.cancel_requested.v1", "gpuq.job.cancelled.v1"} | {
    fact.TYPE
    for fact in (
        *(fact for fact in FACTS if fact.TYPE.startswith("gpuq.operator.")),
        device.ReclaimWanted,
        device.Drained,
        device.Resumed,
        runtime.Pinned,
        runtime.Unpinned,
        runtime.ActWanted,
    )
}


def every_fact() -> set[type[Fact]]:
    """Each fact that is defined anywhere in the package, listed or not."""
    for module in pkgutil.iter_modules(events.__path__):
        importlib.import_module(f"gpukeeper.events.{module.name}")
    found: set[type[Fact]] = set()
    looking = [Fact]
    while looking:
        kind = looking.pop()
        found |= {kind} if kind.TYPE else set()
        looking.extend(kind.__subclasses__())
    return found


def test_every_fact_that_is_defined_is_listed_once() -> None:
    assert set(FACTS) == every_fact()
    assert len(FACTS) == len(set(FACTS))


def test_no_two_facts_share_a_tag() -> None:
    assert len(BY_TYPE) == len(FACTS)


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.__name__)
def test_a_tag_names_aggregate_fact_and_version(fact: type[Fact]) -> None:
    assert re.fullmatch(r"gpuq\.(job|route|device|runtime|host|site|operator)\.[a-z_]+\.v[1-9][0-9]*", fact.TYPE)


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.__name__)
def test_a_fact_says_what_it_is_and_is_frozen(fact: type[Fact]) -> None:
    assert fact.__doc__
    assert fact.__struct_config__.frozen
    assert not fact.__struct_config__.forbid_unknown_fields


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.__name__)
def test_a_reason_is_a_code_from_the_closed_list_or_the_words_of_an_operator(fact: type[Fact]) -> None:
    hint = get_type_hints(fact).get("reason")

    assert hint in ((str,) if fact.TYPE in WORDS else (None, Reason, Reason | None))


def test_no_current_tag_is_upcast() -> None:
    assert not set(STEPS) & set(BY_TYPE)


def test_the_facts_that_end_a_job_are_facts_about_jobs() -> None:
    assert set(ENDS) < set(FACTS)
    assert all(end.TYPE.startswith("gpuq.job.") for end in ENDS)


def test_reason_codes_are_unique_words() -> None:
    codes = [reason.value for reason in Reason]

    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"[a-z_]+", code) for code in codes)


def test_every_reason_that_the_code_names_is_in_the_closed_list() -> None:
    """`Reason.X` is checked by the type checker; what is built from text is checked here."""
    folders = [folder.resolve() for folder in Path(gpukeeper.__file__).parent.iterdir() if folder.is_dir()]
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(paths) > 20
    named: set[str] = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Reason":
                named.add(node.attr)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Reason":
                named |= {Reason(arg.value).name for arg in node.args if isinstance(arg, ast.Constant)}

    assert named <= set(Reason.__members__)


def test_no_field_of_a_fact_has_a_default_that_could_be_changed() -> None:
    for fact in FACTS:
        for field in msgspec.structs.fields(fact):
            assert not isinstance(field.default, list | dict | set), f"{fact.__name__}.{field.name}"
