"""The example ends with the weights of an unfailed run, although its ranks are killed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from warm_programs import run_warm

pytest.importorskip("sklearn")

SCRIPT = Path(__file__).parents[2] / "examples" / "elastic.py"
SECONDS = 100


def test_the_example_loses_ranks_that_are_replaced_and_nothing_else() -> None:
    launched = [sys.executable, "-m", "torchestra", "run", "--nproc", "3", "--elastic", "1:3"]
    restarts = ["--max-restarts", "2", str(SCRIPT)]
    arguments = ["--steps", "8", "--kills", "2", "--minimum", "3", "--require-accuracy", "0.1"]
    ended = run_warm([*launched, *restarts, *arguments], capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr
    # A rank 0 that is a replacement does not tell of the change by which it came.
    assert re.search(r"lost \[\d\], joined \[\d\], 3 ranks go on after", ended.stdout)
    assert ended.stderr.endswith("torchestra: ranks 0-2 ended well, after 2 restarts\n")
    assert "weights: bit-identical to those of an unfailed run" in ended.stdout
