"""Tensors that lie in the arena: an allocator over the part of it that belongs to this rank.

First fit over a list of free ranges, neighbours merged. A tensor's range comes back when its storage dies,
and pages of large ranges are handed back to the system. Nobody else allocates here, so no peer has to be
asked.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import mmap
import os
import threading
import weakref

import torch

from torchestra.engine import layout as at
from torchestra.engine.arena import Arena
from torchestra.errors import InvalidArgumentError

_UNIT = 128
_RETURN_ABOVE = 1 << 20


class Heap:
    """The heap of one rank in an arena."""

    def __init__(self, arena: Arena, rank: int) -> None:
        self._arena = arena
        self._start = arena.layout.heaps + rank * arena.layout.heap_bytes
        self._free: list[tuple[int, int]] = [(0, arena.layout.heap_bytes)]
        # A finaliser may run at any moment, also in the middle of an allocation and on the same thread: it
        # only leaves a note here, and the next allocation does the rest.
        self._given: collections.deque[tuple[int, int]] = collections.deque()
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self.first_address = arena.address + self._start
        self.last_address = self.first_address + arena.layout.heap_bytes

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor in this heap."""
        elements = 1
        for length in shape:
            elements *= length
        needed = at.align(max(1, elements * dtype.itemsize), _UNIT)
        offset = self._take(needed)
        start = self._start + offset
        block = self._arena.bytes[start : start + needed]
        weakref.finalize(block, self._give, offset, needed).atexit = False
        if elements == 0:
            return torch.frombuffer(block, dtype=dtype, count=1)[:0].view(shape)
        return torch.frombuffer(block, dtype=dtype, count=elements).view(shape)

    def offset_of(self, address: int) -> int:
        """Where an address lies in this heap, or NOT_SHARED."""
        if self.first_address <= address < self.last_address:
            return address - self.first_address
        return at.NOT_SHARED

    def _take(self, length: int) -> int:
        with self._lock:
            while self._given:
                self._insert(*self._given.popleft())
            for index, (offset, free) in enumerate(self._free):
                if free >= length:
                    if free == length:
                        del self._free[index]
                    else:
                        self._free[index] = (offset + length, free - length)
                    return offset
        raise InvalidArgumentError(
            f"no {length} bytes are left in this rank's heap of {self._arena.layout.heap_bytes} bytes"
        )

    def _give(self, offset: int, length: int) -> None:
        if os.getpid() != self._owner:
            return  # a forked child drops its copy of the tensor; the memory is still its parent's
        if length >= _RETURN_ABOVE:
            first = at.align(self._start + offset, mmap.PAGESIZE)
            last = (self._start + offset + length) // mmap.PAGESIZE * mmap.PAGESIZE
            with contextlib.suppress(OSError):
                self._arena.memory.madvise(mmap.MADV_REMOVE, first, last - first)
        self._given.append((offset, length))

    def _insert(self, offset: int, length: int) -> None:
        """Put a range back into the list of free ones."""
        index = bisect.bisect(self._free, (offset, 0))
        if index < len(self._free) and offset + length == self._free[index][0]:
            length += self._free.pop(index)[1]
        if index > 0 and sum(self._free[index - 1]) == offset:
            offset, before = self._free.pop(index - 1)
            length += before
            index -= 1
        self._free.insert(index, (offset, length))
