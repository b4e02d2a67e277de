"""Test what `make` shows of pip's output: files and sizes; everything where pip fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tools import install


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "  Downloading https://example.org/a/torch-2.9.0-cp311-none-linux.whl (184.5 MB)\n",
            "downloading torch 2.9.0, 184.5 MB",
        ),
        (
            "  Downloading numba-0.61.0-cp311-cp311-manylinux_2_17_x86_64.whl (3.9 MB)\n",
            "downloading numba 0.61.0, 3.9 MB",
        ),
        (
            "  Using cached numpy-2.2.6-cp310-none-linux.whl (16.8 MB)\n",
            "from the cache: numpy 2.2.6, 16.8 MB",
        ),
        ("Installing collected packages: numpy, torch\n", "unpacking 2 packages"),
        ("  Downloading torch-2.9.0-cp311-none-linux.whl.metadata (29 kB)\n", None),
        ("  Downloading rich-15.0.0-py3-none-any.whl (243 kB)\n", None),
        ("WARNING: Location 'file:///opt/pypi/simple' is ignored\n", None),
        ("Requirement already satisfied: numpy in /usr/lib\n", None),
    ],
)
def test_what_is_told_of_pips_output(line: str, told: str | None) -> None:
    assert install.worth_telling(line) == told


def test_all_that_pip_says_is_shown_where_it_fails(tmp_path: Path) -> None:
    missing = tmp_path / "no such file"
    ended = subprocess.run(
        [sys.executable, install.__file__, "-r", str(missing)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 1
    assert "ERROR: Could not open requirements file" in ended.stderr
    assert "pip has failed (exit code 1)" in ended.stdout
