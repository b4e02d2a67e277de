"""The examples of remote calls run as their first lines say, and end with the result that they check."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from warm_programs import run_warm

EXAMPLES = Path(__file__).parents[2] / "examples"
SECONDS = 100


def run_example(name: str, nproc: int, *arguments: str) -> list[str]:
    """Return what the first rank has printed."""
    command = [sys.executable, "-m", "torchestra", "run", "--nproc", str(nproc), str(EXAMPLES / name)]
    ended = run_warm([*command, *arguments], capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr
    return [line.partition("] ")[2] for line in ended.stdout.splitlines()]


def test_a_pipeline_has_the_gradients_of_one_piece_and_learns_the_digits() -> None:
    pytest.importorskip("sklearn")
    lines = run_example("pipeline.py", 3, "--epochs", "2", "--require-accuracy", "0.6")
    assert [line.split()[1] for line in lines[:-1]] == ["1/2", "2/2"]
    assert "of those of one piece" in lines[-1]


def test_trainers_with_a_parameter_server_learn_the_digits() -> None:
    pytest.importorskip("sklearn")
    lines = run_example("parameter_server.py", 3, "--epochs", "2", "--require-accuracy", "0.6")
    assert [line.split()[1] for line in lines[:-1]] == ["1/2", "2/2"]
    assert lines[-1].startswith("2 trainers")
    assert lines[-1].endswith("dense networks bit-identical")


def test_the_actors_learn_to_catch() -> None:
    lines = run_example("actor_learner.py", 3, "--rounds", "60", "--lr", "0.03", "--require-caught", "0.4")
    assert [line.split()[1] for line in lines[:-1]] == [f"{done}/60" for done in range(6, 61, 6)]
    assert lines[-1].startswith("2 observers, 3,840 games")
