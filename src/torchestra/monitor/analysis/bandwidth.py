"""How fast operations move data, by kind and size, and how fast this machine copies."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from torchestra.engine.recorder.formats.rows import Row

_ROUND_S = 0.004


@dataclass(frozen=True)
class Bandwidth:
    """What operations of one kind and size reached.

    Attributes:
        nbytes: of one operation: what a rank gave or got, whichever is more.
        calls: by all ranks.
        bytes_per_s: the median, of the time in which an operation did not wait for other ranks.
        whole_bytes_per_s: the median, of the whole time of an operation.
    """

    kind: str
    nbytes: int
    calls: int
    bytes_per_s: float
    whole_bytes_per_s: float


def bandwidths_of(rows: Iterable[Row]) -> list[Bandwidth]:
    """Return what operations that have ended reached, by kind and size; of receives, from the message on."""
    by_size: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in rows:
        if row.state == "done" and row.nbytes > 0 and row.duration_us > row.waited_us and row.blocking:
            by_size[row.kind, row.nbytes].append(row)
    return [
        Bandwidth(
            kind,
            nbytes,
            len(own),
            nbytes / median(row.duration_us - row.waited_us for row in own) * 1e6,
            nbytes / median(row.duration_us for row in own) * 1e6,
        )
        for (kind, nbytes), own in sorted(by_size.items())
    ]


def measure_copies(sizes: Sequence[int]) -> dict[int, float]:
    """Return, by size, how many bytes one core of this machine copies a second: the best of some rounds.

    It takes some 20 ms a size. What else runs on the machine makes it slower.
    """
    found = {}
    for size in sizes:
        source, target = np.ones(size, dtype=np.uint8), np.zeros(size, dtype=np.uint8)
        np.copyto(target, source)
        best, until = 0.0, time.perf_counter() + _ROUND_S * 5
        while time.perf_counter() < until:
            repeats = max(1, min(1000, (1 << 20) // size))
            began = time.perf_counter()
            for _ in range(repeats):
                np.copyto(target, source)
            best = max(best, repeats * size / (time.perf_counter() - began))
        found[size] = best
    return found
