"""The memory that the ranks of a group share: one anonymous memory file, mapped by each of them.

A memory file (``memfd_create``) is nowhere in the file system, so it leaves nothing there whichever process
is killed, and it is not bounded by the size of ``/dev/shm``. It is sparse: the channels and heaps of an arena
are far larger than what is ever touched. It cannot shrink (a seal), so that no process that has it mapped can
be made to fault. Where there is no ``memfd_create`` it is a file in ``/dev/shm`` instead (memory_files.py);
the arena reserves memory in that before using it, because writing where the file system has no room ends the
process.

The heaps are by far the largest part, and the only one whose size matters to the address space, of which
a process has 128 TiB. So a rank maps them when it first needs them, and most groups never do. Those of one
group are at most a part of what is left, so that there is always some for the next: the hundredth group of 8
ranks, on a machine with 2 TiB, can still have 20 GiB a rank. Rank 0 decides how large they are: ranks may see
different amounts of memory, or be under different limits.

Core dumps leave out everything after the records. A dump reads every page of a mapping, and reading a page of
a sparse file that was never touched takes memory for it.

Each rank keeps its descriptor open, by which ``torchestra top`` finds it, and a process holds a lock on the
first byte of the control block of the rank that it is, by which the others see that it lives (liveness.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import struct
import threading
from collections.abc import Sequence
from dataclasses import astuple, fields, replace

import numpy as np
import numpy.typing as npt

from torchestra.engine import layout as at
from torchestra.engine.kernels import shared_words
from torchestra.engine.kernels.selection import Choices
from torchestra.engine.memory.mapping import MemoryFile, leave_out_of_core_dumps
from torchestra.engine.p2p.layout import channel_area_bytes
from torchestra.engine.recorder.clock import Moment, best_clock
from torchestra.engine.tuned_thresholds import choices_for_group
from torchestra.errors import DistBackendError
from torchestra.system.limits import no_descriptors
from torchestra.system.memory_files import SHARED_MEMORY, make_memory_file, no_room

_MEBIBYTE = 1 << 20
_GIBIBYTE = 1 << 30
_AT_ONCE = 16 << 20  # bytes
_ADDRESS_SPACE = 128 << 40  # of a process
_NAME_BYTES = 200  # the system allows 249
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def layout_for(size: int) -> at.Layout:
    """Return the arena of a group of ``size`` ranks on one host.

    Buffers shrink with the number of ranks, so that those of all ranks together stay in a last-level
    cache of the usual size; a heap can hold all the memory that the machine has, unless all heaps together
    would then take too much of the address space, or more than this process is allowed.
    """
    buffer = max(
        128 << 10, min(_MEBIBYTE, at.align(8 * _MEBIBYTE // size, at.PAGE)), at.align(64 * size, at.PAGE)
    )
    without = at.Layout(
        size=size,
        slot_bytes=buffer,
        chunk_buffer_bytes=buffer,
        channel_bytes=channel_area_bytes(size),
        heap_bytes=0,
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    bounds = [(_ADDRESS_SPACE - mapped) // 32]
    if (address_space := _limit(resource.RLIMIT_AS)) is not None:
        bounds.append((address_space - mapped) // 4)
    if (largest_file := _limit(resource.RLIMIT_FSIZE)) is not None:
        bounds.append(largest_file - without.total)
    share = max(0, min(bounds)) // size // at.LARGEST_PAGE * at.LARGEST_PAGE
    return replace(without, heap_bytes=min(at.align(memory, _GIBIBYTE), share))


def _limit(which: int) -> int | None:
    """Return a limit of this process, or None where it has none."""
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


class Arena:
    """A mapped arena. A mapping lives as long as any object that points into it.

    Attributes:
        bytes: all but the heaps.
        address: of that.
    """

    def __init__(self, descriptor: int, layout: at.Layout) -> None:
        self.layout = layout
        self._file = MemoryFile(descriptor)
        self.bytes = self._file.map(0, layout.heaps)
        self.address: int = self.bytes.ctypes.data
        behind_records = at.align(layout.slots, at.LARGEST_PAGE)
        leave_out_of_core_dumps(self.address + behind_records, layout.heaps - behind_records)
        self._words = (ctypes.c_int64 * (layout.slots // 8)).from_address(self.address)
        self._heaps: npt.NDArray[np.uint8] | None = None
        self._mapping = threading.Lock()

    @property
    def buffer_bytes(self) -> int:
        """Return how much fits into each of the buffers of a rank."""
        return min(self.layout.slot_bytes, self.layout.chunk_buffer_bytes)

    @property
    def choices(self) -> Choices:
        """Return the thresholds of the group, set by the rank that made the arena."""
        return Choices(*(self.load_word(at.HEADER_CHOICES + 8 * n) for n in range(len(fields(Choices)))))

    @property
    def heaps(self) -> npt.NDArray[np.uint8]:
        """Return the heaps of all ranks, mapped at the first call.

        Raises:
            DistBackendError: this process has no address space left for them.
        """
        if self._heaps is None:
            with self._mapping:
                if self._heaps is None:
                    self._heaps = self._map_heaps()
        return self._heaps

    def _map_heaps(self) -> npt.NDArray[np.uint8]:
        layout = self.layout
        length = layout.total - layout.heaps
        try:
            heaps = self._file.map(layout.heaps, length)
            leave_out_of_core_dumps(heaps.ctypes.data, length)
        except OSError as error:
            raise DistBackendError(
                f"cannot map the memory that the {layout.size} ranks of a group share tensors in"
                f" ({length / _GIBIBYTE:.1f} GiB of address space: {error}); is the address space limited"
                " (ulimit -v), or do too many groups use dist.empty()?"
            ) from error
        return heaps

    def make_heap_private(self, start: int, length: int, *, keep: bool) -> None:
        """Replace the pages of a range of the heaps by copies that only this process sees.

        Concurrent writes by other threads of this process are not lost.

        Args:
            keep: leave the memory that the copies are made of to the other ranks. Otherwise that of whole
                pages goes back to the system, and reads as zeros there.

        Raises:
            OSError: there is no memory for copies; nothing has changed.
        """
        page = os.sysconf("SC_PAGE_SIZE")
        first, last = start // page * page, at.align(start + length, page)
        begin = int(self.heaps.ctypes.data)
        self._file.make_private(begin + first, self.layout.heaps + first, last - first)
        for offset in range(first, last, _AT_ONCE):
            end = min(offset + _AT_ONCE, last)
            shared_words.write_to_pages(begin + offset, (end - offset) // page, page)
            inner, outer = max(offset, at.align(start, page)), min(end, (start + length) // page * page)
            if inner < outer and not keep:
                self.release_heap(inner, outer - inner)

    @property
    def descriptor(self) -> int:
        """The descriptor of the arena's file; the arena owns it, so callers must not close it."""
        return self._file.descriptor

    def hold(self, rank: int) -> None:
        """Show the others, from now on and for as long as this process lives, that it is this rank.

        Raises:
            DistBackendError: another process is.
        """
        try:
            self._file.hold(self.control(rank))
        except OSError as error:
            raise DistBackendError(
                f"rank {rank} cannot lock its place in the group's memory ({error}): do two processes claim"
                " the same rank?"
            ) from error

    def is_held(self, rank: int) -> bool:
        """Return whether another process that is this rank lives (False if this process is)."""
        return self._file.is_held(self.control(rank))

    def reserve_heap(self, start: int, length: int) -> None:
        """Reserve memory for a range of the heaps, where the system may run out of it.

        Raises:
            DistBackendError: there is none left.
        """
        try:
            self._file.reserve(self.layout.heaps + start, length)
        except OSError as error:
            raise DistBackendError(
                f"no {length} bytes are left for a tensor in {SHARED_MEMORY} ({error}), which is used because"
                " this system has no memfd_create; make it larger (docker run --shm-size)"
            ) from error

    def release_heap(self, start: int, length: int) -> None:
        """Give the memory of a range of the heaps, in whole pages, back to the system."""
        with contextlib.suppress(OSError):  # then it stays with the arena, and is used again
            self._file.release(self.layout.heaps + start, length)

    @classmethod
    def create(cls, layout: at.Layout, name: str) -> tuple[Arena, int]:
        """Return a new arena for the group ``name``, and its file's descriptor, which the caller closes."""
        descriptor = make_memory_file(f"{at.MEMORY_FILE}:{ascii(name)[1:-1][:_NAME_BYTES]}")
        try:
            os.ftruncate(descriptor, layout.total)
            with contextlib.suppress(PermissionError):  # a file of /dev/shm, which has no seals
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            arena = cls(descriptor, layout)
            arena._file.reserve(0, layout.heaps)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise no_descriptors(f"cannot make the memory of a group of {layout.size} ranks") from error
            if error.errno == errno.ENOSPC:
                what = f"the {layout.heaps / _MEBIBYTE:.0f} MiB of a group of {layout.size} ranks"
                raise no_room(what) from error
            raise DistBackendError(
                f"cannot make {layout.total / _GIBIBYTE:.1f} GiB of sparse shared memory, and map"
                f" {layout.heaps / _GIBIBYTE:.1f} GiB of it, for a group of {layout.size} ranks ({error}):"
                " is the address space (ulimit -v) or the size of files (ulimit -f) limited?"
            ) from error
        for offset, value in cls._header(layout):
            arena.store_word(offset, value)
        for number, value in enumerate(astuple(choices_for_group(layout.size, arena.buffer_bytes))):
            arena.store_word(at.HEADER_CHOICES + 8 * number, value)
        clock = best_clock()
        moment = Moment.now(clock)
        arena.store_word(at.HEADER_CLOCK, clock)
        arena.store_word(at.HEADER_TICKS, moment.ticks)
        arena.store_word(at.HEADER_NANOSECONDS, moment.nanoseconds)
        length = arena.set_text(at.HEADER_NAME, at.HEADER_NAME_BYTES, name)
        arena.store_word(at.HEADER_NAME_LENGTH, length)
        return arena, descriptor

    @classmethod
    def attach(cls, descriptor: int, layout: at.Layout) -> Arena:
        """Map an arena that another rank made, and check that its layout is the expected one.

        Args:
            layout: the one expected, but for the size of the heaps, which the rank that made the arena
                decides.
        """
        nbytes = os.fstat(descriptor).st_size
        (heap_bytes,) = struct.unpack("=q", os.pread(descriptor, 8, at.HEADER_HEAP_BYTES).ljust(8, b"\0"))
        if heap_bytes >= 0:
            layout = replace(layout, heap_bytes=heap_bytes)
        if nbytes != layout.total:
            raise DistBackendError(
                f"the group's arena has {nbytes} bytes, expected {layout.total}: do all ranks run the same"
                " version of torchestra?"
            )
        arena = cls(descriptor, layout)
        for offset, value in cls._header(layout):
            if arena.load_word(offset) != value:
                raise DistBackendError(
                    f"the group's arena has {arena.load_word(offset)} in word {offset} of its header,"
                    f" expected {value}: do all ranks run the same version of torchestra?"
                )
        return arena

    @staticmethod
    def _header(layout: at.Layout) -> list[tuple[int, int]]:
        return [
            (at.HEADER_MAGIC, at.MAGIC),
            (at.HEADER_VERSION, at.VERSION),
            (at.HEADER_SIZE, layout.size),
            (at.HEADER_SLOT_BYTES, layout.slot_bytes),
            (at.HEADER_CHUNK_BUFFER_BYTES, layout.chunk_buffer_bytes),
            (at.HEADER_HEAP_BYTES, layout.heap_bytes),
        ]

    def load_word(self, offset: int) -> int:
        """Return the word at a byte offset in the header or a control block (not ordered with others)."""
        return int(self._words[offset // 8])

    def states(self) -> list[int]:
        """Return the states of all ranks (not ordered with others)."""
        first = (self.control(0) + at.STATE) // 8
        stride = at.CONTROL_BYTES // 8
        return self._words[first : first + stride * self.layout.size : stride]

    def store_word(self, offset: int, value: int) -> None:
        self._words[offset // 8] = value

    def store_word_of_each(self, offset: int, values: Sequence[int]) -> None:
        """Write a word into every rank's control block, at a byte offset within it."""
        start, strides = self.control(0) + offset, (at.CONTROL_BYTES,)
        np.ndarray((self.layout.size,), np.int64, self.bytes, start, strides)[:] = values

    def words(self, offset: int, count: int) -> npt.NDArray[np.int64]:
        """Return words, to be written; the mapping stays as long as the array does."""
        return self.bytes[offset : offset + 8 * count].view(np.int64)

    def text(self, offset: int, length: int) -> str:
        return bytes(self.bytes[offset : offset + length]).decode(errors="replace")

    def set_text(self, offset: int, most: int, text: str) -> int:
        """Write as much of the text as fits; return the number of bytes written."""
        raw = text.encode(errors="replace")[:most]
        self.bytes[offset : offset + len(raw)] = np.frombuffer(raw, dtype=np.uint8)
        return len(raw)

    def flag_line(self, rank: int, sequence: int) -> int:
        """Return the byte offset of a rank's flag line of an operation."""
        return self.control(rank) + at.FLAG_LINES + sequence % at.FLAGS * at.LINE

    def progress(self, rank: int) -> int:
        """Return the last step that a rank has finished, and of which operation, as in a flag."""
        first, stride = (self.flag_line(rank, 0) + at.FLAG) // 8, at.LINE // 8
        return max(self._words[first : first + stride * at.FLAGS : stride])

    def control(self, rank: int) -> int:
        """Return the byte offset of a rank's control block."""
        return self.layout.control + rank * at.CONTROL_BYTES

    def record(self, rank: int) -> int:
        """Return the byte offset of a rank's record."""
        return self.layout.records + rank * self.layout.record_bytes
