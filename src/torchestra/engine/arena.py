"""The memory that the ranks of a group share: one anonymous memory file, mapped by each of them.

A memory file (``memfd_create``) is nowhere in the file system, so nothing is left there whatever is killed,
and it is not bounded by the size of ``/dev/shm``. It is sparse: the channels and heaps of an arena are far
larger than what is ever touched. It cannot shrink (a seal), so that nobody who has it mapped can be made to
fault.

Each rank keeps its descriptor open (the mapping has one), for ``torchestra top`` to find it by.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

import numpy as np

from torchestra.engine import layout as at
from torchestra.engine.channels import channel_area_bytes
from torchestra.engine.clock import Moment, best_clock
from torchestra.errors import DistBackendError

_MEBIBYTE = 1 << 20
_NAME_BYTES = 200  # the system allows 249
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def layout_for(size: int) -> at.Layout:
    """The arena of a group of ``size`` ranks on one host.

    Buffers shrink with the number of ranks, so that those of all ranks together stay in a last-level
    cache of the usual size; a heap can hold all the memory that the machine has.
    """
    buffer = max(128 << 10, min(_MEBIBYTE, at.align(8 * _MEBIBYTE // size, at.PAGE)))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return at.Layout(
        size=size,
        slot_bytes=buffer,
        pipe_bytes=buffer,
        channel_bytes=channel_area_bytes(size),
        heap_bytes=at.align(memory, 1 << 30),
    )


class Arena:
    """A mapped arena. The mapping lives as long as anything that points into it."""

    def __init__(self, descriptor: int, layout: at.Layout) -> None:
        self.layout = layout
        self.memory = mmap.mmap(descriptor, layout.total)
        self.bytes = np.frombuffer(self.memory, dtype=np.uint8)
        self.address: int = self.bytes.ctypes.data
        self._words = (ctypes.c_int64 * (layout.slots // 8)).from_buffer(self.memory)

    @classmethod
    def create(cls, layout: at.Layout, name: str) -> tuple[Arena, int]:
        """A new arena for the group ``name`` and the descriptor of its file, which the caller closes."""
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        descriptor = os.memfd_create(f"{at.MEMORY_FILE}:{ascii(name)[1:-1][:_NAME_BYTES]}", flags)
        try:
            os.ftruncate(descriptor, layout.total)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            arena = cls(descriptor, layout)
        except OSError as error:
            os.close(descriptor)
            raise DistBackendError(
                f"cannot map {layout.total >> 30} GiB of sparse shared memory for a group of {layout.size}"
                f" ranks"
                f" ({error}); is the address space limited (ulimit -v)?"
            ) from error
        for offset, value in cls._header(layout):
            arena.set_word(offset, value)
        clock = best_clock()
        moment = Moment.now(clock)
        arena.set_word(at.HEADER_CLOCK, clock)
        arena.set_word(at.HEADER_TICKS, moment.ticks)
        arena.set_word(at.HEADER_NANOSECONDS, moment.nanoseconds)
        length = arena.set_text(at.HEADER_NAME, at.HEADER_NAME_BYTES, name)
        arena.set_word(at.HEADER_NAME_LENGTH, length)
        return arena, descriptor

    @classmethod
    def attach(cls, descriptor: int, layout: at.Layout) -> Arena:
        """Map an arena that another rank made, and check that both mean the same by it."""
        found = os.fstat(descriptor).st_size
        if found != layout.total:
            raise DistBackendError(
                f"the group's arena has {found} bytes, expected {layout.total}: do all ranks run the same"
                " version of torchestra?"
            )
        arena = cls(descriptor, layout)
        for offset, value in cls._header(layout):
            if arena.word(offset) != value:
                raise DistBackendError(
                    f"the group's arena has {arena.word(offset)} in word {offset} of its header, expected"
                    f" {value}:"
                    " do all ranks run the same version of torchestra?"
                )
        return arena

    @staticmethod
    def _header(layout: at.Layout) -> list[tuple[int, int]]:
        return [
            (at.HEADER_MAGIC, at.MAGIC),
            (at.HEADER_VERSION, at.VERSION),
            (at.HEADER_SIZE, layout.size),
            (at.HEADER_SLOT_BYTES, layout.slot_bytes),
            (at.HEADER_PIPE_BYTES, layout.pipe_bytes),
            (at.HEADER_HEAP_BYTES, layout.heap_bytes),
        ]

    def word(self, offset: int) -> int:
        """The word at a byte offset in the header or a control block (not ordered with others)."""
        return int(self._words[offset // 8])

    def set_word(self, offset: int, value: int) -> None:
        self._words[offset // 8] = value

    def text(self, offset: int, length: int) -> str:
        return bytes(self.bytes[offset : offset + length]).decode(errors="replace")

    def set_text(self, offset: int, limit: int, text: str) -> int:
        """Write as much of the text as fits; the number of bytes written."""
        raw = text.encode(errors="replace")[:limit]
        self.bytes[offset : offset + len(raw)] = np.frombuffer(raw, dtype=np.uint8)
        return len(raw)

    def control(self, rank: int) -> int:
        """The byte offset of a rank's control block."""
        return self.layout.control + rank * at.CONTROL_BYTES

    def record(self, rank: int) -> int:
        """The byte offset of a rank's record."""
        return self.layout.records + rank * self.layout.record_bytes
