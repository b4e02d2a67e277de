"""Small rooted operations, in which nobody waits for those whom it has nothing from.

In broadcast and scatter the root writes its pieces and goes on, while the others wait for it alone; in reduce
and gather the root waits for all others, who go on. So a rank may have ended an operation that a peer has not
begun, WINDOW - 1 of them at most (waiting.py).

Why nothing is lost. A piece lies in the flag line of its operation, or in the eager slot n modulo WINDOW,
which the owner writes again in operation n + WINDOW at the earliest. To begin that, it has seen all peers
begin operation n + 1, so they have read the piece. The arena stays until the last rank has closed it, so a
rank that destroys the group, or ends, after it has published leaves its piece to those who come later.

That ranks have called different things is found by whoever reads a piece, before it does, or later
(waiting.py). As some of the ranks have gone on by then, the group is aborted, and all of them raise it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine import layout as at
from torchestra.engine.kernels.buffers import eager_piece, peer_slot
from torchestra.engine.kernels.waiting import (
    await_piece,
    end_posted,
    enter,
    meet,
    post,
)
from torchestra.engine.native.atomics import call_reduction, kernel, load, memcpy, store

RANK, SIZE, RESUME, POINTERS, SOURCES, TARGETS = (
    at.RANK,
    at.SIZE,
    at.RESUME,
    at.POINTERS,
    at.SOURCES,
    at.TARGETS,
)
PLAN_CONTEXT, PLAN_META, PLAN_ROOT = at.PLAN_CONTEXT, at.PLAN_META, at.PLAN_ROOT
DONE, EAGER, APART = at.DONE, at.EAGER, at.WINDOW - 1


@kernel
def eager_broadcast(plan, count, address, length):
    """The root leaves its tensor, of ``length`` bytes, and goes on."""
    context = load(plan + PLAN_CONTEXT)
    meta = load(plan + PLAN_META) | EAGER
    root = load(plan + PLAN_ROOT)
    rank = load(context + RANK)
    if load(context + RESUME) <= 0:
        code = enter(context, meta, count, length, APART)
        if code != DONE:
            return code
        if rank == root:
            memcpy(eager_piece(context, rank, length), address, length)
        post(context, meta, count)
    if rank != root:
        code = await_piece(context, root, meta, count)
        if code != DONE:
            return code
        memcpy(address, eager_piece(context, root, length), length)
    end_posted(context)
    return DONE


@kernel
def eager_scatter(plan, count, target, length):
    """The root leaves a piece of ``length`` bytes for each rank, one after the other, and goes on."""
    context = load(plan + PLAN_CONTEXT)
    meta = load(plan + PLAN_META) | EAGER
    root = load(plan + PLAN_ROOT)
    rank = load(context + RANK)
    size = load(context + SIZE)
    total = (size - 1) * length
    if load(context + RESUME) <= 0:
        code = enter(context, meta, count, size * length if rank == root else length, APART)
        if code != DONE:
            return code
        if rank == root:
            sources = load(context + SOURCES)
            for peer in range(size):
                destination = eager_piece(context, rank, total) + peer_slot(context, rank, peer) * length
                memcpy(target if peer == rank else destination, load(sources + peer * 8), length)
        post(context, meta, count)
    if rank != root:
        code = await_piece(context, root, meta, count)
        if code != DONE:
            return code
        piece = eager_piece(context, root, total) + peer_slot(context, root, rank) * length
        memcpy(target, piece, length)
    end_posted(context)
    return DONE


@kernel
def eager_gather(plan, count, source, length):
    """All leave their tensors, of ``length`` bytes; the root, which has the table TARGETS, waits for them."""
    context = load(plan + PLAN_CONTEXT)
    meta = load(plan + PLAN_META) | EAGER
    moved = load(context + SIZE) * length
    code = _leave_for_root(context, meta, count, source, length, load(plan + PLAN_ROOT), moved)
    if code != DONE:
        return code
    rank = load(context + RANK)
    if rank == load(plan + PLAN_ROOT):
        for peer in range(load(context + SIZE)):
            target = load(load(context + TARGETS) + peer * 8)
            piece = source if peer == rank else eager_piece(context, peer, length)
            if target != piece:
                memcpy(target, piece, length)
    end_posted(context)
    return DONE


@kernel
def eager_reduce(context, meta, count, address, unit, function, root):
    """All leave their tensors; the root waits for them, and reduces them into its own."""
    length = count * unit
    code = _leave_for_root(context, meta | EAGER, count, address, length, root, length)
    if code != DONE:
        return code
    rank = load(context + RANK)
    if rank == root:
        pointers = load(context + POINTERS)
        for peer in range(load(context + SIZE)):
            store(pointers + peer * 8, eager_piece(context, peer, length))
        store(pointers + rank * 8, address)
        call_reduction(function, address, pointers, load(context + SIZE), count)
    end_posted(context)
    return DONE


@kernel
def _leave_for_root(context, meta, count, source, length, root, moved):
    """Leave a piece; the root, to which ``moved`` bytes come, waits until all have."""
    rank = load(context + RANK)
    if load(context + RESUME) <= 0:
        code = enter(context, meta, count, moved if rank == root else length, APART)
        if code != DONE:
            return code
        if rank != root:
            memcpy(eager_piece(context, rank, length), source, length)
        post(context, meta, count)
    if rank != root:
        return DONE
    code = meet(context, meta, count)
    if code != DONE:
        store(context + RESUME, 1)
    return code
