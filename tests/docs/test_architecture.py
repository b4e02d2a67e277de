"""docs/architecture.md is a map: places and names in it exist, and its floors are those that lint keeps."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib")  # Python 3.11

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "torchestra"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PLACES = sorted(set(re.findall(r"`((?:[\w.-]+/)*[\w-]*(?:/|\.(?:pyi?|md|toml)))(?::([\w.]+))?`", PAGE)))


def place(path: str) -> Path:
    """A path of the page: below the package, or below the project."""
    return PACKAGE / path if (PACKAGE / path).exists() else ROOT / path


@functools.cache
def names_in(path: Path) -> frozenset[str]:
    """Return what a module defines: functions, classes, their members, and names that it assigns."""
    found: set[str] = set()

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(prefix + child.name)
                if isinstance(child, ast.ClassDef):
                    visit(child, f"{prefix}{child.name}.")
                    continue
            targets = child.targets if isinstance(child, ast.Assign) else [getattr(child, "target", None)]
            found.update(prefix + target.id for target in targets if isinstance(target, ast.Name))

    visit(ast.parse(path.read_text()), "")
    return frozenset(found)


def test_the_page_is_read() -> None:
    assert len(PLACES) > 60
    assert ("collectives/functions.py", "all_reduce") in PLACES


@pytest.mark.parametrize(("path", "name"), PLACES)
def test_a_place_exists(path: str, name: str) -> None:
    assert place(path).exists(), f"docs/architecture.md names {path}"
    if name:
        assert name in names_in(place(path)), f"docs/architecture.md says that {path} defines {name}"


def test_the_floors_are_those_that_lint_keeps() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    kept = next(contract for contract in contracts if contract["containers"] == ["torchestra"])["layers"]
    drawn = re.search(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert drawn is not None
    told = [
        set(re.findall(r"(\w+)(?:/|\.py)", line.partition("  ")[0])) for line in drawn.group(1).splitlines()
    ]
    assert told == [set(re.findall(r"\w+", floor)) for floor in kept]
