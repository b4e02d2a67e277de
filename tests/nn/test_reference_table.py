"""REFERENCE.md names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_test_that_the_table_names_exists() -> None:
    files = [*HERE.glob("test_*.py"), HERE.parent / "algorithms" / "test_join.py"]
    found = re.compile(r"^def (test_\w+)", re.MULTILINE)
    defined = {name for file in files for name in found.findall(file.read_text())}
    rows = [line.split("|") for line in (HERE / "REFERENCE.md").read_text().splitlines() if line[:1] == "|"]
    named = {name for row in rows for name in re.findall(r"test_\w+", row[2])}
    modules = {file.stem for file in files}
    assert len(named) > 20
    assert not named - defined - modules
