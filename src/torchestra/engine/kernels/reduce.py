"""all_reduce, reduce and reduce_scatter.

What kernels take: the address of a plan (layout.py), a count of elements, which the fingerprint compares, and
addresses of tensors. Inside, ``unit`` is the size of an element in bytes, ``function`` the address of a
reduction (reductions.py), ``chunk`` a number of elements. Every kernel can return PENDING, and is then called
again with the same arguments (waiting.py).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine import layout as at
from torchestra.engine.kernels.buffers import SHARED_PATH, apart, buffer_of, fill, first_piece, peer_slot
from torchestra.engine.kernels.eager import eager_reduce
from torchestra.engine.kernels.in_place import end_in_place, is_late, piece, reduce_in_place, tell
from torchestra.engine.kernels.iovec import copy_in, copy_out, reduce_in
from torchestra.engine.kernels.waiting import (
    arrive,
    current_line,
    end,
    end_posted,
    enter,
    meet,
    post,
    publish,
    wait_for_step,
)
from torchestra.engine.native.atomics import call_reduction, kernel, load, store

RANK, SIZE, RESUME, POINTERS, SOURCES = at.RANK, at.SIZE, at.RESUME, at.POINTERS, at.SOURCES
SOURCE_BYTES, SHARED, NOT_SHARED = at.SOURCE_BYTES, at.SHARED, at.NOT_SHARED
DIRECT, CHUNK, PEER_CHUNK, SINGLE_IOVEC = at.DIRECT, at.CHUNK, at.PEER_CHUNK, at.SINGLE_IOVEC
PLAN_CONTEXT, PLAN_META, PLAN_UNIT = at.PLAN_CONTEXT, at.PLAN_META, at.PLAN_UNIT
PLAN_FUNCTION, PLAN_ROOT = at.PLAN_FUNCTION, at.PLAN_ROOT
EAGER_BYTES, DONE = at.EAGER_BYTES, at.DONE

_MET = 1 << 50
"""RESUME of an operation in chunks, less the number of its iteration, once all have met."""


@kernel
def all_reduce(plan, count, address):
    """Reduce the tensors of all ranks, in place, for everybody or for the plan's root."""
    context = load(plan + PLAN_CONTEXT)
    meta = load(plan + PLAN_META)
    unit = load(plan + PLAN_UNIT)
    function = load(plan + PLAN_FUNCTION)
    root = load(plan + PLAN_ROOT)
    if count * unit <= load(context + DIRECT):
        return _all_reduce_direct(context, meta, count, address, unit, function, root)
    parts = context + SINGLE_IOVEC
    store(parts + 8, count)
    store(parts + 16, address)
    return _all_reduce_chunked(context, meta, count, parts, 1, unit, function, root)


@kernel
def all_reduce_iovec(plan, count, parts, number):
    """:func:`all_reduce` of several tensors taken as one (iovec.py), of ``count`` elements together."""
    context = load(plan + PLAN_CONTEXT)
    meta = load(plan + PLAN_META)
    unit = load(plan + PLAN_UNIT)
    function = load(plan + PLAN_FUNCTION)
    root = load(plan + PLAN_ROOT)
    if count * unit <= load(context + DIRECT):
        return _all_reduce_iovec_direct(context, meta, count, parts, number, unit, function)
    return _all_reduce_chunked(context, meta, count, parts, number, unit, function, root)


@kernel
def _all_reduce_direct(context, meta, count, address, unit, function, root):
    """Everybody writes its tensor into its slot, meets, and reduces all slots: one synchronisation."""
    rank = load(context + RANK)
    length = count * unit
    if root >= 0 and length <= load(context + EAGER_BYTES):
        return eager_reduce(context, meta, count, address, unit, function, root)
    if load(context + RESUME) <= 0:
        code = enter(context, meta, count, length, apart(length))
        if code != DONE:
            return code
        fill(context, first_piece(context, rank, length), address, length)
        post(context, meta, count)
    code = meet(context, meta, count)
    if code != DONE:
        store(context + RESUME, 1)
        return code
    if root < 0 or root == rank:
        size = load(context + SIZE)
        pointers = load(context + POINTERS)
        for peer in range(size):
            store(pointers + peer * 8, first_piece(context, peer, length))
        store(pointers + rank * 8, address)
        call_reduction(function, address, pointers, size, count)
    end_posted(context)
    return DONE


@kernel
def _all_reduce_iovec_direct(context, meta, count, parts, number, unit, function):
    length = count * unit
    if load(context + RESUME) <= 0:
        code = enter(context, meta, count, length, apart(length))
        if code != DONE:
            return code
        copy_in(context, parts, number, 0, count, unit, first_piece(context, load(context + RANK), length))
        post(context, meta, count)
    code = meet(context, meta, count)
    if code != DONE:
        store(context + RESUME, 1)
        return code
    pointers = load(context + POINTERS)
    for peer in range(load(context + SIZE)):
        store(pointers + peer * 8, first_piece(context, peer, length))
    reduce_in(context, parts, number, 0, count, unit, function, True, 0)
    end_posted(context)
    return DONE


@kernel
def _all_reduce_chunked(context, meta, count, parts, number, unit, function, root):
    """Meet, and reduce in place where all can (in_place.py), or else in chunks."""
    resume = load(context + RESUME)
    if resume >= SHARED_PATH:
        return end_in_place(context)
    if resume >= _MET:
        return _reduce_chunks(context, count, parts, number, unit, function, root, resume - _MET)
    if resume <= 0:
        code = enter(context, meta, count, count * unit, 1)
        if code != DONE:
            return code
        shared = tell(context, parts, number, unit)
        if shared == NOT_SHARED:
            _leave_pieces(context, parts, number, 0, count, unit)
        arrive(context, meta, count, shared)
    code = meet(context, meta, count)
    if code != DONE:
        store(context + RESUME, 1)
        return code
    code = reduce_in_place(context, count, parts, number, unit, function, root)
    if code != NOT_SHARED:
        return code
    if is_late(context):
        if load(current_line(context, load(context + RANK)) + SHARED) != NOT_SHARED:
            _leave_pieces(context, parts, number, 0, count, unit)
        publish(context, 2)
    return _reduce_chunks(context, count, parts, number, unit, function, root, 1)


@kernel
def _reduce_chunks(context, count, parts, number, unit, function, root, first_iteration):
    """Reduce-scatter and all-gather, pipelined over chunks: one synchronisation a chunk.

    In iteration t a rank (1) copies the peers' pieces of chunk t into its buffer, (2) reduces its own
    piece of chunk t - 1 out of everybody's buffers, into its result and its buffer, (3) copies the peers'
    pieces of chunk t - 2 out of their buffers; then it publishes step t + 1. A buffer is written again
    three iterations later: to be there a rank has seen everybody past iteration t + 2, where chunk
    t was read for the last time. Iteration 0 was before the ranks met; where some chunks 0 were late, all
    publish one step more.
    """
    rank = load(context + RANK)
    size = load(context + SIZE)
    pointers = load(context + POINTERS)
    chunk = load(context + CHUNK) // unit
    chunks = (count + chunk - 1) // chunk
    wanted = root < 0 or root == rank
    late = 1 if is_late(context) else 0
    for iteration in range(first_iteration, chunks + 2):
        code = wait_for_step(context, iteration + late)
        if code != DONE:
            store(context + RESUME, _MET + iteration)
            return code
        if iteration < chunks:
            _leave_pieces(context, parts, number, iteration, count, unit)
        if iteration <= chunks:
            offset = (iteration - 1) * chunk
            length = min(chunk, count - offset)
            first = piece(rank, size, length)
            last = piece(rank + 1, size, length)
            if last > first:
                for peer in range(size):
                    buffer = buffer_of(context, peer, iteration - 1)
                    store(pointers + peer * 8, buffer + first * unit)
                copy = load(pointers + rank * 8) if root < 0 or not wanted else 0
                reduce_in(context, parts, number, offset + first, last - first, unit, function, wanted, copy)
        if iteration > 1 and wanted:
            _fetch_pieces(context, parts, number, iteration - 2, count, unit)
        if iteration <= chunks:
            publish(context, iteration + 1 + late)
    end(context)
    return DONE


@kernel
def _leave_pieces(context, parts, number, which, count, unit):
    """Copy the peers' pieces of chunk ``which`` into this rank's buffer, for them to reduce."""
    rank = load(context + RANK)
    size = load(context + SIZE)
    chunk = load(context + CHUNK) // unit
    length = min(chunk, count - which * chunk)
    buffer = buffer_of(context, rank, which)
    for peer in range(size):
        if peer != rank:
            first = piece(peer, size, length)
            last = piece(peer + 1, size, length)
            source = which * chunk + first
            copy_in(context, parts, number, source, last - first, unit, buffer + first * unit)


@kernel
def _fetch_pieces(context, parts, number, which, count, unit):
    """Copy the peers' pieces of chunk ``which``, which they have reduced, out of their buffers."""
    rank = load(context + RANK)
    size = load(context + SIZE)
    chunk = load(context + CHUNK) // unit
    length = min(chunk, count - which * chunk)
    for peer in range(size):
        if peer != rank:
            first = piece(peer, size, length)
            last = piece(peer + 1, size, length)
            buffer = buffer_of(context, peer, which) + first * unit
            copy_out(parts, number, which * chunk + first, last - first, unit, buffer)


@kernel
def reduce_scatter(plan, count, target, longest):
    """Reduce the pieces that the tables SOURCES and SOURCE_BYTES describe, each to the rank it is for.

    In iteration t a rank copies part t of every peer's piece into its buffer and reduces part t - 1 of its
    own piece out of everybody's buffers, which hold SIZE - 1 parts each. ``longest`` is the number of
    elements of the longest piece, and the same on every rank.
    """
    context = load(plan + PLAN_CONTEXT)
    meta = load(plan + PLAN_META)
    unit = load(plan + PLAN_UNIT)
    function = load(plan + PLAN_FUNCTION)
    chunk = load(context + PEER_CHUNK) // unit
    rank = load(context + RANK)
    size = load(context + SIZE)
    pointers = load(context + POINTERS)
    sources = load(context + SOURCES)
    lengths = load(context + SOURCE_BYTES)
    iteration = load(context + RESUME)
    parts = max(1, (longest + chunk - 1) // chunk)
    if iteration <= 0:
        iteration = 0
        total = 0
        for peer in range(size):
            total += load(lengths + peer * 8)
        code = enter(context, meta, count, total, 1)
        if code != DONE:
            return code
    while iteration < parts + 1:
        if iteration > 0:
            if iteration == 1:
                code = meet(context, meta, count)
            else:
                code = wait_for_step(context, iteration)
            if code != DONE:
                store(context + RESUME, iteration)
                return code
        offset = iteration * chunk * unit
        if iteration < parts:
            buffer = buffer_of(context, rank, iteration)
            for peer in range(size):
                length = min(chunk * unit, load(lengths + peer * 8) - offset)
                if peer != rank and length > 0:
                    slot = buffer + peer_slot(context, rank, peer) * chunk * unit
                    fill(context, slot, load(sources + peer * 8) + offset, length)
        if iteration > 0:
            offset -= chunk * unit
            length = min(chunk * unit, load(lengths + rank * 8) - offset)
            if length > 0:
                for peer in range(size):
                    buffer = buffer_of(context, peer, iteration - 1)
                    store(pointers + peer * 8, buffer + peer_slot(context, peer, rank) * chunk * unit)
                store(pointers + rank * 8, load(sources + rank * 8) + offset)
                call_reduction(function, target + offset, pointers, size, length // unit)
        if iteration == 0:
            arrive(context, meta, count, NOT_SHARED)
        elif iteration < parts:
            publish(context, iteration + 1)
        iteration += 1
    end(context)
    return DONE


@kernel
def reduce_scatter_even(plan, count, source, target):
    """reduce_scatter of equal pieces that lie one after the other; ``count`` elements in a piece."""
    context = load(plan + PLAN_CONTEXT)
    if load(context + RESUME) == 0:
        length = count * load(plan + PLAN_UNIT)
        for peer in range(load(context + SIZE)):
            store(load(context + SOURCES) + peer * 8, source + peer * length)
            store(load(context + SOURCE_BYTES) + peer * 8, length)
    return reduce_scatter(plan, count, target, count)
