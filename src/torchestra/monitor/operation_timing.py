"""The timing of operations on the ranks of ``torchestra bench``: each calls :func:`time_operations`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import torchestra as dist
from torchestra.engine.operations import COLLECTIVES, Collective, Shape

Call = Callable[[], object]
Make = Callable[[int], torch.Tensor]

SEND_RECV = "send_recv"
_BATCH_S = 100e-6  # shorter calls are timed in batches: reading the clock takes a twentieth of a call
_MIN_BATCHES, _MAX_BATCHES = 3, 10_000


@dataclass(frozen=True)
class Cell:
    """One line of the table: an operation, its dtype by name, and the bytes that each rank contributes."""

    operation: str
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class Timing:
    """Microseconds per call on the slowest rank: median, 99th percentile and best of all batches."""

    median_us: float
    p99_us: float
    best_us: float
    calls: int


def operations() -> list[str]:
    """Return the operations that can be timed: the table's collectives, and messages."""
    return [*COLLECTIVES, SEND_RECV]


def time_operations(cells: Sequence[Cell], seconds_per_cell: float, symmetric: bool) -> list[Timing]:
    """Join the group and time every cell; every rank returns the same timings.

    Args:
        cells: what to time, in order.
        seconds_per_cell: how long each cell is timed.
        symmetric: whether the tensors are in the group's memory (:func:`torchestra.empty`).
    """
    dist.init_process_group()
    try:
        return [time_call(prepare(cell, symmetric), seconds_per_cell) for cell in cells]
    finally:
        dist.destroy_process_group()


def prepare(cell: Cell, symmetric: bool = False, group: Any = None) -> Call:
    """Make the tensors of a cell, and return the call to time.

    Args:
        symmetric: whether the tensors are in the group's memory (:func:`torchestra.empty`).
        group: of the ranks that call, the default group's rank 0 among them; None for that group. Messages
            are timed in the default group only.
    """
    row = COLLECTIVES.get(cell.operation)
    if row is not None and row.input is None:
        return partial(getattr(dist, row.name), **_in_group(group))
    ranks, dtype = dist.get_world_size(group), getattr(torch, cell.dtype)
    # A whole number of elements for each rank, so that every operation can divide them.
    count = max(1, cell.nbytes // dtype.itemsize // ranks) * ranks

    def make(elements: int) -> torch.Tensor:
        empty: Any = dist.empty if symmetric else torch.empty
        tensor: torch.Tensor = empty(elements, dtype=dtype)
        return tensor.fill_(0)

    return _message(count, make) if row is None else _collective(row, count, make, group)


def _collective(row: Collective, count: int, make: Make, group: Any) -> Call:
    """Return a call of a row's public function with ``count`` elements on each rank."""
    ranks, is_root = dist.get_world_size(group), dist.get_rank() == 0
    assert row.input is not None
    assert row.output is not None
    piece = count // ranks if row.input.is_list else count
    out = {Shape.OUTPUT_IS_WHOLE: piece * ranks, Shape.INPUT_IS_WHOLE: piece // ranks}.get(row.shape, piece)
    arguments: dict[str, Any] = {}
    for parameter, elements in {row.input: piece, row.output: out}.items():
        tensors = [make(elements) for _ in range(ranks if parameter.is_list else 1)]
        value = tensors if parameter.is_list else tensors[0]
        arguments[parameter.name] = value if is_root or not parameter.on_root else None
    if row.root:
        arguments[row.root] = 0
    return partial(getattr(dist, row.name), **arguments, **_in_group(group))


def _in_group(group: Any) -> dict[str, Any]:
    return {} if group is None else {"group": group}


def _message(count: int, make: Make) -> Call:
    """Return a call in which each rank sends a message to the next rank and receives the previous rank's."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    send = partial(dist.send, make(count), (rank + 1) % ranks)
    recv = partial(dist.recv, make(count), (rank - 1) % ranks)

    def exchange() -> None:
        # One rank receives first, so that not all of them wait in send for a receiver.
        for step in (recv, send) if rank == 0 else (send, recv):
            step()

    return exchange


def time_call(call: Call, seconds: float, group: Any = None, least_batch: int = 1) -> Timing:
    """Time a call that all ranks of a group make, for about ``seconds``; all get the same timing.

    Args:
        least_batch: so many calls or more are timed together. In one call a rank may wait for another that
            is behind, which makes it longer than calls are on average.
    """
    batch = least_batch
    estimate = min(_batches(call, batch, 3, group))
    while estimate * batch < _BATCH_S / 2:  # the first calls run with cold caches, and each reads the clock
        batch *= 8
        estimate = min(_batches(call, batch, 3, group))
    count = min(max(round(seconds / (estimate * batch)), _MIN_BATCHES), _MAX_BATCHES)
    taken = [time_s * 1e6 for time_s in _batches(call, batch, count, group)]
    p99 = statistics.quantiles(taken, n=100, method="inclusive")[-1]
    return Timing(statistics.median(taken), p99, min(taken), count * batch)


def _batches(call: Call, batch: int, count: int, group: Any) -> list[float]:
    """Return the seconds per call of each of ``count`` batches, on the rank where the batch took longest."""
    call()
    dist.barrier(group=group)
    taken = []
    for _ in range(count):
        start = time.perf_counter()
        for _ in range(batch):
            call()
        taken.append((time.perf_counter() - start) / batch)
    slowest = torch.tensor(taken, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    times: list[float] = slowest.tolist()
    return times
