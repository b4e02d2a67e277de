"""The example of uneven inputs runs, and fails where what it says is not so."""

from __future__ import annotations

import argparse
import copy
import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch._dynamo  # what an optimizer imports when it is first made; here, so that ranks need not

import torchestra as dist
from torchestra.nn.parallel import DistributedDataParallel
from torchestra.optim import ZeroRedundancyOptimizer
from warm_programs import run_warm
from worlds import run

pytest.importorskip("sklearn")

SCRIPT = Path(__file__).parents[2] / "examples" / "uneven_inputs.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("uneven_inputs", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_sample_is_in_one_share_and_shares_grow(example: ModuleType) -> None:
    for ranks in (1, 2, 5):
        shares = example.shares(1000, ranks)
        assert torch.equal(torch.cat(shares), torch.arange(1000))
        assert all(len(more) > 1.15 * len(less) for less, more in itertools.pairwise(shares))


def test_an_epoch_is_that_of_one_process(example: ModuleType) -> None:
    settings = argparse.Namespace(batch_size=64, lr=3e-3)
    network = example.network()

    def body() -> tuple[float, bool, int]:
        alone = copy.deepcopy(network)
        model = DistributedDataParallel(copy.deepcopy(alone))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=settings.lr)
        _, steps = example.train_epoch(model, optimizer, 0, settings.batch_size)
        example.train_epoch_alone(alone, dist.get_world_size(), settings)
        return example.difference(model.module, alone), example.ranks_agree(model), steps

    told = run("threads", 3, body)
    assert [steps for *_, steps in told] == [4, 8, 12]
    for off, agree, _ in told:
        assert off < 1e-3
        assert agree


def test_it_runs_under_the_launcher() -> None:
    launched = [sys.executable, "-m", "torchestra", "run", "--nproc", "2", str(SCRIPT)]
    arguments = ["--epochs", "2", "--require-accuracy", "0.5"]
    ended = run_warm([*launched, *arguments], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert "steps by rank: 30, 60" in ended.stdout
    assert "those of one process" in ended.stdout
    assert "bit-identical" in ended.stdout


def test_it_fails_if_too_little_was_learned(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--epochs", "0"])
    assert example.main() == 1
    assert "is below 95.00%" in capsys.readouterr().err
