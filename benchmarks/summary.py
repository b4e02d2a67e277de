"""From the ranks' samples to the numbers of a cell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = [
    "Timing",
    "geometric_mean",
    "median_interval",
    "percentile",
    "plan_batches",
    "slowest",
    "summarise",
]

# Where ranks share cores they run ahead of each other by a few operations. In short batches the slowest rank
# is then always one that has just been waiting, and all peers look up to twice as slow as they are.
BATCH_NS = 1_000_000.0
MAX_BATCHES = 2_000
MIN_BATCHES = 2


@dataclass(frozen=True)
class Timing:
    """One peer's result in one cell.

    Attributes:
        median_us: median over the batches, slowest rank, microseconds.
        p99_us: 99th percentile over single calls, slowest rank.
        best_us: the fastest batch.
        batches: how many batches the median is over, all rounds together.
        batch: how many calls a batch was.
        right: whether the result was right on every rank.
    """

    median_us: float
    p99_us: float
    best_us: float
    batches: int
    batch: int
    right: bool


def slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Return, sample by sample, the largest over the ranks."""
    return [max(samples) for samples in zip(*by_rank, strict=True)]


def percentile(samples: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` (0 to 1) of the samples lie, interpolated between neighbours.

    Raises:
        ValueError: there are no samples.
    """
    if not samples:
        raise ValueError("a percentile needs at least one sample")
    ordered = sorted(samples)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median_interval(samples: Sequence[float], certainty: float = 0.95) -> tuple[float, float]:
    """Return an interval that holds the median of the samples' distribution with this probability at least.

    It runs between two of the samples: how many lie below the true median is a matter of tossing coins,
    whatever the distribution. Of too few samples it is their whole range.

    Raises:
        ValueError: there are no samples.
    """
    if not samples:
        raise ValueError("an interval needs at least one sample")
    ordered, count = sorted(samples), len(samples)
    outside, left_out = 0.0, 0
    while left_out < (count - 1) // 2:
        outside += 2 * math.comb(count, left_out) / 2**count
        if outside > 1 - certainty:
            break
        left_out += 1
    first = max(0, left_out - 1)
    return ordered[first], ordered[-1 - first]


def geometric_mean(values: Iterable[float]) -> float | None:
    """Return the geometric mean of positive values; None of none."""
    logarithms = [math.log(value) for value in values]
    return math.exp(math.fsum(logarithms) / len(logarithms)) if logarithms else None


def plan_batches(call_ns: float, seconds: float) -> tuple[int, int]:
    """Return calls per batch, and batches in about ``seconds``, for calls of ``call_ns`` nanoseconds."""
    call_ns = max(call_ns, 1.0)
    batch = max(1, round(BATCH_NS / call_ns))
    batches = round(seconds * 1e9 / (batch * call_ns))
    return batch, min(max(batches, MIN_BATCHES), MAX_BATCHES)


def summarise(means_ns: Sequence[float], singles_ns: Sequence[float], batch: int, right: bool) -> Timing:
    """Return one cell of one peer, from the slowest rank's samples of all rounds."""
    return Timing(
        median_us=percentile(means_ns, 0.5) / 1e3,
        p99_us=percentile(singles_ns, 0.99) / 1e3,
        best_us=min(means_ns) / 1e3,
        batches=len(means_ns),
        batch=batch,
        right=right,
    )
