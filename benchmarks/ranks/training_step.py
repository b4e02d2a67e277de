"""A rank of the training benchmark: steps of a model alone, in torchestra's DDP, and in torch's on Gloo.

All three run in the same processes, and take turns of a few steps each, in every order equally often, so
that whatever disturbs the machine, or is left in its caches, disturbs them alike. A step is a forward and a
backward, from gradients that are None. Its time is that of the slowest rank, a turn's the median of its
steps. Rank 0 writes the times of all turns as JSON, in microseconds by model and way, into the directory that
TORCHESTRA_BENCH_DIRECTORY names.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed
from torch import nn

import torchestra as dist

Step = Callable[[], None]
WAYS = ("alone", "torchestra", "gloo")


@dataclass(frozen=True)
class Model:
    """A module, and the shape of the samples of one step."""

    make: Callable[[], nn.Module]
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Steps:
    """Say how many steps there are at least, in a turn and before the first one."""

    warm_up: int
    of_a_turn: int


def _mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 4, dim_feedforward=512, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODELS = {
    "MLP 64-128-10, batch 32": Model(lambda: _mlp(64, 128, 10), (32, 64)),
    "MLP 1024-2048-2048-1024, batch 16": Model(lambda: _mlp(1024, 2048, 2048, 1024), (16, 1024)),
    "transformer, 2 layers, width 128, sequence 64, batch 8": Model(_transformer, (8, 64, 128)),
}


def _step(module: nn.Module, samples: torch.Tensor) -> Step:
    def step() -> None:
        module.zero_grad(set_to_none=True)
        module(samples).square().mean().backward()

    return step


def _turn(step: Step, count: int) -> list[float]:
    """Return the seconds of some steps, of the slowest rank each."""
    dist.barrier()
    taken = []
    for _ in range(count):
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
    slowest = torch.tensor(taken, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    found: list[float] = slowest.tolist()
    return found


def _rounds(least_turns: int, least_seconds: float) -> Iterator[tuple[str, ...]]:
    """Yield the orders of the ways, every one in its turn, the same number on all ranks."""
    began = time.perf_counter()
    for number, order in enumerate(itertools.cycle(itertools.permutations(WAYS))):
        elapsed = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
        dist.broadcast(elapsed, 0)
        if number >= least_turns and elapsed.item() >= least_seconds:
            return
        yield order


def _measure(
    model: Model, seconds: float, turns: int, model_seconds: float, least: Steps
) -> dict[str, list[float]]:
    samples = torch.randn(model.samples)
    modules = (
        model.make(),
        dist.nn.parallel.DistributedDataParallel(model.make()),
        nn.parallel.DistributedDataParallel(model.make()),
    )
    ways = {way: _step(module, samples) for way, module in zip(WAYS, modules, strict=True)}
    counts = {}
    for way, step in ways.items():
        _turn(step, least.warm_up)
        counts[way] = max(least.of_a_turn, int(seconds / statistics.median(_turn(step, least.of_a_turn + 2))))
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for order in _rounds(turns, model_seconds):
        for way in order:
            # The first step after another way's turn finds the caches as that has left them.
            steps = _turn(ways[way], counts[way] + 1)[1:]
            taken[way].append(statistics.median(steps) * 1e6)
    return taken


def main(seconds: float, turns: int, model_seconds: float, least: Steps) -> None:
    """Measure every model, each way in so many turns of so many seconds.

    There are more turns, if those of a model take less than ``model_seconds``.
    """
    directory = Path(os.environ["TORCHESTRA_BENCH_DIRECTORY"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group()
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{directory / 'meeting'}",
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
    )
    found = {name: _measure(model, seconds, turns, model_seconds, least) for name, model in MODELS.items()}
    if dist.get_rank() == 0:
        (directory / "found.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
    dist.destroy_process_group()


if __name__ == "__main__":
    steps = Steps(int(sys.argv[4]), int(sys.argv[5]))
    main(float(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), steps)
