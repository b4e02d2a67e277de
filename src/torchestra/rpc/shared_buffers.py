"""Large memory for other workers: copied once, into the sender's heap in the arena, and used where it lies.

A *loan* is a block of the lender's heap. The lender copies memory in and tells the borrower where it is; the
borrower's storage lies in the block itself. The first word of the block is the lender's own again when the
borrower has written 1 into it, which it does when that storage dies. The lender looks when it needs a block,
and keeps some for the next time: memory that has been used before is much faster.

What a worker has borrowed when it dies is never given back, and lost until the lender shuts down. What is
with others when the lender shuts down is left alone: it lasts until nobody has the memory file mapped.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref

import torch

from torchestra.engine.kernels import shared_words
from torchestra.engine.membership.rank_context import RankContext
from torchestra.engine.memory.heap import Heap

LEND_FROM = 1 << 15  # bytes; smaller memory goes through the channel
_HEAD_BYTES = 128
_KEPT_BYTES = 1 << 29
_SMALLEST = 1 << 18


class Lender:
    """Lends blocks of one worker's heap, and borrows those of others."""

    def __init__(self, member: RankContext) -> None:
        self._arena = member.arena
        self._heap: Heap = member.heap
        self._lock = threading.Lock()
        self._lent: dict[int, int] = {}  # bytes, by the place in the heap
        self._kept: dict[int, list[int]] = {}  # places, by bytes
        self._kept_bytes = 0
        weakref.finalize(self, _drop, self._heap, self._kept).atexit = False

    @property
    def lent(self) -> int:
        """How many blocks are with others."""
        with self._lock:
            self._collect()
            return len(self._lent)

    def lend(self, address: int, length: int) -> int:
        """Copy memory into a block; where in this rank's heap that is."""
        offset = self._block(length)
        ctypes.memmove(self._heap.first_address + offset + _HEAD_BYTES, address, length)
        return offset

    def take_back(self, offset: int) -> None:
        """What was lent will not be sent."""
        shared_words.store_ordered(self._heap.first_address + offset, 1)

    def borrow(self, rank: int, offset: int, length: int) -> torch.UntypedStorage:
        """The storage of a loan by a rank; the loan ends with it."""
        heaps = self._arena.heaps
        start = rank * self._arena.layout.heap_bytes + offset
        memory = heaps[start + _HEAD_BYTES : start + _HEAD_BYTES + length]
        weakref.finalize(memory, _give_back, heaps.ctypes.data + start, os.getpid()).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()

    def _block(self, length: int) -> int:
        size = max(_SMALLEST, 1 << (length + _HEAD_BYTES - 1).bit_length())
        with self._lock:
            self._collect()
            kept = self._kept.get(size)
            if kept:
                self._kept_bytes -= size
                offset = kept.pop()
            else:
                offset = self._heap.take(size)
            shared_words.store_ordered(self._heap.first_address + offset, 0)
            self._lent[offset] = size
        return offset

    def _collect(self) -> None:
        """Take back what has been given back."""
        for offset, size in tuple(self._lent.items()):
            if shared_words.load_acquire(self._heap.first_address + offset) == 1:
                del self._lent[offset]
                if self._kept_bytes + size <= _KEPT_BYTES:
                    self._kept_bytes += size
                    self._kept.setdefault(size, []).append(offset)
                else:
                    self._heap.give(offset, size)


def _drop(heap: Heap, kept: dict[int, list[int]]) -> None:
    """A lender is gone, with what nobody has borrowed; what is lent stays as it is."""
    for size, places in kept.items():
        for offset in places:
            heap.give(offset, size)


def _give_back(address: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked child only drops its copy of the storage
        shared_words.store_ordered(address, 1)
