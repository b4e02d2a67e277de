"""all_to_all, and what else pairs of ranks exchange: every rank sends one piece to each peer.

What kernels take: as those of move.py.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine import layout as at
from torchestra.engine.kernels.buffers import SHARED_PATH, buffer_of, copy_out, fill, peer_slot, streams
from torchestra.engine.kernels.single_copy import (
    ALL,
    SOME,
    fetch,
    heap_of,
    is_readable,
    lend,
    lenders,
    lends,
    unreadable,
)
from torchestra.engine.kernels.waiting import (
    all_count,
    arrive,
    end,
    enter,
    final_barrier,
    meet,
    publish,
    wait_for_step,
)
from torchestra.engine.native.atomics import kernel, load, memcpy, store, stream_fence

RANK, SIZE, RESUME, SEQUENCE, SPLITS = at.RANK, at.SIZE, at.RESUME, at.SEQUENCE, at.SPLITS
SOURCES, SOURCE_BYTES, TARGETS, TARGET_BYTES = at.SOURCES, at.SOURCE_BYTES, at.TARGETS, at.TARGET_BYTES
UNKNOWN, NOT_SHARED, DONE, MISMATCH = at.UNKNOWN, at.NOT_SHARED, at.DONE, at.MISMATCH
PEER_CHUNK, EXTRA_STEP = at.PEER_CHUNK, at.EXTRA_STEP
PLAN_CONTEXT, PLAN_META = at.PLAN_CONTEXT, at.PLAN_META


@kernel
def _splits_of(context, rank):
    """Return three rows of SIZE words: what ``rank`` sends to each peer, what it expects, and from where."""
    size = load(context + SIZE)
    return load(context + SPLITS) + (rank * 2 + (load(context + SEQUENCE) & 1)) * 3 * size * 8


@kernel
def _tell_splits(context):
    rank = load(context + RANK)
    size = load(context + SIZE)
    row = _splits_of(context, rank)
    memcpy(row, load(context + SOURCE_BYTES), size * 8)
    memcpy(row + size * 8, load(context + TARGET_BYTES), size * 8)
    memcpy(row + 2 * size * 8, load(context + SOURCES), size * 8)


@kernel
def _lend_pieces(context, meta, count, stream):
    """Lend the pieces for the peers, which :func:`_tell_splits` has told.

    What the rank sends itself it copies then: others may not have come yet.
    """
    sources = load(context + SOURCES)
    sent = load(context + SOURCE_BYTES)
    readable = True
    start = heap_of(context, load(sources))
    for peer in range(load(context + SIZE)):
        if load(sent + peer * 8) > 0:
            readable = readable and is_readable(context, load(sources + peer * 8), load(sent + peer * 8))
            if heap_of(context, load(sources + peer * 8)) == 0:
                start = 0
    lend(context, meta, count, 0, readable, start)
    _keep_part(context, 0, load(load(context + TARGET_BYTES) + load(context + RANK) * 8), stream)


@kernel
def _longest_split(context):
    """Return the longest piece of any pair, or -1 when a pair does not agree about a length."""
    size = load(context + SIZE)
    longest = 0
    for sender in range(size):
        sent = _splits_of(context, sender)
        for receiver in range(size):
            length = load(sent + receiver * 8)
            if load(_splits_of(context, receiver) + (size + sender) * 8) != length:
                return -1
            longest = max(longest, length)
    return longest


@kernel
def _longest(context, count):
    """:func:`_longest_split`, at once where all ranks exchange equal pieces of ``count`` bytes."""
    if count != UNKNOWN and all_count(context, count):
        return count
    return _longest_split(context)


@kernel
def _longest_here(context):
    """Return the longest piece that this rank sends or expects."""
    longest = 0
    for peer in range(load(context + SIZE)):
        sent = load(load(context + SOURCE_BYTES) + peer * 8)
        longest = max(longest, sent, load(load(context + TARGET_BYTES) + peer * 8))
    return longest


@kernel
def _sum(context, table):
    """Return the sum of one word for each rank."""
    total = 0
    for peer in range(load(context + SIZE)):
        total += load(table + peer * 8)
    return total


@kernel
def _parts(context, count):
    """Return in how many parts the longest piece goes through a buffer, after the meeting."""
    chunk = load(context + PEER_CHUNK)
    return max(1, (_longest(context, count) + chunk - 1) // chunk)


@kernel
def exchange(plan, count):
    """Every rank sends one piece to each peer: SOURCES, SOURCE_BYTES, TARGETS, TARGET_BYTES, by peer.

    In iteration t a rank copies part t of the piece for each peer into its place in the buffer (SIZE - 1
    places of ``chunk`` bytes) and part t - 1 of the pieces for itself out of the others' buffers.
    What the ranks send and expect is told with the fingerprint, and all compare all of it. ``count`` is the
    length of every piece, or UNKNOWN where they differ. Long pieces are lent instead (single_copy.py).
    """
    context = load(plan + PLAN_CONTEXT)
    meta = load(plan + PLAN_META)
    chunk = load(context + PEER_CHUNK)
    given = _sum(context, load(context + SOURCE_BYTES))
    total = _sum(context, load(context + TARGET_BYTES))
    stream = streams(context, given + total)
    iteration = load(context + RESUME)
    if iteration >= SHARED_PATH:
        return _exchange_in_place(context, stream)
    if iteration <= 0:
        iteration = 0
        code = enter(context, meta, count, max(given, total), 1)
        if code != DONE:
            return code
        store(context + EXTRA_STEP, 0)
        _tell_splits(context)
        if lends(context, _longest_here(context)):
            _lend_pieces(context, meta, count, stream)
            iteration = 1
    extra = load(context + EXTRA_STEP)
    parts = _parts(context, count) if iteration + extra > 1 else 1
    while iteration < parts + 1:
        if iteration > 0:
            first = iteration + extra == 1
            code = _meet_all(context, meta, count) if first else wait_for_step(context, iteration + extra)
            if code != DONE:
                store(context + RESUME, iteration)
                return code
            if first:
                parts = _parts(context, count)
                found = lenders(context)
                if found == ALL:
                    return _exchange_in_place(context, stream)
                if found == SOME:
                    extra = 1
                    iteration = 0
        if iteration < parts:
            _leave_parts(context, iteration, chunk)
        if extra and iteration == 0:
            publish(context, 2)
        elif iteration == 0:
            arrive(context, meta, count, NOT_SHARED)
        _keep_part(context, iteration, chunk, stream)
        if iteration > 0:
            _take_parts(context, iteration - 1, chunk, stream)
        if 0 < iteration < parts:
            publish(context, iteration + 1 + extra)
        iteration += 1
    if stream:
        stream_fence()
    end(context)
    return DONE


@kernel
def _meet_all(context, meta, count):
    """Meet, and compare who sends whom how much."""
    code = meet(context, meta, UNKNOWN)
    if code == DONE and _longest(context, count) < 0:
        return MISMATCH
    return code


@kernel
def _exchange_in_place(context, stream):
    """Read the pieces for this rank where they lie, once, when all ranks have lent theirs."""
    rank = load(context + RANK)
    size = load(context + SIZE)
    if load(context + RESUME) < SHARED_PATH:
        for step in range(1, size):
            peer = (rank + step) % size
            length = load(load(context + TARGET_BYTES) + peer * 8)
            if length > 0:
                address = load(_splits_of(context, peer) + (2 * size + rank) * 8)
                target = load(load(context + TARGETS) + peer * 8)
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
def _leave_parts(context, number, chunk):
    """Copy part ``number`` of the piece for each peer into this rank's buffer."""
    rank = load(context + RANK)
    buffer = buffer_of(context, rank, number)
    for peer in range(load(context + SIZE)):
        length = min(chunk, load(load(context + SOURCE_BYTES) + peer * 8) - number * chunk)
        if peer != rank and length > 0:
            source = load(load(context + SOURCES) + peer * 8) + number * chunk
            fill(context, buffer + peer_slot(context, rank, peer) * chunk, source, length)


@kernel
def _keep_part(context, number, chunk, stream):
    """Copy part ``number`` of what a rank sends itself.

    That it expects as much is found out with the other pairs.
    """
    offset = load(context + RANK) * 8
    whole = min(load(load(context + SOURCE_BYTES) + offset), load(load(context + TARGET_BYTES) + offset))
    length = min(chunk, whole - number * chunk)
    if length > 0:
        source = load(load(context + SOURCES) + offset) + number * chunk
        copy_out(load(load(context + TARGETS) + offset) + number * chunk, source, length, stream)


@kernel
def _take_parts(context, number, chunk, stream):
    """Copy part ``number`` of the pieces for this rank out of the peers' buffers, beginning with the next."""
    rank = load(context + RANK)
    size = load(context + SIZE)
    for step in range(1, size):
        peer = (rank + step) % size
        length = min(chunk, load(load(context + TARGET_BYTES) + peer * 8) - number * chunk)
        if length > 0:
            buffer = buffer_of(context, peer, number) + peer_slot(context, peer, rank) * chunk
            target = load(load(context + TARGETS) + peer * 8) + number * chunk
            copy_out(target, buffer, length, stream)


@kernel
def all_to_all_even(plan, length, source, target):
    """exchange of equal pieces of ``length`` bytes that lie one after the other on both sides."""
    context = load(plan + PLAN_CONTEXT)
    if load(context + RESUME) == 0:
        for peer in range(load(context + SIZE)):
            store(load(context + SOURCES) + peer * 8, source + peer * length)
            store(load(context + TARGETS) + peer * 8, target + peer * length)
            store(load(context + SOURCE_BYTES) + peer * 8, length)
            store(load(context + TARGET_BYTES) + peer * 8, length)
    return exchange(plan, length)
