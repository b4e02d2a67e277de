"""Memory files, and ranges of them in this process's address space.

Not Python's ``mmap``: every object of that keeps a descriptor of its own, where one a group is enough,
and none can replace some pages of a mapping.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["MemoryFile"]

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_DONTDUMP = 16
_FALLOC_KEEP_SIZE = 1
_FALLOC_PUNCH_HOLE = 2

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
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self._descriptor).atexit = False

    def map(self, offset: int, length: int) -> npt.NDArray[np.uint8]:
        """Map a range that begins at a page, for as long as anything points into the array.

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

    def release(self, offset: int, length: int) -> None:
        """Give the memory of a range back to the system, in whole pages; it reads as zeros afterwards.

        Raises:
            OSError: the system cannot do that.
        """
        _check(_libc.fallocate(self._descriptor, _FALLOC_PUNCH_HOLE | _FALLOC_KEEP_SIZE, offset, length))

    def _map(self, address: int | None, length: int, flags: int, offset: int) -> int:
        flags |= _MAP_NORESERVE
        found: int = _libc.mmap(address, length, _READ_WRITE, flags, self._descriptor, offset)
        _check(-1 if found == _FAILED else 0)
        return found


def leave_out_of_core_dumps(address: int, length: int) -> None:
    """Keep a range, in whole pages, out of core dumps."""
    _check(_libc.madvise(address, length, _MADV_DONTDUMP))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
