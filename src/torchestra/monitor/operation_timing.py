"""Time operations on the ranks of ``torchestra bench``, each of which runs :func:`time_operations`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

import torchestra as dist

__all__ = ["OPERATIONS", "Cell", "Timing", "time_operations"]

Call = Callable[[], object]

_BATCH_S = 100e-6  # shorter calls are timed several at once: reading the clock takes a twentieth of a call
_FEWEST_BATCHES, _MOST_BATCHES = 3, 10_000


@dataclass(frozen=True)
class Cell:
    """One line of the table: an operation, its dtype by name, and the bytes that each rank puts in."""

    operation: str
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class Timing:
    """The microseconds of a call on the slowest rank: median, 99th percentile and best of all batches."""

    median_us: float
    p99_us: float
    best_us: float
    calls: int


def _all_to_all(given: torch.Tensor, received: torch.Tensor) -> Call:
    return partial(dist.all_to_all_single, received, given)


def _gather(given: torch.Tensor, received: torch.Tensor) -> Call:
    return partial(dist.gather, given, _parts(received) if dist.get_rank() == 0 else None, 0)


def _scatter(given: torch.Tensor, received: torch.Tensor) -> Call:
    return partial(dist.scatter, received, _parts(given) if dist.get_rank() == 0 else None, 0)


def _send_recv(given: torch.Tensor, received: torch.Tensor) -> Call:
    """Return a call that sends a message round: every rank to the next one, from the one before."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    send = partial(dist.send, given, (rank + 1) % ranks)
    recv = partial(dist.recv, received, (rank - 1) % ranks)

    def exchange() -> None:
        # One rank receives first, so that not all of them wait in send for a receiver.
        for step in (recv, send) if rank == 0 else (send, recv):
            step()

    return exchange


def _parts(whole: torch.Tensor) -> list[torch.Tensor]:
    return list(whole.chunk(dist.get_world_size()))


@dataclass(frozen=True)
class _Operation:
    """How to call an operation, and how much each rank gets out: so many times what it puts in."""

    call: Callable[[torch.Tensor, torch.Tensor], Call]
    out: Callable[[int], float] = lambda ranks: 1


_BY_NAME = {
    "all_reduce": _Operation(lambda given, received: partial(dist.all_reduce, given)),
    "reduce": _Operation(lambda given, received: partial(dist.reduce, given, 0)),
    "broadcast": _Operation(lambda given, received: partial(dist.broadcast, given, 0)),
    "all_gather": _Operation(
        lambda given, received: partial(dist.all_gather_into_tensor, received, given), lambda ranks: ranks
    ),
    "gather": _Operation(_gather, lambda ranks: ranks),
    "reduce_scatter": _Operation(
        lambda given, received: partial(dist.reduce_scatter_tensor, received, given), lambda ranks: 1 / ranks
    ),
    "scatter": _Operation(_scatter, lambda ranks: 1 / ranks),
    "all_to_all": _Operation(_all_to_all),
    "send_recv": _Operation(_send_recv),
}
OPERATIONS = ("barrier", *_BY_NAME)


def time_operations(cells: Sequence[Cell], seconds: float, symmetric: bool) -> list[Timing]:
    """Join the group, and time every cell for about ``seconds``; every rank returns the same timings.

    Args:
        cells: what to time, in order.
        seconds: how long each cell is timed.
        symmetric: whether tensors live in the group's memory (:func:`torchestra.empty`).
    """
    dist.init_process_group()
    try:
        return [_time(_call(cell, symmetric), seconds) for cell in cells]
    finally:
        dist.destroy_process_group()


def _call(cell: Cell, symmetric: bool) -> Call:
    if cell.operation == "barrier":
        return dist.barrier
    operation = _BY_NAME[cell.operation]
    dtype = getattr(torch, cell.dtype)
    ranks = dist.get_world_size()
    empty = dist.empty if symmetric else torch.empty
    # A whole number of elements for each rank, so that every operation can divide them.
    count = max(1, cell.nbytes // dtype.itemsize // ranks) * ranks
    given = empty(count, dtype=dtype).fill_(0)
    received = empty(int(count * operation.out(ranks)), dtype=dtype).fill_(0)
    return operation.call(given, received)


def _time(call: Call, seconds: float) -> Timing:
    batch = 1
    estimate = min(_batches(call, batch, 3))
    while estimate * batch < _BATCH_S / 2:  # the first calls are cold, and each reads the clock
        batch *= 8
        estimate = min(_batches(call, batch, 3))
    count = round(seconds / (estimate * batch))
    count = min(max(count, _FEWEST_BATCHES), _MOST_BATCHES)
    taken = [time_s * 1e6 for time_s in _batches(call, batch, count)]
    p99 = statistics.quantiles(taken, n=100, method="inclusive")[-1]
    return Timing(statistics.median(taken), p99, min(taken), count * batch)


def _batches(call: Call, batch: int, count: int) -> list[float]:
    """Return the seconds per call of each of ``count`` batches, on the rank where the batch took longest."""
    call()
    dist.barrier()
    taken = []
    for _ in range(count):
        start = time.perf_counter()
        for _ in range(batch):
            call()
        taken.append((time.perf_counter() - start) / batch)
    slowest = torch.tensor(taken, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    times: list[float] = slowest.tolist()
    return times
