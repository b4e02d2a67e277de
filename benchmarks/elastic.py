"""Time what elastic training costs: a step beside DistributedDataParallel, and moving a state to a new rank.

    python -m benchmarks.elastic [--ranks 2] [--megabytes 100] [--layers 8] [--width 1024]

Prints one line for each. Ranks are processes; every number is the median of several repetitions on rank 0.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn

import torchestra as dist
from torchestra import elastic
from torchestra.nn.parallel import DistributedDataParallel

SHARDS, SAMPLES = 4, 16


def network(layers: int, width: int) -> nn.Module:
    """Return layers of equal width."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def with_ddp(layers: int, width: int, steps: int) -> float:
    """Return the median seconds of a step; a rank's share is one batch."""
    model = DistributedDataParallel(network(layers, width), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    inputs = torch.randn(SAMPLES * SHARDS // dist.get_world_size(), width)
    took = []
    for _ in range(steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        took.append(time.perf_counter() - began)
    return statistics.median(took[2:])


def with_shards(layers: int, width: int, steps: int, shards: int) -> float:
    """Return the median seconds of a step, in which a rank computes some shards."""
    model = network(layers, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    inputs = torch.randn(SAMPLES * SHARDS // shards, width)
    stamps: dict[int, float] = {}
    for shard in elastic.shards(elastic.State(model, optimizer), steps, shards):
        stamps.setdefault(shard.step, time.perf_counter())
        shard.backward(model(inputs).square().mean(), len(inputs))
    times = [stamps[step] for step in sorted(stamps)]
    return statistics.median([after - before for before, after in itertools.pairwise(times[2:])])


class Moving(NamedTuple):
    """Hold what moving a state takes, in seconds.

    Attributes:
        new, behind: until a new rank, and one a step behind, has it.
        core: what a rank's core works for the first, which other programs on the machine do not change much.
        copied, copied_core: a copy of the state by one rank: the time, and what the core works.
    """

    new: float
    behind: float
    core: float
    copied: float
    copied_core: float


def moving(megabytes: int) -> Moving:
    """Measure how a state is moved."""
    tensors = {f"t{index}": torch.ones(megabytes << 16) for index in range(4)}
    began_anew, behind, core = [], [], []
    for repetition in range(4):
        state = elastic.State(*tensors.values())
        if dist.get_rank() != 1:
            state.load_state_dict(state.state_dict())
        dist.barrier()
        worked = time.process_time()
        began_anew.append(state.sync().seconds)
        core.append(time.process_time() - worked)
        state.step = repetition + (dist.get_rank() != 1)
        dist.barrier()
        behind.append(state.sync().seconds)
    source, target = tensors["t0"], torch.ones(megabytes << 16)
    began, worked = time.perf_counter(), time.process_time()
    for _ in range(4):
        target.copy_(source)
    copied, copied_core = time.perf_counter() - began, time.process_time() - worked
    new, stale = statistics.median(began_anew[1:]), statistics.median(behind[1:])
    return Moving(new, stale, statistics.median(core[1:]), copied, copied_core)


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Return what this rank has measured, in seconds."""
    torch.set_num_threads(1)
    dist.init_process_group()
    found: dict[str, float] = {}
    ranks = dist.get_world_size()
    ways: dict[str, Callable[[], float]] = {
        "DistributedDataParallel": lambda: with_ddp(options.layers, options.width, options.steps),
        "as many shards as ranks": lambda: with_shards(options.layers, options.width, options.steps, ranks),
        f"{2 * ranks} shards": lambda: with_shards(options.layers, options.width, options.steps, 2 * ranks),
    }
    for name, way in ways.items():
        found[f"step with {name}"] = min(way() for _ in range(3))
    moved = moving(options.megabytes)
    found[f"{options.megabytes} MiB to a new rank"] = moved.new
    found[f"{options.megabytes} MiB to a new rank: work of each core"] = moved.core
    found[f"{options.megabytes} MiB to a rank that is a step behind"] = moved.behind
    found[f"{options.megabytes} MiB copied by one rank"] = moved.copied
    found[f"{options.megabytes} MiB copied by one rank: work of its core"] = moved.copied_core
    dist.destroy_process_group()
    return found


def lines(found: dict[str, float]) -> Iterator[str]:
    """Return a line for each time."""
    for name, seconds in found.items():
        yield f"{name:55}{seconds * 1e3:9.2f} ms"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Time what elastic training costs.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=100, help="of state to move")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    print("\n".join(lines(dist.launch(measure, options.ranks, options)[0])))


if __name__ == "__main__":
    main()
