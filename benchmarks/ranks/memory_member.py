"""A process that only streams through its own memory: what the machine can do at best."""

from __future__ import annotations

import os
from functools import partial

import numpy as np

from .member import Prepared
from .shapes import Floats
from .timing import Call

__all__ = ["MemoryMember"]


class MemoryMember:
    """One of several processes that read and write memory at once, without talking to each other."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.world = int(os.environ["WORLD_SIZE"])
        self.description = f"NumPy {np.__version__}"
        self._buffer: Floats = np.empty(0, dtype=np.float32)

    def prepare(self, operation: str, size: int, memory: str, slot: str) -> Prepared:
        """Make a stream over ``size`` bytes ready: ``update`` in place, ``read``, ``write`` or ``copy``."""
        if self._buffer.nbytes != size:
            self._buffer = np.empty(size // 4, dtype=np.float32)
            self._buffer.fill(1.0)
        buffer, half = self._buffer, self._buffer.size // 2
        calls: dict[str, Call] = {
            "update": partial(np.negative, buffer, out=buffer),
            "read": partial(np.dot, buffer, buffer),
            "write": partial(buffer.fill, 1.0),
            "copy": partial(np.copyto, buffer[:half], buffer[half : 2 * half]),
        }
        return Prepared((calls[operation],))

    def barrier(self) -> None:
        """Do not wait: the driver starts all at once, and they run for far longer than it takes."""

    def close(self) -> None:
        """Do nothing: there is nothing to leave."""
