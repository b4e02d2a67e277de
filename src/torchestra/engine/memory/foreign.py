"""An arena seen from outside of its group: mapped read-only, and checked before use.

Any process that may read another's /proc may do this: those of the same user.
"""

from __future__ import annotations

import fcntl
import os
import stat
import weakref

import numpy as np

from torchestra.engine import layout as at
from torchestra.engine.memory.mapping import close, duplicate, holder, map_to_read
from torchestra.engine.p2p.layout import channel_area_bytes
from torchestra.errors import DistBackendError
from torchestra.system.memory_files import is_sealed

_MAX_RANKS = 1 << 14
_MAX_BYTES = 1 << 50


class ForeignArena:
    """The header, the control blocks and the records of an arena; the rest is not mapped.

    Args:
        descriptor: of the memory file, open for reading. It is not needed any more afterwards.

    Raises:
        DistBackendError: it is not an arena, or one of another version of torchestra.
    """

    def __init__(self, descriptor: int) -> None:
        self.layout = _layout(descriptor)
        self._bytes = map_to_read(descriptor, self.layout.slots)
        self._descriptor = duplicate(descriptor)
        weakref.finalize(self, close, self._descriptor).atexit = False
        self._words = self._bytes.view(np.int64)
        self.address: int = self._bytes.ctypes.data

    def open_to_write(self) -> int:
        """Return a new descriptor of the file, with which it can be written; the caller closes it.

        Raises:
            OSError: this process may not write it.
        """
        return os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDWR | os.O_CLOEXEC)

    def is_held(self, rank: int) -> bool:
        """Return whether another process that is this rank lives (arena.py)."""
        return holder(self._descriptor, self.layout.control + rank * at.CONTROL_BYTES) is not None

    def load_word(self, offset: int) -> int:
        """Return the word at a byte offset."""
        return int(self._words[offset // 8])

    def text(self, offset: int, length: int) -> str:
        """Return ``length`` bytes as text."""
        return bytes(self._bytes[offset : offset + length]).decode(errors="replace")

    @property
    def made(self) -> int:
        """Return when the arena was made, in nanoseconds of CLOCK_MONOTONIC."""
        return self.load_word(at.HEADER_NANOSECONDS)

    def process(self, rank: int) -> tuple[int, int]:
        """Return the process id of a rank, and when that process started (liveness.py)."""
        block = self.layout.control + rank * at.CONTROL_BYTES
        return self.load_word(block + at.PROCESS), self.load_word(block + at.STARTED)


def _layout(descriptor: int) -> at.Layout:
    """Return the layout in an arena's header, if it is one.

    A file without the seal against shrinking is refused: reading a mapping of it could end this process.
    """
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or not is_sealed(descriptor, fcntl.F_SEAL_SHRINK):
        raise DistBackendError("this is not an arena of torchestra: it is not a sealed memory file")
    header = np.frombuffer(os.pread(descriptor, at.HEADER_TICKS, 0), dtype=np.uint8)
    if len(header) < at.HEADER_TICKS:
        raise DistBackendError(f"this is not an arena of torchestra: it has {status.st_size} bytes")
    words = header.view(np.int64)
    magic, version, size = (int(words[offset // 8]) for offset in (0, at.HEADER_VERSION, at.HEADER_SIZE))
    if magic != at.MAGIC:
        raise DistBackendError(f"this is not an arena of torchestra: it begins with {magic:#x}")
    if version != at.VERSION:
        raise DistBackendError(
            f"this arena has the layout of version {version}, and this torchestra reads version {at.VERSION}:"
            " look at the job with the version of torchestra that runs it"
        )
    slot, chunk_buffer, heap = (
        int(words[offset // 8])
        for offset in (at.HEADER_SLOT_BYTES, at.HEADER_CHUNK_BUFFER_BYTES, at.HEADER_HEAP_BYTES)
    )
    if 0 < size <= _MAX_RANKS and all(0 <= part <= _MAX_BYTES for part in (slot, chunk_buffer, heap)):
        layout = at.Layout(size, slot, chunk_buffer, channel_area_bytes(size), heap)
        if layout.total == status.st_size:
            return layout
    raise DistBackendError(
        f"this arena's header is damaged: {size} ranks with buffers of {slot} and {chunk_buffer} and heaps of"
        f" {heap} bytes do not make up its {status.st_size} bytes"
    )
