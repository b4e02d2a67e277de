"""One script, unchanged, on two hosts, by whatever starts it."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched import LAUNCHERS, launched, why_no_mpich, why_no_openmpi
from real_hosts import Network, needs_hosts

from worlds import results

# What the example imports: once, for all ranks that are forked.
pytest.importorskip("sklearn.datasets")
pytest.importorskip("matplotlib.pyplot")
pytestmark = needs_hosts()

SCRIPT = Path(__file__).parents[2] / "examples" / "digits.py"
MISSING = {"mpich": why_no_mpich(), "openmpi": why_no_openmpi()}


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    made = Network(2)
    yield made
    made.close()


def run_digits(directory: str) -> str:
    """Return what the example printed."""
    sys.argv = [
        str(SCRIPT),
        "--epochs",
        "1",
        "--require-accuracy",
        "0.5",
        "--output",
        f"{directory}/loss.png",
    ]
    with contextlib.redirect_stdout(io.StringIO()) as output, pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert not ended.value.code, output.getvalue()
    return output.getvalue()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_example_runs_unchanged(network: Network, launcher: str, tmp_path: Path) -> None:
    if why := MISSING.get(launcher):
        pytest.skip(why)
    with launched(launcher, network, (2, 2), run_digits, str(tmp_path)) as world:
        told, *others = results(world.finish(limit=100.0))  # torchrun imports torch on both hosts
    assert "bit-identical" in told
    assert "ranks                 │ 4" in told
    assert not any(others)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
