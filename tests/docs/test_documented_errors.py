"""The messages that the page on troubleshooting goes through are in the source, in these words."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import ROOT

import torchestra

SOURCE = Path(torchestra.__file__).parent
PAGE = (ROOT / "docs" / "guides" / "troubleshooting.md").read_text()
PHRASES = re.findall(r"^### `(.+)`$", PAGE, re.MULTILINE)
PLACE = "…"


def text_of(node: ast.AST) -> str | None:
    """A string as far as it is known from the source: what is filled in is a ``…``."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else PLACE for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = text_of(node.left), text_of(node.right)
        return None if sides == (None, None) else "".join(side or PLACE for side in sides)
    return None


def strings_of(tree: ast.AST) -> Iterator[str]:
    """The strings of a module that are no docstrings."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_docstring(each)]  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if (text := text_of(node)) is not None:
            yield text


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


@functools.cache
def messages() -> tuple[str, ...]:
    return tuple(
        text for path in sorted(SOURCE.rglob("*.py")) for text in strings_of(ast.parse(path.read_text()))
    )


def says(message: str, phrase: str) -> bool:
    """Return whether a message has the parts of a phrase, in order; any text may stand for a ``…``."""
    place = 0
    for part in map(str.strip, phrase.split(PLACE)):
        found = message.find(part, place)
        if found < 0:
            return False
        place = found + len(part)
    return True


@pytest.mark.parametrize(
    ("message", "phrase", "expected"),
    [
        ("rank … of group … is late", "rank … of group … is late", True),
        ("rank … of group … is late", "of group … is late", True),
        ("rank … of group … is late", "of group … is gone", False),
        ("is late: rank …", "rank … is late", False),
    ],
)
def test_phrases_are_found_as_they_should_be(message: str, phrase: str, expected: bool) -> None:
    assert says(message, phrase) is expected


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_message_is_in_the_source(phrase: str) -> None:
    assert any(says(message, phrase) for message in messages())


def test_the_page_goes_through_many() -> None:
    assert len(set(PHRASES)) == len(PHRASES) == PAGE.count("\n### ") > 30
