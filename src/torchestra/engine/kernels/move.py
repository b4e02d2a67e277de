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
    first_piece,
    peer_slot,
    streams,
)
from torchestra.engine.kernels.eager import eager_broadcast, eager_gather, eager_scatter
from torchestra.engine.kernels.waiting import (
    all_count,
    arrive,
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

RANK, SIZE, RESUME, SEQUENCE, SPLITS = at.RANK, at.SIZE, at.RESUME, at.SEQUENCE, at.SPLITS
SOURCES, SOURCE_BYTES, TARGETS, TARGET_BYTES = at.SOURCES, at.SOURCE_BYTES, at.TARGETS, at.TARGET_BYTES
UNKNOWN = at.UNKNOWN
NOT_SHARED, DONE, MISMATCH = at.NOT_SHARED, at.DONE, at.MISMATCH
SHARE, PEER_CHUNK = at.SHARE, at.PEER_CHUNK
PLAN_CONTEXT, PLAN_META = at.PLAN_CONTEXT, at.PLAN_META
PLAN_UNIT, PLAN_ROOT = at.PLAN_UNIT, at.PLAN_ROOT
EAGER_BYTES, FARTHEST = at.EAGER_BYTES, at.WINDOW - 1


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
    and part t - 1 of the others' pieces out of theirs. One copy in the buffer serves all readers.
    """
    context = load(plan + PLAN_CONTEXT)
    meta = load(plan + PLAN_META)
    chunk = load(context + SHARE)
    rank = load(context + RANK)
    targets = load(context + TARGETS)
    lengths = load(context + TARGET_BYTES)
    own = load(lengths + rank * 8)
    longest = 0
    total = 0
    for peer in range(load(context + SIZE)):
        longest = max(longest, load(lengths + peer * 8))
        if load(targets + peer * 8) != 0:
            total += load(lengths + peer * 8)
    stream = streams(context, own + total)
    parts = max(1, (longest + chunk - 1) // chunk)
    iteration = load(context + RESUME)
    if iteration >= SHARED_PATH:
        return _share_in_place(context, source, stream)
    if iteration <= 0:
        iteration = 0
        code = enter(context, meta, count, max(own, total), apart(longest))
        if code != DONE:
            return code
    while iteration < parts + 1:
        if iteration > 0:
            code = meet(context, meta, count) if iteration == 1 else wait_for_step(context, iteration)
            if code != DONE:
                store(context + RESUME, iteration)
                return code
            if iteration == 1 and parts > 1 and everyone_shares(context):
                return _share_in_place(context, source, stream)
        offset = iteration * chunk
        if offset < own:
            buffer = buffer_of(context, rank, iteration) if iteration else first_piece(context, rank, longest)
            memcpy(buffer, source + offset, min(chunk, own - offset))
        if iteration == 0 and parts == 1:
            post(context, meta, count)
        elif iteration == 0:
            arrive(context, meta, count, offset_in_heap(context, source))
        target = load(targets + rank * 8)
        if offset < own and target != 0 and target != source:
            copy_out(target + offset, source + offset, min(chunk, own - offset), stream)
        if iteration > 0:
            _fetch_parts(context, iteration - 1, chunk, longest, stream)
        if 0 < iteration < parts:
            publish(context, iteration + 1)
        iteration += 1
    if stream:
        stream_fence()
    end_posted(context)
    return DONE


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
def _share_in_place(context, source, stream):
    """Read the pieces of all ranks, which lie in their heaps, there and once."""
    rank = load(context + RANK)
    size = load(context + SIZE)
    if load(context + RESUME) < SHARED_PATH:
        for step in range(size):
            peer = (rank + step) % size
            target = load(load(context + TARGETS) + peer * 8)
            length = load(load(context + TARGET_BYTES) + peer * 8)
            piece = shared_tensor(context, peer)
            if target != 0 and target != piece and length > 0:
                copy_out(target, piece, length, stream)
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
    if length <= load(context + SHARE) and not streams(context, length * (1 + load(context + SIZE))):
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
        memcpy(first_piece(context, rank, length), source, length)
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


@kernel
def _splits_of(context, rank):
    """Return two rows of SIZE words: what ``rank`` sends to, and what it expects from, each peer."""
    size = load(context + SIZE)
    return load(context + SPLITS) + (rank * 2 + (load(context + SEQUENCE) & 1)) * 2 * size * 8


@kernel
def _tell_splits(context):
    rank = load(context + RANK)
    size = load(context + SIZE)
    row = _splits_of(context, rank)
    memcpy(row, load(context + SOURCE_BYTES), size * 8)
    memcpy(row + size * 8, load(context + TARGET_BYTES), size * 8)


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
def exchange(plan, count):
    """Every rank sends one piece to each peer: SOURCES, SOURCE_BYTES, TARGETS, TARGET_BYTES, by peer.

    In iteration t a rank copies part t of the piece for each peer into its place in the buffer (SIZE - 1
    places of ``chunk`` bytes) and part t - 1 of the pieces for itself out of the others' buffers.
    What the ranks send and expect is told with the fingerprint, and all compare all of it. ``count`` is the
    length of every piece, or UNKNOWN where they differ.
    """
    context = load(plan + PLAN_CONTEXT)
    meta = load(plan + PLAN_META)
    chunk = load(context + PEER_CHUNK)
    size = load(context + SIZE)
    sent = load(context + SOURCE_BYTES)
    expected = load(context + TARGET_BYTES)
    total = 0
    given = 0
    for peer in range(size):
        total += load(expected + peer * 8)
        given += load(sent + peer * 8)
    stream = streams(context, given + total)
    iteration = load(context + RESUME)
    parts = 1
    if iteration <= 0:
        iteration = 0
        code = enter(context, meta, count, max(given, total), 1)
        if code != DONE:
            return code
        _tell_splits(context)
    elif iteration > 1:
        parts = max(1, (_longest(context, count) + chunk - 1) // chunk)
    while iteration < parts + 1:
        if iteration > 0:
            if iteration == 1:
                code = meet(context, meta, UNKNOWN)
                if code == DONE:
                    longest = _longest(context, count)
                    if longest < 0:
                        code = MISMATCH
                    parts = max(1, (longest + chunk - 1) // chunk)
            else:
                code = wait_for_step(context, iteration)
            if code != DONE:
                store(context + RESUME, iteration)
                return code
        if iteration < parts:
            _leave_parts(context, iteration, chunk)
        if iteration == 0:
            arrive(context, meta, count, NOT_SHARED)
        _keep_part(context, iteration, chunk, stream)
        if iteration > 0:
            _take_parts(context, iteration - 1, chunk, stream)
        if 0 < iteration < parts:
            publish(context, iteration + 1)
        iteration += 1
    if stream:
        stream_fence()
    end(context)
    return DONE


@kernel
def _leave_parts(context, number, chunk):
    """Copy part ``number`` of the piece for each peer into this rank's buffer."""
    rank = load(context + RANK)
    buffer = buffer_of(context, rank, number)
    for peer in range(load(context + SIZE)):
        length = min(chunk, load(load(context + SOURCE_BYTES) + peer * 8) - number * chunk)
        if peer != rank and length > 0:
            source = load(load(context + SOURCES) + peer * 8) + number * chunk
            memcpy(buffer + peer_slot(context, rank, peer) * chunk, source, length)


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
