"""Programs of threads that take and give back blocks of memory, and of Python, which fills the table."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine import layout as at
from torchestra.engine.kernels import blocks
from torchestra.engine.native.atomics import load, load_acquire, store, store_ordered
from verification.drivers import driver, expect

DONE = at.DONE
NUMBER, SMALLEST, SERVED, ENTRIES = blocks.NUMBER, blocks.SMALLEST, blocks.SERVED, blocks.ENTRIES
LENGTH, ADDRESS, POOL, STATE, FREE = blocks.LENGTH, blocks.ADDRESS, blocks.POOL, blocks.STATE, blocks.FREE
take_block, free_block, retire_block = blocks.take_block, blocks.free_block, blocks.retire_block

SHORT, LONG = 64, 128
"""The lengths of the blocks before and after."""


@driver
def use_blocks(allocator, length, thread, times):
    """Take a block, use its memory, and give it back, some times; there may be none."""
    for _ in range(times):
        entry = take_block(allocator, length)
        if entry != 0:
            memory = load_acquire(entry + ADDRESS)
            expect(load(memory + 8), length)
            store(memory, thread)
            expect(load(memory), thread)
            expect(free_block(allocator, memory), 1)
    return DONE


@driver
def fill_entry(entry, length, memory, pool):
    """Fill an entry that no thread has for a block, as _Allocator.add."""
    store(memory + 8, length)
    store_ordered(entry + LENGTH, length)
    store_ordered(entry + ADDRESS, memory)
    store_ordered(entry + POOL, pool)
    store_ordered(entry + STATE, FREE)


@driver
def change_blocks(allocator, old, new):
    """Serve a pool of one short block; then retire it, give its memory up, and serve one of a long block."""
    entry = allocator + ENTRIES
    store_ordered(entry + STATE, blocks.RETIRED)
    store_ordered(allocator + NUMBER, 1)
    fill_entry(entry, SHORT, old, 1)
    store_ordered(allocator + SMALLEST, SHORT)
    store_ordered(allocator + SERVED, 1)
    store_ordered(allocator + SERVED, 0)
    if retire_block(entry):
        store(old, -1)  # somebody else's from now on
        fill_entry(entry, LONG, new, 2)
        store_ordered(allocator + SERVED, 2)
    return DONE


@driver
def blocks_of_a_process(allocator, old, new, thread, length):
    """Be the thread that fills the table (0), or one that uses blocks of a length."""
    if thread == 0:
        return change_blocks(allocator, old, new)
    return use_blocks(allocator, length, thread, 2)
