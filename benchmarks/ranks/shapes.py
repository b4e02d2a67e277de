"""The measured operations: how large their buffers are, and what must be in them afterwards.

Everything follows from one rule: *the size of a cell is the number of bytes that a rank puts in*
(float32). So with ``n`` elements put in and ``world`` ranks:

==================  ===================  ============================================
operation           elements put in      elements got
==================  ===================  ============================================
all_reduce, reduce  n                    n, in place (reduce: on rank 0)
broadcast           n, on rank 0         n, in place
all_gather, gather  n                    world * n (gather: on rank 0)
reduce_scatter      n                    n / world
scatter             n, on rank 0         n / world
all_to_all          n                    n
send_recv           n                    n, from the other rank of the pair 0-1, 2-3, …
barrier             0                    0
==================  ===================  ============================================

What is cut into ``world`` parts has at least one element in each part.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = [
    "EVERYONE",
    "ITEM_BYTES",
    "OPERATIONS",
    "Floats",
    "Pattern",
    "Piece",
    "Shape",
    "offered",
    "partner",
    "pieces",
    "shape",
]

OPERATIONS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "barrier",
    "send_recv",
    "reduce",
    "gather",
    "scatter",
)
ITEM_BYTES = 4
EVERYONE = -1
"""The source of a :class:`Piece` that is the sum over all ranks."""

Floats = npt.NDArray[np.float32]

_PERSISTENT = frozenset(OPERATIONS) - {"barrier", "reduce", "gather", "scatter"}
_IN_PLACE = frozenset({"all_reduce", "reduce", "broadcast"})
_CUT = frozenset({"reduce_scatter", "scatter", "all_to_all"})
_COLLECTED = frozenset({"all_gather", "gather"})


@dataclass(frozen=True)
class Shape:
    """The buffers of one rank, in elements; ``received`` is 0 where the operation works in place."""

    given: int
    received: int
    part: int


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` to ``stop`` of a result are those of ``source`` from ``offset`` on."""

    start: int
    stop: int
    source: int
    offset: int


def shape(operation: str, size: int, world: int) -> Shape:
    """Return the buffers of ``operation`` where each of ``world`` ranks puts in ``size`` bytes."""
    if operation == "barrier":
        return Shape(0, 0, 0)
    count = max(1, size // ITEM_BYTES)
    part = max(1, count // world)
    if operation in _CUT:
        return Shape(part * world, part * world if operation == "all_to_all" else part, part)
    if operation in _COLLECTED:
        return Shape(count, count * world, part)
    return Shape(count, 0 if operation in _IN_PLACE else count, part)


def offered(operation: str, memory: str) -> bool:
    """Return whether an operation can be measured on a kind of memory, or as a persistent one."""
    if memory == "persistent":
        return operation in _PERSISTENT
    return operation != "barrier" or memory == "private"


def partner(rank: int, world: int) -> int | None:
    """Return the other rank of the pair that sends and receives; none for the last of an odd number."""
    other = rank ^ 1
    return other if other < world else None


def pieces(operation: str, rank: int, world: int, size: int) -> list[Piece]:
    """Return where the elements of this rank's result come from; empty where it gets none."""
    buffers = shape(operation, size, world)
    count, part = buffers.given, buffers.part
    mine = rank * part
    other = partner(rank, world)
    if operation == "all_reduce" or (operation == "reduce" and rank == 0):
        return [Piece(0, count, EVERYONE, 0)]
    if operation == "broadcast":
        return [Piece(0, count, 0, 0)]
    if operation == "all_gather" or (operation == "gather" and rank == 0):
        return [Piece(source * count, (source + 1) * count, source, 0) for source in range(world)]
    if operation == "reduce_scatter":
        return [Piece(0, part, EVERYONE, mine)]
    if operation == "scatter":
        return [Piece(0, part, 0, mine)]
    if operation == "all_to_all":
        return [Piece(source * part, (source + 1) * part, source, mine) for source in range(world)]
    if operation == "send_recv" and other is not None:
        return [Piece(0, count, other, 0)]
    return []


class Pattern:
    """The values of the check: element ``i`` of rank ``r`` is ``(i + 13 r) % 251``.

    Small whole numbers, so that sums are exact in any order; a period that is prime, so that no two
    parts of a buffer that an operation could mix up are alike. Periodic also means that any stretch
    of any rank, and of the sum over all, is a view of a short table.
    """

    BLOCK = 1 << 18
    _PERIOD = 251
    _STEP = 13

    def __init__(self, world: int) -> None:
        self._one = self._table(np.arange(self._PERIOD))
        total = np.zeros(self._PERIOD, dtype=np.int64)
        for rank in range(world):
            total += np.roll(np.arange(self._PERIOD), -rank * self._STEP)
        self._sum = self._table(total)

    def fill(self, buffer: Floats, rank: int) -> None:
        """Write this rank's values into a buffer."""
        for start in range(0, buffer.size, self.BLOCK):
            stop = min(start + self.BLOCK, buffer.size)
            buffer[start:stop] = self._stretch(rank, start, stop - start)

    def holds(self, result: Floats, expected: list[Piece]) -> bool:
        """Return whether a result is, element by element, what its pieces say."""
        for piece in expected:
            for start in range(piece.start, piece.stop, self.BLOCK):
                stop = min(start + self.BLOCK, piece.stop)
                right = self._stretch(piece.source, piece.offset + start - piece.start, stop - start)
                if not np.array_equal(result[start:stop], right):
                    return False
        return True

    def _stretch(self, source: int, offset: int, count: int) -> Floats:
        if source == EVERYONE:
            first = offset % self._PERIOD
            return self._sum[first : first + count]
        first = (offset + source * self._STEP) % self._PERIOD
        return self._one[first : first + count]

    @classmethod
    def _table(cls, period: npt.NDArray[np.int64]) -> Floats:
        return np.resize(period, cls.BLOCK + cls._PERIOD).astype(np.float32)
