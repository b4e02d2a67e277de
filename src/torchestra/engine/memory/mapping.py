"""Memory files, and ranges of them in this process's address space.

Not Python's ``mmap``: each of its objects keeps a descriptor of its own, where one per group is enough, and
none can replace some pages of a mapping.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import threading
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from torchestra.system.memory_files import is_sealed

_FLOCK = struct.Struct("@hhqqi4x")  # struct flock, where off_t has 64 bits
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_DONTDUMP = 16
_FALLOC_KEEP_SIZE = 1
_FALLOC_PUNCH_HOLE = 2

# The files of which this process holds a byte, and the descriptors of each that wait until it may close them.
# Each descriptor has one owner, who opened it, until close(); then it is closed, or waits here for another
# owner. A finaliser may close one while this thread has the lock, so the same thread may take it again.
_held: set[tuple[int, int]] = set()
_unused: dict[tuple[int, int], list[int]] = {}
_lock = threading.RLock()

_libc = ctypes.CDLL(None, use_errno=True)
_ADDRESS, _SIZE, _INT, _OFFSET = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
_libc.mmap.argtypes = (_ADDRESS, _SIZE, _INT, _INT, _INT, _OFFSET)
_libc.mmap.restype = _ADDRESS
_libc.munmap.argtypes = (_ADDRESS, _SIZE)
_libc.madvise.argtypes = (_ADDRESS, _SIZE, _INT)
_libc.fallocate.argtypes = (_INT, _INT, _OFFSET, _OFFSET)
_FAILED = ctypes.c_void_p(-1).value
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


class MemoryFile:
    """A memory file that is open in this process for as long as this object lives.

    Args:
        descriptor: of the file. The caller may close it: the object has a copy.

    Attributes:
        descriptor: the object's own.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = os.dup(descriptor)
        weakref.finalize(self, _close_own, self.descriptor).atexit = False
        self._bounded = not is_sealed(descriptor, fcntl.F_SEAL_SHRINK)

    def hold(self, offset: int) -> None:
        """Lock the byte at ``offset`` for this process, until it ends or closes the file.

        The system takes the closing of *any* descriptor of the file in this process for that, so nothing else
        here may open it and close it again, but by :func:`close`. Forked children do not have the lock.

        Raises:
            OSError: another process holds it.
        """
        with _lock:
            _held.add(_identity(self.descriptor))  # first: a finaliser may close another at any moment
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)

    def is_held(self, offset: int) -> bool:
        """Return whether another process holds the byte at ``offset``."""
        return holder(self.descriptor, offset) is not None

    def map(self, offset: int, length: int) -> npt.NDArray[np.uint8]:
        """Map a range that begins at a page, for as long as any object points into the array.

        Raises:
            OSError: there is no address space for it.
        """
        address = self._map(None, length, mmap.MAP_SHARED, offset)
        buffer: Any = (ctypes.c_uint8 * length).from_address(address)
        weakref.finalize(buffer, _libc.munmap, address, length).atexit = False
        return np.frombuffer(buffer, dtype=np.uint8)

    def make_private(self, address: int, offset: int, length: int) -> None:
        """Put a private copy of a range, in whole pages, in place of a mapping of it.

        Nothing is lost that other threads of this process write meanwhile. A page is still the file's until
        something has been written to it, which the caller has to do.

        Raises:
            OSError: there is no memory for a copy; nothing has changed.
        """
        self._map(address, length, mmap.MAP_PRIVATE | _MAP_FIXED, offset)

    def reserve(self, offset: int, length: int) -> None:
        """Have memory for a range now, if the file is of a file system that may have none left later.

        Raises:
            OSError: ENOSPC, where it has none left.
        """
        if self._bounded and length > 0:
            os.posix_fallocate(self.descriptor, offset, length)

    def release(self, offset: int, length: int) -> None:
        """Give the memory of a range back to the system, in whole pages; it reads as zeros afterwards.

        Raises:
            OSError: the system cannot do that.
        """
        _check(_libc.fallocate(self.descriptor, _FALLOC_PUNCH_HOLE | _FALLOC_KEEP_SIZE, offset, length))

    def _map(self, address: int | None, length: int, flags: int, offset: int) -> int:
        flags |= _MAP_NORESERVE
        mapped: int = _libc.mmap(address, length, _READ_WRITE, flags, self.descriptor, offset)
        _check(-1 if mapped == _FAILED else 0)
        return mapped


def map_to_read(descriptor: int, length: int) -> npt.NDArray[np.uint8]:
    """Map the beginning of a file, only to be read, for as long as any object points into the array.

    Raises:
        OSError: it cannot be mapped.
    """
    address = _libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    _check(-1 if address == _FAILED else 0)
    buffer: Any = (ctypes.c_uint8 * length).from_address(address)
    weakref.finalize(buffer, _libc.munmap, address, length).atexit = False
    array: npt.NDArray[np.uint8] = np.frombuffer(buffer, dtype=np.uint8)
    array.flags.writeable = False
    return array


def open_to_read(path: str | os.PathLike[str]) -> int:
    """Open a memory file to read it; return a descriptor that is the caller's until :func:`close`."""
    unused = _take_unused(_identity(path))
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC) if unused is None else unused


def duplicate(descriptor: int) -> int:
    """Return another descriptor of a memory file, which is the caller's until :func:`close`."""
    unused = _take_unused(_identity(descriptor))
    return os.dup(descriptor) if unused is None else unused


def close(descriptor: int) -> None:
    """Close a descriptor of a memory file, later if this process would lose its lock by that.

    It is the caller's no more: it may be given to whoever opens the file next.
    """
    with _lock:
        identity = _identity(descriptor)
        if identity in _held:
            _unused.setdefault(identity, []).append(descriptor)
        else:
            os.close(descriptor)


def _take_unused(identity: tuple[int, int]) -> int | None:
    with _lock:
        unused = _unused.get(identity)
        return unused.pop() if unused else None


def _close_own(descriptor: int) -> None:
    with _lock:
        identity = _identity(descriptor)
        _held.discard(identity)
        os.close(descriptor)
        for unused in _unused.pop(identity, ()):
            os.close(unused)


def _renew_lock() -> None:
    """Replace the lock in a forked child, where a thread that does not exist may have it."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def _identity(file: int | str | os.PathLike[str]) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_dev, status.st_ino


def holder(descriptor: int, offset: int) -> int | None:
    """Return which other process holds a byte of a file (:meth:`MemoryFile.hold`), by its number; None if
    none does.

    0 for a process that has no number in the caller's PID namespace.
    """
    query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0)
    lock_type, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, query))
    return None if lock_type == fcntl.F_UNLCK else max(0, pid)


def leave_out_of_core_dumps(address: int, length: int) -> None:
    """Keep a range, in whole pages, out of core dumps."""
    _check(_libc.madvise(address, length, _MADV_DONTDUMP))


def prefer_huge_pages(address: int, length: int) -> None:
    """Ask for huge pages in a range that is not used yet; a system without any goes on without.

    New memory costs a page fault for each page, and one of 4 KiB takes longer than the copy of as much.
    """
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (address + length) // mmap.PAGESIZE * mmap.PAGESIZE
    if start < stop:
        _libc.madvise(start, stop - start, mmap.MADV_HUGEPAGE)


def _check(result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
