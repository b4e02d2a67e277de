"""Get a tensor back, after an operation left halfway, from peers that may still write into it.

In an all_reduce or reduce in place (kernels/in_place.py) every rank writes its part of the result into all
tensors, which takes a quarter less time than if every rank fetched it. At the end of the operation all have
written. But a rank that leaves it before that, on a time-out, say, may leave a peer behind that is stopped,
or has no core, between its steps 1 and 2, and that writes when it goes on, whatever the memory is used for by
then.

So before it raises the error, the rank looks for peers that may be there. One that has not published step 1
will find the group aborted when it has (waiting.py); one that has published step 2 has written; one that has
left halfway too says so in ABANDONED; one that is dead does nothing. After a moment that accounts for all of
them, if none is stopped. If the others are processes, the rank replaces the pages of the tensor by copies
that they do not see: what they write goes into memory that nobody uses. Ranks that are threads see the same
memory, but are never stopped alone: the rank waits for them. It does so, too, while they may read a tensor
that it has lent them (single_copy.py), since reading memory that it has freed would end the process; a
process that reads another's learns of it, and at its step 2 that the group was aborted. Should the wait end
before they are out (after a minute, or by Ctrl-C), the tensors are never freed.

The memory of the pages that were replaced goes back to the system, and reads as zeros to a peer: which is no
worse than what the rank may do with its tensor from now on. Either is only for a group that is aborted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch

from torchestra.engine import layout as at
from torchestra.engine import operations
from torchestra.engine.failure.liveness import PeerThreads
from torchestra.engine.kernels import shared_words
from torchestra.engine.membership.rank_context import RankContext
from torchestra.engine.operations import Kind
from torchestra.errors import DistBackendError
from torchestra.system.deadline import Deadline

_WRITTEN_BY_PEERS = (Kind.all_reduce, Kind.reduce)
_SECONDS_FOR_PROCESSES = 0.05
_SECONDS_FOR_THREADS = 60.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.01

# The tensors of operations that peers may be in; what is left here when a wait has ended is never freed.
_held: dict[int, Sequence[Sequence[torch.Tensor]]] = {}


def reclaim(
    context: RankContext, error: BaseException, tensors: Sequence[Sequence[torch.Tensor]] = ()
) -> None:
    """Make sure that no peer uses the tensors of the operation that this rank has left halfway.

    Must be called after the group was aborted, when this rank has left the kernel and will enter no other.

    Args:
        error: with which it has left.
        tensors: lists of those of the operation, kept for good if a thread may still use them when this is
            left.

    Raises:
        DistBackendError: a peer may still do so: a thread that gets no core, or a process where there is no
            memory for a copy.
    """
    threads = isinstance(context.peers, PeerThreads)
    key = id(tensors)
    if threads:
        _held[key] = tensors
    shared_words.store_ordered(_own_block(context) + at.ABANDONED, context.load_word(at.SEQUENCE))
    ranges = _tensors(context)
    is_lent = threads and context.load_word(at.LENT) == context.load_word(at.SEQUENCE)
    inside = _inside(context)
    if ranges or is_lent:
        for _ in Deadline(_SECONDS_FOR_THREADS if threads else _SECONDS_FOR_PROCESSES).polls(
            _FIRST_PAUSE, _LONGEST_PAUSE
        ):
            if not (inside := _inside(context)):
                break
    if not (ranges or is_lent) or (context.is_aborted and not inside):
        _held.pop(key, None)
        return
    problem = f"has been there for {_SECONDS_FOR_THREADS:g} s"
    if not threads:
        try:
            for start, length in _apart(ranges):
                context.arena.make_heap_private(start, length, keep=not context.is_aborted)
            return
        except OSError as failure:
            nbytes = sum(length for _, length in ranges)
            problem = f"there is no memory for a copy of its {nbytes} bytes ({failure})"
    called = ", ".join(map(str, context.to_group_ranks(inside)))
    raise DistBackendError(
        f"rank {context.group_rank}: do not use the tensor of the operation of group {context.name!r} that"
        f" failed any more: rank {called} may still use it, and {problem}"
    ) from error


def _own_block(context: RankContext) -> int:
    return context.arena.address + context.arena.control(context.rank)


def _tensors(context: RankContext) -> list[tuple[int, int]]:
    """Return where in the heaps tensors lie that peers write into, each with its bytes."""
    sequence = context.load_word(at.SEQUENCE)
    line = context.arena.address + context.arena.flag_line(context.rank, sequence)
    flag, meta, count, offset = (
        shared_words.load_acquire(line + word) for word in (at.FLAG, at.META, at.COUNT, at.SHARED)
    )
    unit = operations.unit_of(meta)
    if flag >> at.STEP_BITS != sequence or meta & 0xFF not in _WRITTEN_BY_PEERS or meta & at.EAGER:
        return []
    if count * unit <= context.load_word(at.DIRECT) or offset == at.NOT_SHARED:
        return []
    heap = context.rank * context.arena.layout.heap_bytes
    if offset != at.LISTED:
        return [(heap + offset, count * unit)]
    starts, offsets = _listed(context, sequence)
    lengths = (end - start for start, end in pairwise([*starts, count]))
    return [
        (heap + offset, length * unit)
        for offset, length in zip(offsets, lengths, strict=True)
        if offset != at.NOT_SHARED
    ]


def _listed(context: RankContext, sequence: int) -> tuple[list[int], list[int]]:
    """Return for each tensor of a list the index of its first element, and its offset (in_place.py)."""
    slot = context.rank * at.WINDOW + sequence % at.WINDOW
    table = context.arena.address + context.arena.layout.eager_slots + slot * at.EAGER_SLOT_BYTES
    number = shared_words.load_acquire(table)
    words = [shared_words.load_acquire(table + 8 * (1 + word)) for word in range(2 * number)]
    return words[:number], words[number:]


def _apart(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges that have no page in common: a page's copy must not be replaced by another."""
    found: list[tuple[int, int]] = []
    for start, length in sorted(ranges):
        if found and start // at.LARGEST_PAGE <= (sum(found[-1]) - 1) // at.LARGEST_PAGE:
            first, before = found.pop()
            start, length = first, max(first + before, start + length) - first
        found.append((start, length))
    return found


def _inside(context: RankContext) -> list[int]:
    """Return the ranks that may write into this rank's tensor."""
    found = []
    rank = shared_words.next_reader(context.address, 0)
    while rank < context.size:
        found.append(rank)
        rank = shared_words.next_reader(context.address, rank + 1)
    if found and context.peers is not None and not isinstance(context.peers, PeerThreads):
        dead = context.peers.dead()
        found = [rank for rank in found if rank not in dead]
    return found
