"""Blocks of memory that torch's allocator gives out: taken by any thread, without the interpreter's lock.

A table of this process has an entry for each block. A block's STATE goes from FREE to TAKEN by the exchange
of the thread that gets it, and back by a store of the thread in which the last tensor on it dies. Python
fills entries, and retires a free block as any thread takes one, by the exchange of FREE for RETIRED; so
nobody has a block whose memory Python then gives up. A retired entry may be filled for another block: that
is why who has taken one looks at its length and pool once more, which do not change while it is TAKEN.

The exchange is sequentially consistent and the store a release: what was written to a block by its last user
happens before its next one gets it, and what Python writes into an entry before any thread takes it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine.native.atomics import (
    compare_exchange,
    load_acquire,
    short_kernel,
    store_release,
)

# The allocator's words, as byte offsets: first what C++ reads of the object, then ours.
VTABLE = 0
DEFAULT = 8  # the allocator that serves all else,
ALLOCATE = 16  # and its function
SERVED = 24  # the pool whose blocks are given out now; 0: none
SMALLEST = 32  # the length of the shortest block: of shorter requests nothing is looked up
NUMBER = 40  # of entries
MISSED = 48  # 1 when all blocks of some request's length were taken; of which, entries tell
DELETER = 56  # the function that frees what the default allocator has given
ENTRIES = 64

# An entry's words.
LENGTH = 0
ADDRESS = 8
POOL = 16
STATE = 24
WANTED = 32  # 1 when another of this length was asked for while all were taken
ENTRY_BYTES = 40

FREE, TAKEN, RETIRED = range(3)

ALLOCATE_SYMBOL, FREE_SYMBOL, DELETER_SYMBOL = "torch.allocate", "torch.free", "torch.raw_deleter"
"""The functions that C++ calls (allocator_code.py)."""
TABLE_SYMBOL = "torch.blocks"
"""A word with the address of the allocator's words: who frees memory is told the memory's address only."""
CPU_DEVICE = 0xFF00
"""c10::Device as a 16-bit word: type 0, index -1."""


@short_kernel
def take_block(allocator, length):
    """Take a free block of just this length from the pool that is served; return its entry, or 0.

    Notes in WANTED of one, and in MISSED, that there are such blocks and none is free.
    """
    pool = load_acquire(allocator + SERVED)
    if pool == 0 or length < load_acquire(allocator + SMALLEST):
        return 0
    missed = 0
    for index in range(load_acquire(allocator + NUMBER)):
        entry = allocator + ENTRIES + index * ENTRY_BYTES
        if _is_of(entry, length, pool):
            missed = entry
            if compare_exchange(entry + STATE, FREE, TAKEN) == FREE:
                if _is_of(entry, length, pool):
                    return entry
                store_release(entry + STATE, FREE)
    if missed != 0:
        store_release(missed + WANTED, 1)
        store_release(allocator + MISSED, 1)
    return 0


@short_kernel
def _is_of(entry, length, pool):
    return load_acquire(entry + LENGTH) == length and load_acquire(entry + POOL) == pool


@short_kernel
def give_block(entry):
    """Give back a block that was taken, whose memory nobody uses any more."""
    store_release(entry + STATE, FREE)
    return 0


@short_kernel
def free_block(allocator, address):
    """Give back the block at an address; return whether there is one, and it is taken.

    STATE is looked at first: an entry that had the address before its block was given up is RETIRED, or has
    another address when it is TAKEN again.
    """
    for index in range(load_acquire(allocator + NUMBER)):
        entry = allocator + ENTRIES + index * ENTRY_BYTES
        if load_acquire(entry + STATE) == TAKEN and load_acquire(entry + ADDRESS) == address:
            give_block(entry)
            return 1
    return 0


@short_kernel
def retire_block(entry):
    """Return whether the block was free, and is not given out any more."""
    return compare_exchange(entry + STATE, FREE, RETIRED) == FREE
