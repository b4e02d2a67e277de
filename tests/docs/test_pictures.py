"""The pictures of docs/benchmarks.md show the numbers that stand beside them."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
from pages import ROOT
from PIL import Image


def _drawing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_benchmarks", ROOT / "tools" / "draw_benchmarks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DRAWING = _drawing()


@pytest.mark.parametrize(("name", "heading"), DRAWING.PICTURES.items())
def test_a_picture_was_drawn_from_the_table(name: str, heading: str) -> None:
    rows = DRAWING.table_of(heading)
    assert len(rows) > 2
    with Image.open(ROOT / "docs" / name) as picture:
        assert picture.info["Table"] == DRAWING.digest(rows), "run `python tools/draw_benchmarks.py`"
