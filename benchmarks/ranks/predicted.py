"""The ranks' side of benchmarks/prediction.py: operations and training steps in groups over hosts.

As a program it is a rank of a job on namespaces: ``python -m benchmarks.ranks.predicted FILE SECONDS JSON``,
where JSON is the list of layouts, each with hosts, ranks on each, and sizes. Rank 0 writes the link and all
times into FILE.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchestra as dist
from torchestra.monitor.operation_timing import Cell, prepare, time_call
from torchestra.nn.parallel import DistributedDataParallel
from torchestra.performance.decoding import encode
from torchestra.performance.link_timing import measure_link

STEP = "DDP step"
STEP_SOURCE = "benchmarks.ranks.predicted:step"
_LINK_SECONDS = 5.0
_BATCH, _BATCHED_BYTES = 4, 64 << 10
_WIDTHS = (512, 1024, 1024, 512)


def step() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """Return the model of the training step, an MLP with 8.4 MB of gradients, and its loss."""
    torch.manual_seed(0)
    layers = [part for pair in itertools.pairwise(_WIDTHS) for part in (nn.Linear(*pair), nn.ReLU())]
    batch = torch.randn(32, _WIDTHS[0])
    return nn.Sequential(*layers[:-1]), lambda model: model(batch).square().mean()


def training_step(group: Any = None) -> Callable[[], None]:
    """Return a training step under DistributedDataParallel."""
    bare, loss = step()
    model = DistributedDataParallel(bare, process_group=group)
    optimizer = torch.optim.SGD(bare.parameters(), lr=1e-6)

    def take() -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    for _ in range(3):  # the buckets are made anew after the first step
        take()
    return take


def time_cells(cells: list[tuple[str, int]], seconds: float, group: Any = None) -> list[float]:
    """Return the seconds of each operation on so many bytes, the median of the slowest rank."""
    times = []
    for name, nbytes in cells:
        call = training_step(group) if name == STEP else prepare(Cell(name, "float32", nbytes), group=group)
        batch = _BATCH if name != STEP and nbytes <= _BATCHED_BYTES else 1
        times.append(time_call(call, seconds, group, batch).median_us / 1e6)
    return times


def join_and_time(cells: list[tuple[str, int]], seconds: float) -> list[float]:
    """Be a rank of a job on one host."""
    torch.set_num_threads(1)
    dist.init_process_group()
    try:
        return time_cells(cells, seconds)
    finally:
        dist.destroy_process_group()


def main(output: Path, seconds: float, layouts: list[dict[str, Any]]) -> None:
    """Be a rank of a job on several hosts: measure the link, then each layout in a group of its own."""
    torch.set_num_threads(1)
    dist.init_process_group()
    world = dist.group.WORLD
    assert world is not None
    hosts = world.communicator.engine.hosts
    assert hosts is not None
    link = measure_link(_LINK_SECONDS, 0.5, lambda line: None)
    found = []
    for layout in layouts:
        members = [ranks[: layout["ranks"]] for ranks in hosts.members[: layout["hosts"]]]
        group = dist.new_group(sorted(itertools.chain(*members)))
        if dist.get_rank(group) >= 0:
            found.append({**layout, "seconds": time_cells(layout["cells"], seconds, group)})
        dist.barrier()
    if link is not None:
        told = {"link": encode(link.link), "per_op_s": dict(link.per_op_s), "found": found}
        output.write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), json.loads(sys.argv[3]))
