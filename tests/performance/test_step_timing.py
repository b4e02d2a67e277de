"""A user's training step is timed, with the buckets that DistributedDataParallel makes of its model."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchestra.errors import InvalidArgumentError, RankError
from torchestra.launcher.api import launch
from torchestra.performance.step_timing import load_step, time_step

SCRIPT = """
import torch

def step():
    torch.manual_seed(0)
    model, batch = torch.nn.Sequential(*[torch.nn.Linear(400, 400) for _ in range(3)]), torch.randn(4, 400)
    return model, lambda model: model(batch).square().mean()

def nothing():
    return 7
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "training.py"
    path.write_text(SCRIPT)
    return str(path)


def test_the_parts_of_a_step(script: str) -> None:
    (samples,) = launch(time_step, 1, f"{script}:step", 0.02, kind="threads")
    assert samples.dtype == "float32"
    assert sum(samples.bucket_bytes) == 4 * 3 * (400 * 400 + 400)
    assert len(samples.bucket_bytes) > 1  # the first has a megabyte at most
    assert len(samples.forward) == len(samples.optimizer) >= len(samples.whole) >= 3
    for ready, backward in zip(samples.ready, samples.backward, strict=True):
        assert 0 < ready[0] < ready[-1] < backward


def test_ranks_that_compute_at_once_take_the_same_number_of_steps(script: str) -> None:
    one, other = launch(time_step, 2, f"{script}:step", 0.02, kind="threads")
    assert one.bucket_bytes == other.bucket_bytes
    assert len(one.forward) == len(other.forward) >= 5
    assert len(one.whole) == len(other.whole)


@pytest.mark.parametrize(
    ("where", "told"),
    [("training.py", "FILE.py:FUNCTION"), ("no/such.py:step", "cannot load"), ("json:step", "no attribute")],
)
def test_a_step_that_is_not_there(where: str, told: str) -> None:
    with pytest.raises(InvalidArgumentError, match=told):
        load_step(where)


def test_a_function_that_returns_something_else(script: str) -> None:
    with pytest.raises(RankError, match=r"must return a model, .* got 7"):
        launch(time_step, 1, f"{script}:nothing", 0.01, kind="threads")
