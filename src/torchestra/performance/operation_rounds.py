"""Time operations in rounds: each round times all of them once.

What disturbs a machine for a while is then in one of the times of each operation, and their median has none
of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

import torchestra as dist
from torchestra.monitor.operation_timing import Call, Cell, prepare, time_call

LONG_S = 0.05
"""An operation that takes longer is timed in one round."""

_ROUNDS = 3
_BATCH, _BATCHED_BYTES = 4, 64 << 10
"""So many calls of operations on so few bytes are timed together: one may wait for a rank that is behind, and
the next is shorter for it."""


def time_rounds(
    cells: Sequence[Cell],
    seconds: float,
    group: Any = None,
    make: Callable[[Cell, Any], Call] | None = None,
    *,
    stops: bool = False,
) -> list[float | None]:
    """Return the seconds of operations in calls that follow each other; every rank of the group calls it.

    Args:
        seconds: about how long each is timed; at least some calls are made.
        make: returns the call for a cell in a group; default: of the operation on tensors of its own.
        stops: where a call takes longer than LONG_S, more bytes of that operation are not timed: None.
    """
    make = make or (lambda cell, group: prepare(cell, group=group))
    times: dict[Cell, list[float]] = {cell: [] for cell in cells}
    too_long: dict[str, int] = {}
    for _ in range(_ROUNDS):
        for cell, found in times.items():
            is_long = any(each > LONG_S for each in found)
            if is_long or (stops and cell.nbytes > too_long.get(cell.operation, cell.nbytes)):
                continue
            batch = _BATCH if cell.nbytes <= _BATCHED_BYTES else 1
            timing = time_call(make(cell, group), seconds / _ROUNDS, group, batch)
            found.append(timing.median_us / 1e6)
            if found[-1] > LONG_S:
                too_long.setdefault(cell.operation, cell.nbytes)
    return [statistics.median(found) if (found := times[cell]) else None for cell in cells]


def join_and_time(cells: Sequence[Cell], seconds: float) -> list[float | None]:
    """Be a rank of a new group that times operations; every rank returns the same."""
    torch.set_num_threads(1)  # threads that have made tensors wait actively, on cores of other ranks
    dist.init_process_group()
    try:
        return time_rounds(cells, seconds)
    finally:
        dist.destroy_process_group()
