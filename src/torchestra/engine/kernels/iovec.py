"""Several tensors of a rank, taken as one: its elements are theirs, one tensor after the other.

A table of ``number`` parts says where they are: first, for each part and for the end, the index of its first
element in the whole; then, for each part, its address. So a kernel can reduce them where they are, and
nobody has to lay them side by side first. All functions take a range of the whole: the index of its first
element, and how many there are.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine import layout as at
from torchestra.engine.kernels.buffers import put, settle
from torchestra.engine.native.atomics import call_reduction, kernel, load, memcpy, store

POINTERS, RANK, SIZE = at.POINTERS, at.RANK, at.SIZE

_CACHED_BYTES = 1 << 14


@kernel
def _part_at(parts, number, index):
    """Return the part that has the element at an index: the last that begins there or before."""
    low = 0
    high = number
    while high - low > 1:
        middle = (low + high) >> 1
        if load(parts + 8 * middle) <= index:
            low = middle
        else:
            high = middle
    return low


@kernel
def _address_of(parts, number, part, index, unit):
    """Return the address of an element that is in this part."""
    return load(parts + 8 * (number + 1 + part)) + (index - load(parts + 8 * part)) * unit


@kernel
def copy_in(context, parts, number, index, length, unit, target):
    """Copy a range into a buffer; peers see it if they see what is published later."""
    part = _part_at(parts, number, index)
    while length > 0:
        step = min(length, load(parts + 8 * (part + 1)) - index)
        put(context, target, _address_of(parts, number, part, index, unit), step * unit)
        target += step * unit
        index += step
        length -= step
        part += 1
    settle(context)


@kernel
def copy_out(parts, number, index, length, unit, source):
    """Copy a buffer into a range."""
    part = _part_at(parts, number, index)
    while length > 0:
        step = min(length, load(parts + 8 * (part + 1)) - index)
        memcpy(_address_of(parts, number, part, index, unit), source, step * unit)
        source += step * unit
        index += step
        length -= step
        part += 1


@kernel
def reduce_in(context, parts, number, index, length, unit, function, wanted, copy):
    """Reduce a range of all ranks' tensors. POINTERS has where the peers have it.

    The results go into the tensors if ``wanted``, and to the address ``copy`` if it is not 0: block by block,
    while a block is in the first-level cache.
    """
    rank = load(context + RANK)
    size = load(context + SIZE)
    pointers = load(context + POINTERS)
    part = _part_at(parts, number, index)
    while length > 0:
        step = min(length, load(parts + 8 * (part + 1)) - index)
        if copy != 0:
            step = min(step, _CACHED_BYTES // unit)
        own = _address_of(parts, number, part, index, unit)
        store(pointers + rank * 8, own)
        call_reduction(function, own if wanted else copy, pointers, size, step)
        if copy != 0:
            if wanted:
                put(context, copy, own, step * unit)
            copy += step * unit
        for peer in range(size):
            store(pointers + peer * 8, load(pointers + peer * 8) + step * unit)
        index += step
        length -= step
        if index == load(parts + 8 * (part + 1)):
            part += 1
    settle(context)
