"""Ranks read their peers' tensors where they lie: one copy, where a way through a buffer takes two.

How: ranks that are threads by an ordinary copy; ranks that are processes by ``process_vm_readv``, which MPIs
call cross-memory attach. Whether a process may do that (PID namespaces, Yama, seccomp) and whether it is
faster depend on the system and the machine: the kernel pins and maps every page. So a rank probes both in its
first operation that could be read so.

The protocol. An operation whose pieces are longer than SINGLE_COPY begins with no copy: each rank *lends* its
tensor. It publishes where it lies, and whether it is ABLE to read those of the others, with step 1. If at the
meeting all ranks have lent and are able, each reads what it wants, publishes step 2 and waits until all have:
until then nobody changes its tensor. If not, all find the same in the same lines: they go on through the
buffers, one step later (EXTRA_STEP), and if one was not able, no rank lends in this group any more (REFUSED).

Whose memory it is. A number of a process may be another's by the time it is used. So each rank has a random
token in its own memory, and one call reads the token of the peer and then its tensor: what comes without the
right token counts as not read. A rank that has died cannot be read; whoever finds that returns UNREADABLE,
and Python finds out why. A rank lends memory of its own only if it can read both ends of it by the same call:
that of some devices cannot be, and is refused before anything depends on it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine import layout as at
from torchestra.engine.kernels.buffers import copy_out
from torchestra.engine.kernels.waiting import control_of, current_line, offset_in_heap, publish
from torchestra.engine.native.atomics import External, kernel, load, memcpy, process_vm_readv, store
from torchestra.engine.recorder.clock import NANOSECONDS, read_clock

RANK, SIZE, SEQUENCE, RESUME, BLOCKED = at.RANK, at.SIZE, at.SEQUENCE, at.RESUME, at.BLOCKED
THRESHOLDS, SINGLE_COPY, READER, VERDICT = at.THRESHOLDS, at.SINGLE_COPY, at.READER, at.VERDICT
IOVECS, FOUND_TOKEN, FOUND_BYTES, LENT = at.IOVECS, at.FOUND_TOKEN, at.FOUND_BYTES, at.LENT
EXTRA_STEP, HEAPS, HEAP_BYTES, NOT_SHARED = at.EXTRA_STEP, at.HEAPS, at.HEAP_BYTES, at.NOT_SHARED
PROCESS, TOKEN, TOKEN_ADDRESS = at.PROCESS, at.TOKEN, at.TOKEN_ADDRESS
META, COUNT, SHARED, LENDS, HEAP_START, ADDRESS = (
    at.META,
    at.COUNT,
    at.SHARED,
    at.LENDS,
    at.HEAP_START,
    at.ADDRESS,
)
ABLE, NOT_ABLE = at.ABLE, at.NOT_ABLE
UNPROBED, BY_SYSTEM_CALL, BY_ADDRESS, CANNOT, REFUSED = (
    at.UNPROBED,
    at.BY_SYSTEM_CALL,
    at.BY_ADDRESS,
    at.CANNOT,
    at.REFUSED,
)
UNREADABLE = at.UNREADABLE

NOBODY, SOME, ALL = 0, 1, 2
FASTER, SLOWER = 1, 2

_PROBED_BYTES = 1 << 20
_PART = 1 << 17
_TURNS = 4
_NEVER = 1 << 62
_malloc = External("malloc", "i64", "i64")
_free = External("free", "void", "i64")
_memset = External("memset", "i64", "i64", "i64", "i64")


@kernel
def lends(context, longest):
    """Return whether an operation is to be read where it lies, whose longest piece has so many bytes."""
    return longest > load(context + SINGLE_COPY) and load(context + READER) != REFUSED


@kernel
def pays_to_share(context, least, stream):
    """Return whether it is worth it to lend tensors that several ranks may read.

    With many readers one copy in a buffer serves them all, and costs less than that each has the system pin
    the same pages. In a broadcast or gather both sides copy at once.

    Args:
        least: the bytes of the shortest piece that a rank offers to all.
        stream: whether results would be written past the caches.
    """
    return load(context + READER) == BY_ADDRESS or (load(context + SIZE) == 2 and least > 0 and not stream)


@kernel
def has_lent(context):
    """Return whether this rank has lent its tensor in the operation that it is in."""
    return load(context + RESUME) > 0 and load(context + LENT) == load(context + SEQUENCE)


@kernel
def lend(context, meta, count, address, readable, heap_start):
    """Publish step 1, and where the tensor lies.

    Args:
        address: of the tensor, or 0 where other words tell.
        readable: whether this rank has found its own tensor readable.
        heap_start: the address, here, of this rank's heap, if the tensor lies there; else 0.
    """
    line = current_line(context, load(context + RANK))
    store(line + META, meta + load(context + THRESHOLDS))
    store(line + COUNT, count)
    store(line + SHARED, NOT_SHARED)
    store(line + LENDS, ABLE if readable and _is_able(context) else NOT_ABLE)
    store(line + HEAP_START, heap_start)
    store(line + ADDRESS, address)
    store(context + LENT, load(context + SEQUENCE))
    publish(context, 1)


@kernel
def lend_tensor(context, meta, count, address, length):
    """:func:`lend` one tensor of ``length`` bytes."""
    lend(context, meta, count, address, is_readable(context, address, length), heap_of(context, address))


@kernel
def heap_of(context, address):
    """Return the address, here, of this rank's heap if ``address`` lies in it, else 0."""
    if offset_in_heap(context, address) == NOT_SHARED:
        return 0
    return load(context + HEAPS) + load(context + RANK) * load(context + HEAP_BYTES)


@kernel
def lenders(context):
    """Return which ranks have lent, after the meeting: ALL if all have and are able, or SOME, or NOBODY.

    After SOME the operation has one more step, and if one was not able, no rank lends any more.
    """
    size = load(context + SIZE)
    lent = 0
    unable = 0
    for rank in range(size):
        found = load(current_line(context, rank) + LENDS)
        if found != 0:
            lent += 1
        if found == NOT_ABLE:
            unable += 1
    if lent == 0:
        return NOBODY
    if lent == size and unable == 0:
        return ALL
    if unable > 0:
        store(context + READER, REFUSED)
    store(context + EXTRA_STEP, 1)
    return SOME


@kernel
def fetch(context, peer, target, address, length, stream):
    """Copy ``length`` bytes that lie at an address of a peer; return whether it could be done."""
    start = load(current_line(context, peer) + HEAP_START)
    heap_bytes = load(context + HEAP_BYTES)
    if load(context + READER) == BY_ADDRESS:
        copy_out(target, address, length, stream)
    elif start != 0 and heap_bytes != 0:
        copy_out(target, load(context + HEAPS) + peer * heap_bytes + address - start, length, stream)
    else:
        return _read(context, peer, target, address, length)
    return True


@kernel
def unreadable(context, peer):
    """Return UNREADABLE, because of this peer."""
    store(context + BLOCKED, peer)
    store(context + RESUME, 1)
    return UNREADABLE


@kernel
def is_readable(context, address, length):
    """Return whether this rank's own tensor can be read as peers would: its first and its last byte."""
    if load(context + READER) == BY_ADDRESS or length == 0:
        return True
    iovecs = context + IOVECS
    store(iovecs, context + FOUND_BYTES)
    store(iovecs + 8, 2)
    store(iovecs + 16, address)
    store(iovecs + 24, 1)
    store(iovecs + 32, address + length - 1)
    store(iovecs + 40, 1)
    own = load(control_of(context, load(context + RANK)) + PROCESS)
    return process_vm_readv(own, iovecs, 1, iovecs + 16, 2, 0) == 2


@kernel
def _read(context, peer, target, address, length):
    """Copy from a peer's process, with a proof that it is the peer's; return whether it could be done."""
    control = control_of(context, peer)
    iovecs = context + IOVECS
    done = 0
    while True:
        store(context + FOUND_TOKEN, 0)
        store(iovecs, context + FOUND_TOKEN)
        store(iovecs + 8, 8)
        store(iovecs + 16, target + done)
        store(iovecs + 24, length - done)
        store(iovecs + 32, load(control + TOKEN_ADDRESS))
        store(iovecs + 40, 8)
        store(iovecs + 48, address + done)
        store(iovecs + 56, length - done)
        moved = process_vm_readv(load(control + PROCESS), iovecs, 2, iovecs + 32, 2, 0) - 8
        if moved < 0 or load(context + FOUND_TOKEN) != load(control + TOKEN):
            return False
        done += moved
        if done >= length:
            return True
        if moved == 0:
            return False


@kernel
def _is_able(context):
    """Return whether this rank can read its peers' memory, and is faster so; probed once."""
    if load(context + READER) == UNPROBED:
        store(context + READER, BY_SYSTEM_CALL if _may_read(context) and _is_faster(context) else CANNOT)
    return load(context + READER) != CANNOT


@kernel
def _may_read(context):
    """Return whether the system lets this rank read the memory of all peers."""
    for peer in range(load(context + SIZE)):
        if not _read(context, peer, context + FOUND_BYTES, load(context + IOVECS), 0):
            return False
    return True


@kernel
def _is_faster(context):
    """Return whether one call takes less time here than two copies through a buffer; timed once a process."""
    verdict = load(context + VERDICT)
    if load(verdict) == 0:
        store(verdict, FASTER if _time_copies(context) else SLOWER)
    return load(verdict) == FASTER


@kernel
def _time_copies(context):
    """Compare both ways within this rank.

    Among ranks the buffer comes out of another core's cache, for which the copies are given a quarter more.
    """
    source = _malloc(2 * _PROBED_BYTES + _PART)
    if source == 0:
        return False
    target = source + _PROBED_BYTES
    buffer = target + _PROBED_BYTES
    _memset(source, 1, 2 * _PROBED_BYTES + _PART)
    rank = load(context + RANK)
    clock = context + IOVECS
    call = _NEVER
    copies = _NEVER
    for _ in range(_TURNS):
        began = read_clock(NANOSECONDS, clock)
        for offset in range(0, _PROBED_BYTES, _PART):
            memcpy(buffer, source + offset, _PART)
            memcpy(target + offset, buffer, _PART)
        between = read_clock(NANOSECONDS, clock)
        if not _read(context, rank, target, source, _PROBED_BYTES):
            between = -_NEVER
        copies = min(copies, between - began)
        call = min(call, read_clock(NANOSECONDS, clock) - between)
    _free(source)
    return 4 * call < 5 * copies
