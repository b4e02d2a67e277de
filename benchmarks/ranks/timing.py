"""The timed loop, the same for every peer.

Calls follow each other without a barrier between them, as in a program that does nothing else. Reading
the clock costs about as much as a tenth of the fastest operations, so short operations are timed
in batches and a batch yields the mean of its calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from time import perf_counter_ns

__all__ = ["Call", "timed"]

Call = Callable[[], object]


def timed(calls: Sequence[Call], batch: int, batches: int) -> list[float]:
    """Run ``calls`` in turn ``batch * batches`` times; per batch the mean of one turn, in nanoseconds."""
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
