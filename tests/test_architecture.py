"""The shape of the code, checked: pure modules take time and ids as inputs; the lists that name folders agree."""

from __future__ import annotations

import ast
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PURE: list[str] = next(
    contract["source_modules"]
    for contract in PROJECT["tool"]["importlinter"]["contracts"]
    if contract["type"] == "forbidden"
)
FOLDERS = sorted(link.name for link in (ROOT / "src" / "gpukeeper").iterdir() if link.is_symlink())

#: Calls that read the world, and what to do instead.
BANNED = {
    "now": "take the time as an argument",
    "today": "take the time as an argument",
    "utcnow": "take the time as an argument",
    "time_ns": "take the time as an argument",
    "monotonic": "take the time as an argument",
    "perf_counter": "take the time as an argument",
    "uuid4": "take the id as an argument",
    "new_id": "take the id as an argument",
    "getenv": "take the setting as an argument",
    "open": "take the bytes as an argument",
    "print": "return it",
    "get_logger": "a decision is asked speculatively: it may not log",
}


def _paths_of(module: str) -> list[Path]:
    """The file of a module, or all files of a package."""
    path = ROOT.joinpath(*module.split(".")[1:])
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


def _calls(path: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            target = node.func
            names.append(target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", ""))
    return names


@pytest.mark.parametrize("module", PURE)
def test_a_pure_module_reads_no_clock_makes_no_id_and_opens_nothing(module: str) -> None:
    paths = _paths_of(module)

    found = [f"{path.name}: {name}: {BANNED[name]}" for path in paths for name in _calls(path) if name in BANNED]

    assert paths
    assert found == []


def test_the_check_for_pure_modules_sees_a_clock(tmp_path: Path) -> None:
    impure = tmp_path / "impure.py"
    impure.write_text("from datetime import datetime\nat = datetime.now()\n")

    assert "now" in _calls(impure)


def test_each_link_leads_to_the_folder_of_its_name() -> None:
    targets = {name: os.readlink(ROOT / "src" / "gpukeeper" / name) for name in FOLDERS}

    assert targets == {name: f"../../{name}" for name in FOLDERS}
    assert all((ROOT / name / "__init__.py").is_file() for name in FOLDERS)


def test_the_type_checker_reads_every_linked_folder() -> None:
    included = {Path(path).name for path in PROJECT["tool"]["pyright"]["include"] if path.startswith("src/")}

    assert sorted(included) == FOLDERS


def test_importing_a_folder_by_its_bare_name_is_banned() -> None:
    banned = PROJECT["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]

    assert sorted(name for name in banned if name in FOLDERS) == FOLDERS


def test_every_folder_is_in_a_layer() -> None:
    layers = next(c["layers"] for c in PROJECT["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    named = {part.strip().removeprefix("gpukeeper.") for layer in layers for part in layer.split("|")}

    assert sorted(named) == FOLDERS


def test_the_constraints_name_exact_versions_only() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]

    assert lines
    assert all(line.count("==") == 1 and "@" not in line and " " not in line for line in lines)
