"""Gives torch memory for new tensors from blocks in a rank's heap, in place of the C library's.

What torch's operations return lies in memory that torch's allocator gives; nothing in Python chooses it. The
allocator is an object of C++ that can be replaced (``c10::SetCPUAllocator``). Ours is a table of words and
some machine code (kernels/blocks.py, kernels/allocator_code.py), with the virtual functions of torch's own
for all but ``allocate`` and ``raw_deleter``. It gives out blocks that were added for just the length asked
for, while their pool is served, and calls torch's for everything else. A tensor on a block is as any other;
when the last one dies, the block is free again.

Which words such an object has is told in torch's headers (c10/core/Allocator.h). Before it is replaced the
object found is compared with what is expected: torch's version, its class, where its functions lie, and what
an allocation returns. If anything is different, or the program has replaced the allocator itself, or the
environment has ``TORCHESTRA_ALLOCATOR=torch``, torch's stays in place, and :func:`why_not` says why.

Torch keeps pointers to the object in every tensor, so it is never freed. The memory of a block is freed when
it is out of use after its pool was closed: at once, or when the next pool is made, served or closed.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from torchestra.engine.kernels import blocks, shared_words
from torchestra.engine.native.kernel import address_in_object, entry_point
from torchestra.system.forking import forget_in_children

__all__ = ["BlockPool", "why_not"]

_VARIABLE = "TORCHESTRA_ALLOCATOR"
if os.environ.get(_VARIABLE, "") not in ("", "torch", "torchestra"):
    raise ValueError(f"{_VARIABLE} must be 'torch' or 'torchestra', got {os.environ[_VARIABLE]!r}")
_MOST_BLOCKS = 1024
_KNOWN = (2, 10), (2, 15)
_VIRTUAL_FUNCTIONS = 6  # two destructors, allocate, is_simple_data_ptr, raw_deleter, copy_data
_ALLOCATE_AT, _DELETER_AT = 2, 4
_GET, _GET_DEFAULT = "_ZN3c1015GetCPUAllocatorEv", "_ZN3c1022GetDefaultCPUAllocatorEv"
_SET, _CLASS = "_ZN3c1015SetCPUAllocatorEPNS_9AllocatorEh", "_ZTVN3c1019DefaultCPUAllocatorE"
_PROBE_BYTES = 1000


class _UnknownError(Exception):
    """Torch's allocator is not as it is known to be."""


class _DataPtr(ctypes.Structure):
    """What ``allocate`` returns: c10::DataPtr."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("free", ctypes.c_void_p),
        ("argument", ctypes.c_void_p),
        ("device", ctypes.c_uint16),
    )


class _Allocator:
    """The object in torch's place, of which a process has one."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libc10.so")
        default, deleter = _checked(library)
        length = blocks.ENTRIES + _MOST_BLOCKS * blocks.ENTRY_BYTES
        # Torch may use them when Python's objects are gone.
        self._words = _kept((ctypes.c_int64 * (length // 8))())
        functions = _kept((ctypes.c_void_p * _VIRTUAL_FUNCTIONS)())
        virtual = ctypes.c_void_p.from_address(default).value or 0
        functions[:] = list((ctypes.c_void_p * _VIRTUAL_FUNCTIONS).from_address(virtual))
        self.address = ctypes.addressof(self._words)
        self._store(blocks.VTABLE, ctypes.addressof(functions))
        self._store(blocks.DEFAULT, default)
        self._store(blocks.ALLOCATE, functions[_ALLOCATE_AT] or 0)
        self._store(blocks.DELETER, deleter)
        ctypes.c_int64.from_address(address_in_object(blocks.TABLE_SYMBOL)).value = self.address
        functions[_ALLOCATE_AT] = address_in_object(blocks.ALLOCATE_SYMBOL)
        functions[_DELETER_AT] = address_in_object(blocks.DELETER_SYMBOL)
        replace = library[_SET]
        replace.restype, replace.argtypes = None, [ctypes.c_void_p, ctypes.c_uint8]
        replace(self.address, 0)
        self._lock = threading.Lock()
        self._unused: collections.deque[int] = collections.deque()
        # By entry, what keeps the memory of a block; and which of them are of pools that were closed.
        self._memory: dict[int, torch.Tensor] = {}
        self._left: collections.deque[int] = collections.deque()
        self._numbers = itertools.count(1)
        forget_in_children(self)

    def _store(self, offset: int, value: int) -> None:
        shared_words.store_ordered(self.address + offset, value)

    def forget(self) -> None:
        """In a forked child, give out none of the parent's blocks, whichever pool is served there.

        The table is the child's own, but the blocks are memory that the parent uses.
        """
        self._words[blocks.SERVED // 8] = 0
        for number in range(self._words[blocks.NUMBER // 8]):
            self._words[(blocks.ENTRIES + number * blocks.ENTRY_BYTES + blocks.POOL) // 8] = 0
        self._lock = threading.Lock()

    def new_pool(self) -> int:
        """Return the number of a pool without blocks."""
        return next(self._numbers)

    def add(self, pool: int, lengths: Sequence[int], make: Callable[[int], torch.Tensor | None]) -> list[int]:
        """Add blocks to a pool, up to the first without memory; return their entries."""
        self.free_left()
        entries = []
        with self._lock:
            for length in lengths:
                number = self._words[blocks.NUMBER // 8]
                if not self._unused and number == _MOST_BLOCKS:
                    break
                if (memory := make(length)) is None:
                    break
                if self._unused:
                    entry = self._unused.popleft()
                else:
                    entry = self.address + blocks.ENTRIES + number * blocks.ENTRY_BYTES
                    shared_words.store_ordered(entry + blocks.STATE, blocks.RETIRED)
                    self._store(blocks.NUMBER, number + 1)
                self._memory[entry] = memory
                for offset, value in (
                    (blocks.LENGTH, length),
                    (blocks.ADDRESS, memory.data_ptr()),
                    (blocks.POOL, pool),
                    (blocks.WANTED, 0),
                    (blocks.STATE, blocks.FREE),
                ):
                    shared_words.store_ordered(entry + offset, value)
                entries.append(entry)
            known = self._memory.values()
            self._store(blocks.SMALLEST, min((each.nbytes for each in known), default=1 << 62))
        return entries

    def serve(self, pool: int) -> None:
        """Give out a pool's blocks from now on, and no others; 0: none."""
        if self._left:
            self.free_left()
        self._store(blocks.SERVED, pool)

    def missed(self, entries: Iterable[int]) -> set[int]:
        """Return the lengths of blocks of which there were too few, and forget it."""
        if not self._words[blocks.MISSED // 8]:
            return set()
        self._store(blocks.MISSED, 0)
        wanted = [entry for entry in entries if shared_words.load_acquire(entry + blocks.WANTED)]
        for entry in wanted:
            shared_words.store_ordered(entry + blocks.WANTED, 0)
        return {shared_words.load_acquire(entry + blocks.LENGTH) for entry in wanted}

    def close(self, pool: int, entries: Iterable[int]) -> None:
        """Give out a pool's blocks no more, and free them when they are out of use, as a finaliser."""
        if self._words[blocks.SERVED // 8] == pool:
            self._store(blocks.SERVED, 0)
        self._left.extend(entries)
        self.free_left()

    def free_left(self) -> None:
        """Free the blocks of closed pools that are out of use. Takes no lock, as a finaliser may call it."""
        for _ in range(len(self._left)):
            try:
                entry = self._left.popleft()
            except IndexError:  # a finaliser does the same
                return
            if _retire(entry):
                self._memory.pop(entry, None)
                self._unused.append(entry)
            else:
                self._left.append(entry)


def _retire(entry: int) -> bool:
    return bool(entry_point(blocks.retire_block)(entry))


_alive: list[Any] = []
_installing = threading.Lock()


def _kept(array: Any) -> Any:
    _alive.append(array)
    return array


def _checked(library: ctypes.CDLL) -> tuple[int, int]:
    """Return the addresses of torch's allocator, which is as expected, and in use, and of its deleter."""
    version = torch.__version__
    if os.environ.get(_VARIABLE) == "torch":
        raise _UnknownError(f"{_VARIABLE} is torch")
    if not _KNOWN[0] <= _version(version) <= _KNOWN[1]:
        raise _UnknownError(f"the allocator of torch {version} has not been tried")
    missing = [name for name in (_GET, _GET_DEFAULT, _SET, _CLASS) if not hasattr(library, name)]
    if missing:
        raise _UnknownError(f"torch {version} has no {missing[0]}")
    in_use, default = (_call(library, name) for name in (_GET, _GET_DEFAULT))
    if in_use != default or not default:
        raise _UnknownError("the program has replaced torch's allocator by another")
    virtual = ctypes.c_void_p.from_address(default).value
    expected = ctypes.addressof(ctypes.c_char.in_dll(library, _CLASS)) + 16  # behind what describes the class
    if virtual != expected:
        raise _UnknownError(f"torch {version} has an allocator of another class")
    functions = list((ctypes.c_void_p * _VIRTUAL_FUNCTIONS).from_address(virtual))
    code = _code_of(library)
    if not all(function is not None and function in code for function in functions):
        raise _UnknownError(f"the allocator of torch {version} has other virtual functions")
    allocate = ctypes.CFUNCTYPE(_DataPtr, ctypes.c_void_p, ctypes.c_size_t)(functions[_ALLOCATE_AT] or 0)
    deleter = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(functions[_DELETER_AT] or 0)(default)
    made = allocate(default, _PROBE_BYTES)
    if (
        made.data != made.argument
        or not made.data
        or made.free != deleter
        or made.device != blocks.CPU_DEVICE
    ):
        raise _UnknownError(f"the allocator of torch {version} returns something unknown")
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(made.free)(made.argument)
    return default, made.free


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def _call(library: ctypes.CDLL, name: str) -> int:
    function = library[name]
    function.restype = ctypes.c_void_p
    return function() or 0


def _code_of(library: ctypes.CDLL) -> range:
    """Return the addresses of the library's machine code."""
    address = ctypes.cast(library[_SET], ctypes.c_void_p).value or 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(each, 16) for each in line.split()[0].split("-"))
        if first <= address < last:
            return range(first, last)
    return range(0)


@functools.cache
def _outcome() -> tuple[_Allocator | None, str]:
    try:
        return _Allocator(), ""
    except (_UnknownError, OSError, KeyError, ValueError) as error:
        return None, str(error)


def _installed() -> tuple[_Allocator | None, str]:
    with _installing:  # of two threads the second would find the first one's allocator in place of torch's
        return _outcome()


def why_not() -> str:
    """Return why torch's allocator is not replaced, for people; "" if it is."""
    return _installed()[1]


class BlockPool:
    """Blocks that torch takes for tensors of just their lengths, while the pool is served.

    Where torch's allocator cannot be replaced the pool is empty.

    Args:
        lengths: the bytes of each block.
        make: returns memory of a length in bytes, or None; then the pool has the blocks before this one.

    Attributes:
        nbytes: of all blocks.
    """

    def __init__(self, lengths: Sequence[int], make: Callable[[int], torch.Tensor | None]) -> None:
        self._allocator, _ = _installed()
        self._number = 0
        self._make = make
        self._entries: list[int] = []
        self.nbytes = 0
        if self._allocator is not None:
            self._number = self._allocator.new_pool()
            weakref.finalize(self, self._allocator.close, self._number, self._entries).atexit = False
        self.add(lengths)

    def add(self, lengths: Sequence[int]) -> None:
        """Add blocks of these lengths; where there is no memory for one, that and the others are left out."""
        if self._allocator is not None:
            added = self._allocator.add(self._number, lengths, self._make)
            self._entries += added
            self.nbytes += sum(lengths[: len(added)])

    def missed(self) -> set[int]:
        """Return the lengths that torch has asked for, since the last time, while all such blocks were taken.

        To be called when the pool was served: another pool's question may forget it.
        """
        return self._allocator.missed(self._entries) if self._allocator is not None else set()

    def serve(self) -> None:
        """Let torch take blocks from this pool, and from no other."""
        if self._entries and self._allocator is not None:
            self._allocator.serve(self._number)

    def stop(self) -> None:
        """Let torch take blocks from no pool."""
        if self._entries and self._allocator is not None:
            self._allocator.serve(0)
