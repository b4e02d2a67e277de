"""The pictures of docs/benchmarks.md show the numbers that stand beside them."""

from __future__ import annotations

import pytest
from pages import ROOT
from PIL import Image

from benchmarks import documented_pictures


@pytest.mark.parametrize(("name", "heading"), documented_pictures.PICTURES.items())
def test_a_picture_was_drawn_from_the_table(name: str, heading: str) -> None:
    rows = documented_pictures.table_of(heading)
    assert len(rows) > 2
    with Image.open(ROOT / "docs" / name) as picture:
        assert picture.info["Table"] == documented_pictures.digest(rows), (
            "run `python -m benchmarks.documented_pictures`"
        )
