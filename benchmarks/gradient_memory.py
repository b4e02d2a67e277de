"""Measure what it spares DistributedDataParallel that gradients lie in memory that the ranks share.

    python -m torchestra run --nproc 2 -m benchmarks.gradient_memory [turns]     (default: 60)

The models of the training benchmark, bare and in two wrappers: in one, gradients of 64 KiB and more lie in
shared memory, as ever; in the other none do. They take turns, in random orders that are the same on all
ranks. Rank 0 prints the microseconds that each wrapper adds to a step of the slowest rank: the median of the
differences between turns.
"""

from __future__ import annotations

import random
import statistics
import sys
from unittest import mock

import torch

import torchestra as dist
from benchmarks.ranks.training_step import MODELS, Model, Step, _step, _turn
from torchestra.nn.parallel import gradient_memory

_WARM_UP_STEPS = 15
_SECONDS_OF_A_TURN = 0.1


def _steps(model: Model) -> dict[str, Step]:
    samples = torch.randn(model.samples)
    ways = {"bare": _step(model.make(), samples)}
    for name, least in ("shared", gradient_memory._LEAST_BYTES), ("not shared", 1 << 60):
        with mock.patch.object(gradient_memory, "_LEAST_BYTES", least):
            ways[name] = _step(dist.nn.parallel.DistributedDataParallel(model.make()), samples)
            _turn(ways[name], _WARM_UP_STEPS)  # it makes its buckets anew after the first step
    return ways


def main(turns: int) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group()
    choices = random.Random(0)
    for name, model in MODELS.items():
        ways = _steps(model)
        count = 3 + int(_SECONDS_OF_A_TURN / max(_turn(ways["bare"], 5)))
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(turns):
            for way in choices.sample(list(ways), len(ways)):
                taken[way].append(statistics.median(_turn(ways[way], count + 1)[1:]) * 1e6)
        for way in ("shared", "not shared") if dist.get_rank() == 0 else ():
            added = statistics.median(map(float.__sub__, taken[way], taken["bare"]))
            print(
                f"{name}, {way}: {added:,.0f} us beside {statistics.median(taken['bare']):,.0f}", flush=True
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
