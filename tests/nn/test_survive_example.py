"""The example that loses ranks goes on without them, to the accuracy and the identical weights promised."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from warm_programs import run_warm

pytest.importorskip("sklearn")

SCRIPT = Path(__file__).parents[2] / "examples" / "survive.py"
SECONDS = 250


def test_training_goes_on_when_ranks_are_killed() -> None:
    """First the rank that was rank 0, then another, which has a new number by then."""
    launched = [sys.executable, "-m", "torchestra", "run", "--nproc", "4", "--max-failures", "2", str(SCRIPT)]
    arguments = ["--epochs", "2", "--kill", "0@5", "--kill", "3@30", "--require-accuracy", "0.8"]
    ended = run_warm([*launched, *arguments], capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr
    lines = [line.partition("] ")[2] for line in ended.stdout.splitlines()]
    went_on = [
        match.groups() for line in lines if (match := re.match(r"ranks (.*) go on as (.*) from", line))
    ]
    assert went_on == [("[1, 2, 3]", "[0, 1, 2]"), ("[0, 1]", "[0, 1]")]
    assert re.match(r"46 steps, 2 ranks left, accuracy [89].*, weights bit-identical", lines[-1])
    assert ended.stderr.endswith("torchestra: ranks 1, 2 ended well, without ranks 0, 3\n")
