"""all_reduce over the ranks' own tensors, where these lie in the ranks' heaps: nothing is copied first.

Every rank reduces its piece out of all tensors and writes it into all of them (or the root's). No other rank
reads or writes that piece, so ranks wait for each other at the start and at the end only.

With step 1 a rank tells where its tensors lie: SHARED is the offset of one tensor, or LISTED for several.
Then the rank's eager slot of the operation has a table: how many they are; for each the index of its first
element in the whole; for each its offset in the heap, or NOT_SHARED. What is not in the heap is to be little
(biases, say); it lies in the rank's slot, one tensor after the other, and everybody reduces all of it. Both
stay as they are until all ranks have finished the operation, as waiting.enter is asked for ranks 1 apart.

Whether it is done so is decided after the ranks have met, by what all of them have told; so all come to the
same. A rank that told so has left no chunk of its tensor for the others. If others cannot, it does that then,
and everybody waits for one step more (:func:`is_late`).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine import layout as at
from torchestra.engine.kernels.buffers import SHARED_PATH, buffer_of, eager_slot
from torchestra.engine.kernels.iovec import copy_in, reduce_in
from torchestra.engine.kernels.waiting import (
    current_line,
    end,
    everyone_shares,
    final_barrier,
    offset_in_heap,
    publish,
    shared_tensor,
)
from torchestra.engine.native.atomics import call_reduction, kernel, load, memcpy, store

RANK, SIZE, RESUME, POINTERS = at.RANK, at.SIZE, at.RESUME, at.POINTERS
HEAPS, HEAP_BYTES, SHARED = at.HEAPS, at.HEAP_BYTES, at.SHARED
NOT_SHARED, LISTED = at.NOT_SHARED, at.LISTED
EAGER_SLOT_BYTES, SLOT_BYTES = at.EAGER_SLOT_BYTES, at.SLOT_BYTES
DONE = at.DONE

_CACHED_BLOCK = 1 << 16
_MOST_OUTSIDE = 1 << 17  # bytes of a list that do not lie in the heap, of which everybody reduces all


@kernel
def piece(peer, size, length):
    """Return where the piece of ``peer`` begins in ``length`` elements, in steps of 64 elements."""
    return min(length, (length + size * 64 - 1) // (size * 64) * 64 * peer)


@kernel
def tell(context, parts, number, unit):
    """Return what SHARED is to be for these tensors (iovec.py), having written what it refers to.

    To be called between waiting.enter, of ranks 1 apart, and waiting.arrive.
    """
    if number == 1:
        return offset_in_heap(context, load(parts + 16))
    if 8 + 16 * number > EAGER_SLOT_BYTES:
        return NOT_SHARED
    table = eager_slot(context, load(context + RANK))
    store(table, number)
    outside = 0
    for part in range(number):
        start = load(parts + 8 * part)
        offset = offset_in_heap(context, load(parts + 8 * (number + 1 + part)))
        store(table + 8 * (1 + part), start)
        store(table + 8 * (1 + number + part), offset)
        if offset == NOT_SHARED:
            outside += (load(parts + 8 * (part + 1)) - start) * unit
    if outside > min(_MOST_OUTSIDE, load(context + SLOT_BYTES)) or outside == load(parts + 8 * number) * unit:
        return NOT_SHARED
    target = buffer_of(context, load(context + RANK), 0)
    for part in range(number):
        if load(table + 8 * (1 + number + part)) == NOT_SHARED:
            start = load(parts + 8 * part)
            length = load(parts + 8 * (part + 1)) - start
            copy_in(context, parts, number, start, length, unit, target)
            target += length * unit
    return LISTED


@kernel
def everyone_lists(context):
    """Return whether all ranks list the same tensors, each in all heaps or in none, after they have met."""
    own = eager_slot(context, load(context + RANK))
    for rank in range(load(context + SIZE)):
        if load(current_line(context, rank) + SHARED) != LISTED:
            return False
        other = eager_slot(context, rank)
        number = load(own)
        if load(other) != number:
            return False
        for word in range(1, 1 + number):
            if load(other + 8 * word) != load(own + 8 * word):
                return False
        for word in range(1 + number, 1 + 2 * number):
            if (load(other + 8 * word) == NOT_SHARED) != (load(own + 8 * word) == NOT_SHARED):
                return False
    return True


@kernel
def is_late(context):
    """Return whether some ranks have left no chunk before they arrived, where not all can go on in place."""
    for rank in range(load(context + SIZE)):
        line = current_line(context, rank)
        if load(line + SHARED) != NOT_SHARED:
            return True
    return False


@kernel
def reduce_in_place(context, count, parts, number, unit, function, root):
    """Reduce as all have told; return DONE, or PENDING, then :func:`end_in_place` is to be called.

    Returns NOT_SHARED if not all have told the same: nothing has been done then.
    """
    if everyone_shares(context):
        _reduce_piece(context, 0, 0, count, count, unit, function, root)
    elif number > 1 and everyone_lists(context):
        _reduce_list(context, parts, number, unit, function)
    else:
        return NOT_SHARED
    publish(context, 2)
    store(context + RESUME, SHARED_PATH)
    return end_in_place(context)


@kernel
def end_in_place(context):
    """Wait until all have written."""
    code = final_barrier(context)
    if code == DONE:
        end(context)
    return code


@kernel
def _in_heap(context, rank, word):
    """Return the address of a rank's tensor whose offset its table has at ``word``; 0: of the only one."""
    if word == 0:
        return shared_tensor(context, rank)
    return load(context + HEAPS) + rank * load(context + HEAP_BYTES) + load(eager_slot(context, rank) + word)


@kernel
def _reduce_piece(context, word, before, length, count, unit, function, root):
    """Reduce this rank's share of a tensor of ``length`` elements, which ``count`` has from ``before`` on."""
    rank = load(context + RANK)
    size = load(context + SIZE)
    pointers = load(context + POINTERS)
    first = max(piece(rank, size, count) - before, 0)
    last = min(piece(rank + 1, size, count) - before, length)
    while first < last:
        step = min(_CACHED_BLOCK // unit, last - first)
        for peer in range(size):
            store(pointers + peer * 8, _in_heap(context, peer, word) + first * unit)
        result = load(pointers + (rank if root < 0 else root) * 8)
        call_reduction(function, result, pointers, size, step)
        if root < 0:
            for peer in range(size):
                if peer != rank:
                    memcpy(load(pointers + peer * 8), result, step * unit)
        first += step


@kernel
def _reduce_list(context, parts, number, unit, function):
    """Reduce the tensors in the heaps in place, all taken as one, and the others out of the slots."""
    pointers = load(context + POINTERS)
    offsets = 8 * (1 + number)
    table = eager_slot(context, load(context + RANK))
    count = 0
    for part in range(number):
        if load(table + offsets + 8 * part) != NOT_SHARED:
            count += load(parts + 8 * (part + 1)) - load(parts + 8 * part)
    inside = 0
    outside = 0
    for part in range(number):
        start = load(parts + 8 * part)
        length = load(parts + 8 * (part + 1)) - start
        if load(table + offsets + 8 * part) != NOT_SHARED:
            _reduce_piece(context, offsets + 8 * part, inside, length, count, unit, function, -1)
            inside += length
        else:
            for peer in range(load(context + SIZE)):
                store(pointers + peer * 8, buffer_of(context, peer, 0) + outside * unit)
            reduce_in(context, parts, number, start, length, unit, function, True, 0)
            outside += length
