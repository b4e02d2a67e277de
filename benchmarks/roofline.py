"""The least that memory has to move for an operation, and so the least time it can take.

``traffic`` counts, over all ranks together, the bytes that must be read at least once (every input)
and those that must be written (every output), however clever the algorithm and however large the
caches. It leaves out what a real one may add: reading an input once per rank that needs it, copies
through shared memory, and the read that an ordinary store to an uncached line implies.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.ranks.shapes import ITEM_BYTES, shape

__all__ = ["FLOOR_FROM_BYTES", "Traffic", "floor_us", "traffic"]

FLOOR_FROM_BYTES = 16 << 20
"""Below this size a cell has no floor: its buffers may stay in caches, which are faster than memory."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that all ranks together have to read and to write."""

    read: int
    written: int


def traffic(operation: str, size: int, world: int) -> Traffic:
    """Return what ``operation`` has to move on ``world`` ranks that put in ``size`` bytes each."""
    buffers = shape(operation, size, world)
    given = buffers.given * ITEM_BYTES
    part = buffers.part * ITEM_BYTES
    pairs = world // 2
    moved = {
        "all_reduce": Traffic(world * given, world * given),
        "reduce": Traffic(world * given, given),
        "broadcast": Traffic(given, (world - 1) * given),
        "all_gather": Traffic(world * given, world * world * given),
        "gather": Traffic(world * given, world * given),
        "reduce_scatter": Traffic(world * given, world * part),
        "scatter": Traffic(given, world * part),
        "all_to_all": Traffic(world * given, world * given),
        # One of the two directions: a rank of each pair sends, the other receives.
        "send_recv": Traffic(pairs * given, pairs * given),
        "barrier": Traffic(0, 0),
    }
    return moved[operation]


def floor_us(operation: str, size: int, world: int, bandwidth: float) -> float | None:
    """Return the floor of a cell in microseconds, for ``bandwidth`` bytes per second read and written by all.

    None for a barrier, and below :data:`FLOOR_FROM_BYTES`.
    """
    if operation == "barrier" or size < FLOOR_FROM_BYTES:
        return None
    moved = traffic(operation, size, world)
    return (moved.read + moved.written) / bandwidth * 1e6
