"""The timed loop, the same for every peer.

Calls follow each other without a barrier between them, as in a program that does nothing else. Reading
the clock costs about as much as a tenth of the fastest operations, so short operations are timed
in batches and a batch yields the mean of its calls.

Buffers that nobody changes between calls flatter every library: what a peer has read stays in its cache. So
what a rank puts in is written anew before every call (:func:`timed_dirtied`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from time import perf_counter_ns

__all__ = ["Call", "timed", "timed_dirtied"]

Call = Callable[[], object]


def timed(calls: Sequence[Call], batch: int, batches: int) -> list[float]:
    """Run ``calls`` in turn ``batch * batches`` times; return each batch's mean turn in nanoseconds."""
    means = []
    if len(calls) == 1:
        (call,) = calls
        for _ in repeat(None, batches):
            start = perf_counter_ns()
            for _ in repeat(None, batch):
                call()
            means.append((perf_counter_ns() - start) / batch)
    elif len(calls) == 2:
        first, second = calls
        for _ in repeat(None, batches):
            start = perf_counter_ns()
            for _ in repeat(None, batch):
                first()
                second()
            means.append((perf_counter_ns() - start) / batch)
    else:
        # A rank without a part in the operation: the last of an odd number has nobody to send to.
        means = [0.0] * batches
    return means


def timed_dirtied(
    calls: Sequence[Call], dirty: Call, barrier: Call | None, batch: int, batches: int
) -> list[float]:
    """Time as :func:`timed`, with ``dirty`` (and ``barrier``) called before every turn, which is not timed.

    So each turn is timed on its own; what reading the clock adds is measured and taken off.
    """
    if not calls:
        return [0.0] * batches
    (call, *others), means = calls, []
    clock = _clock_ns()
    for _ in repeat(None, batches):
        taken = 0
        for _ in repeat(None, batch):
            dirty()
            if barrier is not None:
                barrier()
            start = perf_counter_ns()
            call()
            for other in others:
                other()
            taken += perf_counter_ns() - start
        means.append(max(0.0, taken / batch - clock))
    return means


def _clock_ns() -> float:
    """Return what it takes to read the clock."""
    readings = []
    for _ in repeat(None, 101):
        start = perf_counter_ns()
        readings.append(perf_counter_ns() - start)
    return float(sorted(readings)[50])
