"""The ranks' side of benchmarks/prediction.py: operations and training steps in groups over hosts.

As a program, ``python -m benchmarks.ranks.predicted FILE SECONDS JSON 1``, it is a rank on namespaces.
JSON is the list of layouts, each with hosts, ranks on each, and sizes. Rank 0 writes the link and all times
into FILE; with 0 in place of 1 only the times.
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
from torchestra.monitor.operation_timing import Cell, prepare
from torchestra.nn.parallel import DistributedDataParallel
from torchestra.performance.decoding import encode
from torchestra.performance.link_timing import LinkMeasurement, measure_link
from torchestra.performance.operation_rounds import time_rounds

STEP, SMALL_BUCKETS = "DDP step", "DDP step, buckets of 2 MB"
STEPS: dict[str, int | None] = {STEP: None, SMALL_BUCKETS: 2}
"""``bucket_cap_mb``; None for its default."""

STEP_SOURCE = "benchmarks.ranks.predicted:step"
_LINK_SECONDS = 5.0
_LARGE = 1 << 30  # steps are timed one by one, as large operations are
_WIDTHS = (512, 1024, 1024, 512)


def step() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """Return the model of the training step, an MLP with 8.4 MB of gradients, and its loss."""
    torch.manual_seed(0)
    layers = [part for pair in itertools.pairwise(_WIDTHS) for part in (nn.Linear(*pair), nn.ReLU())]
    batch = torch.randn(32, _WIDTHS[0])
    return nn.Sequential(*layers[:-1]), lambda model: model(batch).square().mean()


def training_step(group: Any = None, bucket_cap_mb: int | None = None) -> Callable[[], None]:
    """Return a training step under DistributedDataParallel."""
    bare, loss = step()
    model = DistributedDataParallel(bare, process_group=group, bucket_cap_mb=bucket_cap_mb)
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

    def make(cell: Cell, group: Any) -> Callable[[], object]:
        if cell.operation in STEPS:
            return training_step(group, STEPS[cell.operation])
        return prepare(cell, group=group)

    chosen = [Cell(name, "float32", _LARGE if name in STEPS else nbytes) for name, nbytes in cells]
    times = time_rounds(chosen, seconds, group, make)
    return [each for each in times if each is not None]


def join_and_time(cells: list[tuple[str, int]], seconds: float) -> list[float]:
    """Be a rank of a job on one host."""
    torch.set_num_threads(1)
    dist.init_process_group()
    try:
        return time_cells(cells, seconds)
    finally:
        dist.destroy_process_group()


def main(output: Path, seconds: float, layouts: list[dict[str, Any]], *, calibrates: bool) -> None:
    """Be a rank of a job on several hosts: measure the link, then each layout in a group of its own."""
    torch.set_num_threads(1)
    dist.init_process_group()
    world = dist.group.WORLD
    assert world is not None
    hosts = world.communicator.engine.hosts
    assert hosts is not None
    told: dict[str, Any] = {}
    if calibrates and (link := measure_link(_LINK_SECONDS, 0.5, lambda line: None)) is not None:
        told = _told(link)
    found = []
    for layout in layouts:
        members = [ranks[: layout["ranks"]] for ranks in hosts.members[: layout["hosts"]]]
        group = dist.new_group(sorted(itertools.chain(*members)))
        if dist.get_rank(group) >= 0:
            found.append({**layout, "seconds": time_cells(layout["cells"], seconds, group)})
        dist.barrier()
    if dist.get_rank() == 0:
        output.write_text(json.dumps({**told, "found": found}))
    dist.destroy_process_group()


def _told(link: LinkMeasurement) -> dict[str, Any]:
    operations = [
        (ranks, operation.name, operation.nbytes, seconds)
        for ranks, times in link.operations.items()
        for operation, seconds in times.items()
    ]
    return {"link": encode(link.link), "per_op_s": dict(link.per_op_s), "operations": operations}


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), json.loads(sys.argv[3]), calibrates=sys.argv[4] == "1")
