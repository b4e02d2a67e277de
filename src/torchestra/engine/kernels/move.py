"""The collectives that only move bytes: barrier, one-to-many, and many-to-many.

What kernels take: the address of a plan (layout.py), a count, which the fingerprint compares, and addresses
of tensors. Lengths are in bytes. Every kernel can return PENDING, and is then called again with the same
arguments (waiting.py).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine import layout as at
from torchestra.engine.kernels.buffers import (
    SHARED_PATH,
    apart,
    buffer_of,
    copy_out,
    fill,
    first_piece,
    streams,
)
from torchestra.engine.kernels.eager import eager_broadcast, eager_gather, eager_scatter
from torchestra.engine.kernels.exchange import exchange
from torchestra.engine.kernels.single_copy import (
    ALL,
    NOBODY,
    SOME,
    fetch,
    has_lent,
    lend_tensor,
    lenders,
    lends,
    pays_to_share,
    unreadable,
)
from torchestra.engine.kernels.waiting import (
    arrive,
    current_line,
    end,
    end_posted,
    enter,
    everyone_shares,
    final_barrier,
    meet,
    offset_in_heap,
    post,
    publish,
    shared_tensor,
    wait_for_step,
)
from torchestra.engine.native.atomics import kernel, load, memcpy, store, stream_fence

RANK, SIZE, RESUME = at.RANK, at.SIZE, at.RESUME
TARGETS, TARGET_BYTES = at.TARGETS, at.TARGET_BYTES
UNKNOWN, DONE = at.UNKNOWN, at.DONE
SHARE, PEER_CHUNK = at.SHARE, at.PEER_CHUNK
PLAN_CONTEXT, PLAN_META = at.PLAN_CONTEXT, at.PLAN_META
PLAN_UNIT, PLAN_ROOT = at.PLAN_UNIT, at.PLAN_ROOT
EAGER_BYTES, FARTHEST = at.EAGER_BYTES, at.WINDOW - 1
EXTRA_STEP, ADDRESS = at.EXTRA_STEP, at.ADDRESS


@kernel
def barrier(plan, count):
    """Arrive and meet: nobody returns before everybody has called. ``count`` is 0."""
    context = load(plan + PLAN_CONTEXT)
    meta = load(plan + PLAN_META)
    if load(context + RESUME) <= 0:
        code = enter(context, meta, count, 0, FARTHEST)
        if code != DONE:
            return code
        post(context, meta, count)
    code = meet(context, meta, count)
    if code == DONE:
        end_posted(context)
    else:
        store(context + RESUME, 1)
    return code


@kernel
def share(plan, count, source):
    """Every rank offers one piece, and reads the pieces of the others that it wants.

    TARGET_BYTES says, the same on every rank, how long the piece of each rank is (0: offers none), TARGETS
    where to put it (0: not wanted here). In iteration t a rank copies part t of its piece into its buffer
    and part t - 1 of the others' pieces out of theirs. One copy in the buffer serves all readers. Long
    pieces may be lent instead (single_copy.py).
    """
    context = load(plan + PLAN_CONTEXT)
    meta = load(plan + PLAN_META)
    chunk = load(context + SHARE)
    own = load(load(context + TARGET_BYTES) + load(context + RANK) * 8)
    longest = _longest_piece(context)
    stream = streams(context, own + _wanted_bytes(context))
    parts = max(1, (longest + chunk - 1) // chunk)
    iteration = load(context + RESUME)
    if iteration >= SHARED_PATH:
        return _share_in_place(context, source, stream, False)
    if iteration <= 0:
        iteration = 0
        code = enter(context, meta, count, max(own, _wanted_bytes(context)), apart(longest))
        if code != DONE:
            return code
        store(context + EXTRA_STEP, 0)
    extra = load(context + EXTRA_STEP)
    may_lend = extra == 0 and lends(context, longest)
    if iteration == 0 and may_lend and pays_to_share(context, _shortest_piece(plan), stream):
        lend_tensor(context, meta, count, source, own)
        iteration = 1
    while iteration < parts + 1:
        if iteration > 0:
            first = iteration + extra == 1
            code = meet(context, meta, count) if first else wait_for_step(context, iteration + extra)
            if code != DONE:
                store(context + RESUME, iteration)
                return code
            found = lenders(context) if first and may_lend else NOBODY
            if found == ALL or (found == NOBODY and first and parts > 1 and everyone_shares(context)):
                return _share_in_place(context, source, stream, found == ALL)
            if found == SOME:
                extra = 1
                iteration = 0
        _leave_part(context, iteration, chunk, longest, source)
        if extra and iteration == 0:
            publish(context, 2)
        elif iteration == 0 and parts == 1 and not may_lend:
            post(context, meta, count)
        elif iteration == 0:
            arrive(context, meta, count, offset_in_heap(context, source))
        _keep_part(context, iteration, chunk, source, stream)
        if iteration > 0:
            _fetch_parts(context, iteration - 1, chunk, longest, stream)
        if 0 < iteration < parts:
            publish(context, iteration + 1 + extra)
        iteration += 1
    if stream:
        stream_fence()
    end_posted(context)
    return DONE


@kernel
def _longest_piece(context):
    """Return the bytes of the longest piece that a rank offers."""
    longest = 0
    for peer in range(load(context + SIZE)):
        longest = max(longest, load(load(context + TARGET_BYTES) + peer * 8))
    return longest


@kernel
def _shortest_piece(plan):
    """Return the bytes of the shortest piece that a rank offers to all: 0 where there is a root."""
    context = load(plan + PLAN_CONTEXT)
    if load(plan + PLAN_ROOT) >= 0:
        return 0
    shortest = load(load(context + TARGET_BYTES))
    for peer in range(load(context + SIZE)):
        shortest = min(shortest, load(load(context + TARGET_BYTES) + peer * 8))
    return shortest


@kernel
def _wanted_bytes(context):
    """Return how many bytes this rank wants, its own piece among them."""
    total = 0
    for peer in range(load(context + SIZE)):
        if load(load(context + TARGETS) + peer * 8) != 0:
            total += load(load(context + TARGET_BYTES) + peer * 8)
    return total


@kernel
def _leave_part(context, number, chunk, longest, source):
    """Copy part ``number`` of this rank's piece into its buffer."""
    rank = load(context + RANK)
    length = min(chunk, load(load(context + TARGET_BYTES) + rank * 8) - number * chunk)
    if length > 0:
        buffer = buffer_of(context, rank, number) if number else first_piece(context, rank, longest)
        fill(context, buffer, source + number * chunk, length)


@kernel
def _keep_part(context, number, chunk, source, stream):
    """Copy part ``number`` of this rank's piece to where it wants it."""
    rank = load(context + RANK)
    target = load(load(context + TARGETS) + rank * 8)
    length = min(chunk, load(load(context + TARGET_BYTES) + rank * 8) - number * chunk)
    if length > 0 and target != 0 and target != source:
        copy_out(target + number * chunk, source + number * chunk, length, stream)


@kernel
def _fetch_parts(context, number, chunk, longest, stream):
    """Copy part ``number`` of the pieces that are wanted out of the buffers of their owners."""
    rank = load(context + RANK)
    targets = load(context + TARGETS)
    lengths = load(context + TARGET_BYTES)
    offset = number * chunk
    for peer in range(load(context + SIZE)):
        target = load(targets + peer * 8)
        length = min(chunk, load(lengths + peer * 8) - offset)
        if peer != rank and target != 0 and length > 0:
            if longest > chunk:
                buffer = buffer_of(context, peer, number)
            else:
                buffer = first_piece(context, peer, longest)
            copy_out(target + offset, buffer, length, stream)


@kernel
def _share_in_place(context, source, stream, lent):
    """Read the pieces of all ranks where they lie, once: what they have ``lent``, or in their heaps."""
    rank = load(context + RANK)
    size = load(context + SIZE)
    if load(context + RESUME) < SHARED_PATH:
        for step in range(size):
            peer = (rank + step) % size
            target = load(load(context + TARGETS) + peer * 8)
            length = load(load(context + TARGET_BYTES) + peer * 8)
            if target != 0 and length > 0:
                if peer == rank:
                    _keep_part(context, 0, length, source, stream)
                elif not lent:
                    copy_out(target, shared_tensor(context, peer), length, stream)
                else:
                    address = load(current_line(context, peer) + ADDRESS)
                    if not fetch(context, peer, target, address, length, stream):
                        return unreadable(context, peer)
        if stream:
            stream_fence()
        publish(context, 2)
        store(context + RESUME, SHARED_PATH)
    code = final_barrier(context)
    if code == DONE:
        end(context)
    return code


@kernel
def all_gather(plan, count, source, target):
    """Everybody gets the pieces of all, each of ``count`` elements, one after the other."""
    context = load(plan + PLAN_CONTEXT)
    length = count * load(plan + PLAN_UNIT)
    if (
        length <= load(context + SHARE)
        and not streams(context, length * (1 + load(context + SIZE)))
        and not lends(context, length)
        and not has_lent(context)
    ):
        return _all_gather_small(context, load(plan + PLAN_META), count, source, target, length)
    if load(context + RESUME) == 0:
        for peer in range(load(context + SIZE)):
            store(load(context + TARGETS) + peer * 8, target + peer * length)
            store(load(context + TARGET_BYTES) + peer * 8, length)
    return share(plan, count, source)


@kernel
def _all_gather_small(context, meta, count, source, target, length):
    """:func:`share` of pieces that are one part, without its tables."""
    rank = load(context + RANK)
    if load(context + RESUME) <= 0:
        code = enter(context, meta, count, length * load(context + SIZE), apart(length))
        if code != DONE:
            return code
        fill(context, first_piece(context, rank, length), source, length)
        post(context, meta, count)
        if source != target + rank * length:
            memcpy(target + rank * length, source, length)
    code = meet(context, meta, count)
    if code != DONE:
        store(context + RESUME, 1)
        return code
    for peer in range(load(context + SIZE)):
        if peer != rank:
            memcpy(target + peer * length, first_piece(context, peer, length), length)
    end_posted(context)
    return DONE


@kernel
def gather(plan, count, source):
    """The plan's root gets the pieces of all, each of ``count`` elements, where TARGETS says."""
    context = load(plan + PLAN_CONTEXT)
    length = count * load(plan + PLAN_UNIT)
    if length <= min(load(context + EAGER_BYTES), load(context + SHARE)):
        return eager_gather(plan, count, source, length)
    return share(plan, count, source)


@kernel
def scatter(plan, count, target):
    """Everybody gets a piece of ``count`` elements from the plan's root; the tables are exchange's."""
    context = load(plan + PLAN_CONTEXT)
    length = count * load(plan + PLAN_UNIT)
    total = (load(context + SIZE) - 1) * length
    if total <= load(context + EAGER_BYTES) and length <= load(context + PEER_CHUNK):
        return eager_scatter(plan, count, target, length)
    return exchange(plan, UNKNOWN)


@kernel
def broadcast(plan, count, address):
    """Everybody gets the ``count`` elements of the plan's root."""
    context = load(plan + PLAN_CONTEXT)
    length = count * load(plan + PLAN_UNIT)
    if length <= min(load(context + EAGER_BYTES), load(context + SHARE)):
        return eager_broadcast(plan, count, address, length)
    if load(context + RESUME) == 0:
        root = load(plan + PLAN_ROOT)
        for peer in range(load(context + SIZE)):
            store(load(context + TARGETS) + peer * 8, 0)
            store(load(context + TARGET_BYTES) + peer * 8, 0)
        store(load(context + TARGETS) + root * 8, address)
        store(load(context + TARGET_BYTES) + root * 8, length)
    return share(plan, count, address)
