"""Libraries built on torch.distributed train on torchestra as on Gloo: the examples, with both backends."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import torchestra

EXAMPLES = Path(__file__).parents[2] / "examples" / "interop"
LIMIT_SECONDS = 280.0


def needs(package: str) -> pytest.MarkDecorator:
    """Skip where a library is not installed, which is large and not needed for anything else."""
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None,
        reason=f"{package} is not installed: make test-interop installs it",
    )


def losses(backend: str, *command: str) -> list[float]:
    """The losses that an example prints, one for each epoch."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(torchestra.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    ended = subprocess.run(
        [sys.executable, *command, "--backend", backend],
        capture_output=True,
        check=False,
        text=True,
        timeout=LIMIT_SECONDS,
        env=environment,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"2 ranks on {backend}" in ended.stdout
    return [float(found) for found in re.findall(r"epoch \d+: loss ([0-9.]+)", ended.stdout)]


def check(nothing_left: Callable[[], None], *command: str) -> None:
    ours = losses("torchestra", *command)
    assert len(ours) == 3
    assert ours[2] < ours[0]
    assert losses("gloo", *command) == pytest.approx(ours, abs=2e-6)
    nothing_left()


@pytest.mark.timeout(600)
@needs("accelerate")
def test_accelerate(nothing_left: Callable[[], None]) -> None:
    launcher = (
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
    )
    check(nothing_left, *launcher, str(EXAMPLES / "accelerate_train.py"))


@pytest.mark.timeout(600)
@needs("lightning")
def test_lightning(nothing_left: Callable[[], None]) -> None:
    check(nothing_left, str(EXAMPLES / "lightning_train.py"))
