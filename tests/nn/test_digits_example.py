"""The example that newcomers read first runs, and says what it claims to prove."""

from __future__ import annotations

import argparse
import copy
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from ddp_models import seeded
from rich.console import Console

import torchestra as dist
from torchestra.nn.parallel import DistributedDataParallel
from warm_programs import run_warm
from worlds import run

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

SCRIPT = Path(__file__).parents[2] / "examples" / "digits.py"
SECONDS = 250


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digits", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_training_does_not_depend_on_the_number_of_ranks(digits: ModuleType) -> None:
    """Three ranks divide neither the batch nor the tail evenly."""
    network = seeded(digits.network)
    settings = argparse.Namespace(epochs=1, batch_size=64, lr=2e-3, seed=0)

    def body() -> tuple[list[float], list[torch.Tensor], bool, float]:
        model = DistributedDataParallel(copy.deepcopy(network))
        curve = digits.train(model, settings, Console(quiet=True))
        weights = [each.detach() for each in model.parameters()]
        return curve, weights, digits.weights_are_identical(model), digits.accuracy(model)

    (curve, weights, identical, accuracy) = run("threads", 1, body)[0]
    assert identical
    assert accuracy > 0.5
    for other, others_weights, identical, others_accuracy in run("threads", 3, body):
        assert identical
        assert other == pytest.approx(curve, rel=1e-3)
        assert others_accuracy == pytest.approx(accuracy, abs=0.02)
        for mine, theirs in zip(weights, others_weights, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=5e-3)


def test_different_weights_are_noticed(digits: ModuleType) -> None:
    def body() -> bool:
        model = torch.nn.Linear(2, 2)
        with torch.no_grad():
            model.weight.fill_(1)
            model.bias.fill_(1 + (dist.get_rank() == 2) * 2e-7)
        return digits.weights_are_identical(model)

    found = run("threads", 3, body)
    assert not all(found)


def test_it_runs_under_the_launcher_and_draws_its_curve(tmp_path: Path) -> None:
    picture = tmp_path / "out" / "loss.png"
    launched = [sys.executable, "-m", "torchestra", "run", "--nproc", "2", str(SCRIPT)]
    arguments = ["--epochs", "1", "--require-accuracy", "0.5", "--output", str(picture)]
    ended = run_warm([*launched, *arguments], capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr
    assert "bit-identical" in ended.stdout
    assert "time in communication" in ended.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_it_runs_alone_and_fails_if_too_little_was_learned(
    digits: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--epochs", "0", "--require-accuracy", "0.97", "--output", str(tmp_path / "loss.png")]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    assert digits.main() == 1
    assert "is below 97.00%" in capsys.readouterr().err
    assert not dist.is_initialized()
