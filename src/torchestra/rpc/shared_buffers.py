"""Shared buffers: large memory for workers on the same host, copied once and used where it lies.

A *buffer* is a block of the sender's heap in the arena. The sender copies memory in and tells the receiver
where it is; the receiver's storage lies in the block itself. When that storage dies, the receiver writes 1
into the first word of the block, which is the sender's own again then. The sender looks for such blocks when
it needs one, and keeps some for the next time: memory that has been used before is much faster.

The buffers that a worker holds when it dies are never released, and lost until the sender shuts down. Those
that others hold when the sender shuts down are left alone: they last until nobody has the memory file
mapped.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch

from torchestra.engine.kernels import shared_words
from torchestra.engine.kernels.copies import copy_past_caches
from torchestra.engine.membership.rank_context import RankContext
from torchestra.engine.memory.heap import Heap
from torchestra.tensors.serialization import OUT_OF_BAND

OpenedBuffers: TypeAlias = dict[int, torch.UntypedStorage]
"""The buffers that a message lies in, by their offsets in the heap of the worker that sent it."""

SHARE_FROM = 1 << 15  # bytes; smaller memory is a part of the message
_HEAD_BYTES = 128
_KEPT_BYTES = 1 << 29
_SMALLEST = 1 << 18
_PAST_CACHES_FROM = 16 << 20  # what is smaller, the receiver reads faster if it is still in a cache


class SharedBufferPool:
    """Shares buffers of one worker's heap, and opens those of others.

    Attributes:
        shared_bytes: how much it has copied into buffers.
    """

    def __init__(self, context: RankContext) -> None:
        self.rank = context.rank
        self.shared_bytes = 0
        self._arena = context.arena
        self._heap: Heap = context.heap
        self._opened: dict[int, _OpenBuffer] = {}  # by the address of their memory
        self._lock = threading.Lock()
        self._shared: dict[int, int] = {}  # bytes, by offset in the heap
        self._kept: dict[int, list[int]] = {}  # offsets, by bytes
        self._kept_bytes = 0
        weakref.finalize(self, _free_kept, self._heap, self._kept).atexit = False

    @property
    def in_use(self) -> int:
        """Return how many buffers other workers hold."""
        with self._lock:
            self._collect()
            return len(self._shared)

    def share(self, address: int, length: int, taken: dict[int, None]) -> int:
        """Copy large memory into a buffer; return where in this rank's heap it is, or -1 for small memory.

        Args:
            taken: where the buffer is noted, for :meth:`withdraw` if an interrupt comes.
        """
        if length < SHARE_FROM:
            return OUT_OF_BAND
        offset = self._buffer(length, taken)
        target = self._heap.first_address + offset + _HEAD_BYTES
        if length < _PAST_CACHES_FROM:
            ctypes.memmove(target, address, length)
        else:
            copy_past_caches(target, address, length)
        self.shared_bytes += length
        return offset

    def sharer(self, taken: dict[int, None]) -> Callable[[int, int], int]:
        """Return :meth:`share` with ``taken``."""
        return lambda address, length: self.share(address, length, taken)

    def withdraw(self, taken: Iterable[int]) -> None:
        """Release buffers of a message that is not sent."""
        for offset in taken:
            shared_words.store_ordered(self._heap.first_address + offset, 1)

    def open(self, rank: int, offset: int, length: int, opened: OpenedBuffers) -> torch.UntypedStorage:
        """Return a storage that lies in a buffer of a rank; when it dies, the buffer is released.

        Args:
            opened: the buffers of the message that this call, or one before it that an interrupt has stopped,
                has opened. If a message is read again, none of them may be released in between.
        """
        if offset in opened:
            return opened[offset]
        heaps = self._arena.heaps
        start = rank * self._arena.layout.heap_bytes + offset
        memory = heaps[start + _HEAD_BYTES : start + _HEAD_BYTES + length]
        storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        buffer = _OpenBuffer(rank, offset, storage.data_ptr(), os.getpid())
        weakref.finalize(memory, _release, buffer, self._opened).atexit = False
        self._opened[buffer.address] = buffer
        buffer.is_open = True  # nothing is called between this and the next line, so no interrupt comes
        opened[offset] = storage
        return storage

    def is_from(self, rank: int, address: int) -> bool:
        """Return whether memory here is that of an open buffer of a rank."""
        buffer = self._opened.get(address)
        return buffer is not None and buffer.rank == rank

    def return_buffer(self, storage: torch.UntypedStorage) -> int:
        """Have the buffer that a storage lies in belong to its owner as it is; return its offset there.

        The storage must be the last one that lies there, must be used no more, and is not released.
        """
        buffer = self._opened[storage.data_ptr()]
        buffer.is_open = False
        return buffer.offset

    def _buffer(self, length: int, taken: dict[int, None]) -> int:
        size = max(_SMALLEST, 1 << (length + _HEAD_BYTES - 1).bit_length())
        with self._lock:
            self._collect()
            kept = self._kept.get(size)
            offset = kept[-1] if kept else self._heap.take(size)
            shared_words.store_ordered(self._heap.first_address + offset, 0)
            if kept:  # from here on nothing is called, so no interrupt comes
                self._kept_bytes -= size
                del kept[-1]
            self._shared[offset] = size
            taken[offset] = None
        return offset

    def _collect(self) -> None:
        """Take back the buffers that have been released."""
        for offset, size in tuple(self._shared.items()):
            if shared_words.load_acquire(self._heap.first_address + offset) == 1:
                kept = self._kept.setdefault(size, [])
                del self._shared[offset]
                if self._kept_bytes + size <= _KEPT_BYTES:
                    self._kept_bytes += size
                    kept += (offset,)
                else:
                    self._heap.give(offset, size)


def _free_kept(heap: Heap, kept: dict[int, list[int]]) -> None:
    """Free what a pool that is gone had kept; the buffers that others hold stay as they are."""
    for size, offsets in kept.items():
        for offset in offsets:
            heap.give(offset, size)


class _OpenBuffer:
    """A buffer of another worker, or of this one, in which a storage lies here.

    Attributes:
        rank, offset: whose buffer it is, and where.
        address: of its memory.
        owner: the process that has opened it.
        is_open: whether to release it with the storage.
    """

    __slots__ = ("address", "is_open", "offset", "owner", "rank")

    def __init__(self, rank: int, offset: int, address: int, owner: int) -> None:
        self.rank = rank
        self.offset = offset
        self.address = address
        self.owner = owner
        self.is_open = False


def _release(buffer: _OpenBuffer, opened: dict[int, _OpenBuffer]) -> None:
    if os.getpid() == buffer.owner:  # a forked child only drops its copy of the storage
        if opened.get(buffer.address) is buffer:
            del opened[buffer.address]
        if buffer.is_open:
            shared_words.store_ordered(buffer.address - _HEAD_BYTES, 1)
