"""Other people's software, and programs for it that say nothing of torchestra: the same results as on Gloo.

Each runs twice as a user would run it, the second time with TORCHESTRA_FOR=gloo in the environment.
`make test-ecosystem` installs what each needs, into an environment of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import torchestra

PROGRAMS = Path(__file__).parent / "programs"
LIMIT_SECONDS = 600.0
SERVED = 'serves "gloo" here'
TORCHRUN = (
    "-m",
    "torch.distributed.run",
    "--nproc-per-node=2",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=localhost:0",
)

pytestmark = pytest.mark.timeout(2 * LIMIT_SECONDS + 20)


def needs(package: str) -> pytest.MarkDecorator:
    """Skip where a library is not installed, which is large and not needed for anything else."""
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None,
        reason=f"{package} is not installed: make test-ecosystem installs it",
    )


def output(served: bool, *command: str, **variables: str) -> str:
    """What a program prints, stderr last; whether torchestra served it is checked by what that logs."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(torchestra.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        **variables,
    }
    environment.pop("TORCHESTRA_FOR", None)
    if served:
        environment["TORCHESTRA_FOR"] = "gloo"
    ended = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        check=False,
        text=True,
        timeout=LIMIT_SECONDS,
        env=environment,
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    assert (SERVED in said) is served, said
    return said


def result(said: str) -> dict[str, Any]:
    """What the program found: ranks, losses, seconds."""
    (line,) = [line for line in said.splitlines() if "RESULT {" in line]
    found: dict[str, Any] = json.loads(line.partition("RESULT ")[2])
    return found


def compare(name: str, seconds: dict[str, tuple[float, float]], *command: str, **variables: str) -> None:
    on_gloo, ours = (result(output(served, *command, **variables)) for served in (False, True))
    assert ours["ranks"] == on_gloo["ranks"] == 2
    assert ours["losses"]
    assert ours["losses"] == pytest.approx(on_gloo["losses"], rel=1e-5, abs=2e-6)
    seconds[name] = on_gloo["seconds"], ours["seconds"]


@needs("transformers")
def test_transformers_trainer(
    seconds: dict[str, tuple[float, float]], nothing_left: Callable[[], None]
) -> None:
    compare("transformers: Trainer, a tiny Llama", seconds, *TORCHRUN, str(PROGRAMS / "trainer.py"))
    nothing_left()


@needs("accelerate")
def test_accelerates_own_test_script(nothing_left: Callable[[], None]) -> None:
    """It checks by itself what it does: data loaders, gathering, training against one process."""
    found = importlib.util.find_spec("accelerate.test_utils.scripts.test_script")
    assert found is not None
    assert found.origin is not None
    for served in (False, True):
        output(served, *TORCHRUN, found.origin, ACCELERATE_USE_CPU="true")
    nothing_left()


@needs("lightning")
def test_lightning(seconds: dict[str, tuple[float, float]], nothing_left: Callable[[], None]) -> None:
    compare('Lightning: strategy "ddp"', seconds, str(PROGRAMS / "lightning_fit.py"))
    nothing_left()


@needs("torchmetrics")
def test_torchmetrics(seconds: dict[str, tuple[float, float]], nothing_left: Callable[[], None]) -> None:
    compare("torchmetrics: six metrics, 20 times", seconds, *TORCHRUN, str(PROGRAMS / "metrics.py"))
    nothing_left()


@needs("ray")
def test_ray_train(seconds: dict[str, tuple[float, float]]) -> None:
    compare("Ray Train: TorchTrainer", seconds, str(PROGRAMS / "ray_train.py"))
