"""Tensors that lie in the arena: an allocator over the part of it that belongs to this rank.

First fit over a list of free ranges, neighbours merged. A tensor's range comes back when its storage dies. No
other rank allocates here, so this takes no communication.

Pages of large ranges are handed back to the system, but not at once: getting new ones takes many times as
long as using them (16 MiB: 100 ms instead of 8), and a program that makes a tensor in every step of a loop
wants one of the same length again. So the last few of a moderate length are kept as they are, as malloc does.
"""

from __future__ import annotations

import bisect
import collections
import mmap
import threading
import weakref
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from torchestra.engine import layout as at
from torchestra.engine.kernels import shared_words
from torchestra.engine.memory.arena import Arena
from torchestra.errors import DistBackendError, InvalidArgumentError
from torchestra.system.forking import forget_in_children, refusal

_UNIT = 128
_RETURN_ABOVE = 1 << 20
_KEEP_UP_TO = 32 << 20
_KEPT_RANGES = 8


class Heap:
    """The heap of one rank in an arena.

    Args:
        when_mapped: called before the first tensor is made, when the heaps of all ranks are mapped here.
    """

    def __init__(self, arena: Arena, rank: int, when_mapped: Callable[[], None] | None = None) -> None:
        self._arena = arena
        self._start = rank * arena.layout.heap_bytes
        self._when_mapped = when_mapped
        self._free: list[tuple[int, int]] = [(0, arena.layout.heap_bytes)]
        # A finaliser may run at any moment, also in the middle of an allocation and on the same thread: it
        # only notes the range here, and the next allocation does the rest.
        self._freed: collections.deque[tuple[int, int]] = collections.deque()
        # Free ranges that still have their pages, the oldest first. The thread that pops one owns it.
        self._kept: collections.deque[tuple[int, int]] = collections.deque()
        self._lock = threading.Lock()
        self._inherited = False
        forget_in_children(self)

    def forget(self) -> None:
        """In a forked child, leave the memory to the parent, which allocates and frees it."""
        self._inherited = True

    @property
    def first_address(self) -> int:
        """Return where this heap begins."""
        return int(self._arena.heaps.ctypes.data) + self._start

    @property
    def last_address(self) -> int:
        """Return where it ends."""
        return self.first_address + self._arena.layout.heap_bytes

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor in this heap."""
        elements = 1
        for length in shape:
            elements *= length
        needed = at.align(max(1, elements * dtype.itemsize), _UNIT)
        offset = self.take(needed)
        start = self._start + offset
        block = self._arena.heaps[start : start + needed]
        weakref.finalize(block, self.give, offset, needed).atexit = False
        if elements == 0:
            return torch.frombuffer(block, dtype=dtype, count=1)[:0].view(shape)
        return torch.frombuffer(block, dtype=dtype, count=elements).view(shape)

    def offset_of(self, address: int) -> int:
        """Return where an address lies in this heap, or NOT_SHARED."""
        offset = address - self.first_address
        return offset if 0 <= offset < self._arena.layout.heap_bytes else at.NOT_SHARED

    def take(self, length: int) -> int:
        """Take a range of this heap exclusively, until it is given back; return where it begins.

        Raises:
            InvalidArgumentError: no range of the length is left.
            ForkedProcessError: this process was forked from the rank.
            DistBackendError: the system has no memory for it (memory_files.py).
        """
        if self._inherited:
            raise refusal("no tensor can be made in the memory that the group shares")
        _ = self._arena.heaps  # mapped from now on
        if (when_mapped := self._when_mapped) is not None:
            when_mapped()
            self._when_mapped = None
        length = at.align(length, _UNIT)
        offset = self._find(length)
        try:
            self._arena.reserve_heap(self._start + offset, length)
        except DistBackendError:
            self._freed.append((offset, length))
            raise
        return offset

    def _find(self, length: int) -> int:
        with self._lock:
            found = self._kept_range(length)
            if found is None:
                found = self._first_fit(length)
            if found is None:
                while self._kept:
                    self._return_oldest()
                found = self._first_fit(length)
        if found is None:
            raise InvalidArgumentError(
                f"no {length} bytes are left in this rank's heap of {self._arena.layout.heap_bytes} bytes"
            )
        return found

    def _kept_range(self, length: int) -> int | None:
        """Take a range that has its pages, if there is one that is not much too long; give the rest back."""
        for _ in range(len(self._kept)):
            try:
                offset, kept = self._kept.popleft()
            except IndexError:  # a finaliser has just returned it
                return None
            if length <= kept <= length + length // 8:
                if kept > length:
                    self.give(offset + length, kept - length)
                return offset
            self._kept.append((offset, kept))
        return None

    def _first_fit(self, length: int) -> int | None:
        while self._freed:
            self._insert(*self._freed.popleft())
        for index, (offset, free) in enumerate(self._free):
            if free >= length:
                if free == length:
                    del self._free[index]
                else:
                    self._free[index] = (offset + length, free - length)
                return offset
        return None

    def give(self, offset: int, length: int) -> None:
        """Give back a range from :meth:`take`; may be called anywhere, by finalisers too."""
        length = at.align(length, _UNIT)
        if self._inherited:
            return  # only the child's view of the tensor is gone
        if length < _RETURN_ABOVE:
            self._freed.append((offset, length))
        elif length <= _KEEP_UP_TO:
            self._kept.append((offset, length))
            if len(self._kept) > _KEPT_RANGES:
                self._return_oldest()
        else:
            self._return(offset, length)

    def _return_oldest(self) -> None:
        try:
            offset, length = self._kept.popleft()
        except IndexError:  # a finaliser has just done so
            return
        self._return(offset, length)

    def _return(self, offset: int, length: int) -> None:
        """Hand the pages of a range back to the system."""
        first = at.align(self._start + offset, mmap.PAGESIZE)
        last = (self._start + offset + length) // mmap.PAGESIZE * mmap.PAGESIZE
        self._arena.release_heap(first, last - first)
        self._freed.append((offset, length))

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


def find_heaps(arena: Arena, context: npt.NDArray[np.int64]) -> None:
    """Tell the kernels, one of which may be running, where the heaps are, and then how long."""
    shared_words.store_ordered(context.ctypes.data + at.HEAPS, arena.heaps.ctypes.data)
    shared_words.store_ordered(context.ctypes.data + at.HEAP_BYTES, arena.layout.heap_bytes)


def bytes_of_heap(arena: Arena, rank: int, offset: int, length: int) -> torch.Tensor:
    """Return bytes of a rank's heap, whoever has allocated them.

    Raises:
        InvalidArgumentError: they do not lie in it.
    """
    if not 0 <= offset <= offset + length <= arena.layout.heap_bytes:
        raise InvalidArgumentError(f"the memory is not what rank {rank} shares with the group")
    start = rank * arena.layout.heap_bytes + offset
    return torch.frombuffer(arena.heaps[start : start + max(1, length)], dtype=torch.uint8)[:length]
