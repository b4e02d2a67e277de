"""How ranks wait for each other: publish and wait, arrival and fingerprint.

The protocol. Every rank has one word, PROGRESS, that only it writes and that only grows: the sequence number
of its current operation in the upper bits, the step it has finished in the lower 24. A rank
publishes a step when everything it wrote for that step is in place (sequentially consistent store, which
is a release), and a peer that sees the value (acquire) may read what was written before it. As the
steps of an operation are the same on every rank, "rank p has finished step s of operation n" is one
comparison, and stays true when p has gone on.

Sleeping. A waiter looks SPINS times, yields the core YIELDS times, then counts itself in the peer's
WAITERS word and sleeps on the lower half of PROGRESS (a futex). Where other programs compute, each yield may
cost a time slice of theirs, so it yields for LONGEST_YIELDING at most. No wake-up is lost: the waiter does
``WAITERS += 1; read PROGRESS``, the publisher ``write PROGRESS; read WAITERS``, all four
sequentially consistent, so at least one of the two sees the other's write; and a futex compares
the word again when it goes to sleep. A sleep that saw no progress for POLL_INTERVAL returns PENDING to
Python, which looks at signals, the deadline and the peers' lives and calls the kernel again.

The fingerprint. Beside PROGRESS a rank keeps, by the parity of the sequence number, what it was called for:
META (with a digest of the thresholds by which it cuts its work) and COUNT. They are written before step 1
is published and compared by every peer when it has seen step 1. Two of each suffice: a rank that has begun
operation n + 2 has seen everybody at step 1 of operation n + 1, so everybody has compared those of
operation n.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

import platform

from torchestra.engine import layout as at
from torchestra.engine.kernels.placement import settle
from torchestra.engine.native.atomics import (
    fetch_add,
    kernel,
    load,
    load_acquire,
    load_ordered,
    sched_yield,
    spin_hint,
    store,
    store_ordered,
    syscall,
)
from torchestra.engine.recorder.clock import read_coarse_clock
from torchestra.engine.recorder.recorder import begin_wait, close_entry, end_wait, open_entry

FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221}.get(platform.machine(), 98)
FUTEX_WAIT = 0
FUTEX_WAKE = 1
EVERYBODY = 0x7FFF_FFFF
LONGEST_YIELDING = 10_000_000  # nanoseconds

CONTROL_BYTES, STEP_BITS = at.CONTROL_BYTES, at.STEP_BITS
RANK, SIZE, CONTROL, ABORT = at.RANK, at.SIZE, at.CONTROL, at.ABORT
HEAPS, HEAP_BYTES, NOT_SHARED = at.HEAPS, at.HEAP_BYTES, at.NOT_SHARED
SEQUENCE, RESUME, BLOCKED, POLL_INTERVAL = at.SEQUENCE, at.RESUME, at.BLOCKED, at.POLL_INTERVAL
SPINS, YIELDS, YIELD_TIMESPEC = at.SPINS, at.YIELDS, at.YIELD_TIMESPEC
UNKNOWN = at.UNKNOWN
META, COUNT, SHARED, WAITERS = at.META, at.COUNT, at.SHARED, at.WAITERS
THRESHOLDS, HOLDS_INTERPRETER = at.THRESHOLDS, at.HOLDS_INTERPRETER
DONE, PENDING, ABORTED, MISMATCH = at.DONE, at.PENDING, at.ABORTED, at.MISMATCH


@kernel
def control_of(context, rank):
    """Return the address of the control block of a rank."""
    return load(context + CONTROL) + rank * CONTROL_BYTES


@kernel
def publish(context, step):
    """Tell the peers that this rank has finished ``step`` of its current operation."""
    word = control_of(context, load(context + RANK))
    store_ordered(word, (load(context + SEQUENCE) << STEP_BITS) + step)
    if load_ordered(word + WAITERS) > 0:
        syscall(FUTEX, word, FUTEX_WAKE, EVERYBODY, 0, 0, 0)


@kernel
def wait_until(context, peer, target):
    """Wait until PROGRESS of ``peer`` is at least ``target``: DONE, PENDING or ABORTED."""
    word = control_of(context, peer)
    if load_acquire(word) >= target:
        return DONE
    for _ in range(load(context + SPINS)):
        spin_hint()
        if load_acquire(word) >= target:
            return DONE
    if load(context + HOLDS_INTERPRETER) != 0:
        store(context + BLOCKED, peer)
        return PENDING
    since = begin_wait(context, peer)
    code = _yield_then_sleep(context, peer, word, target)
    end_wait(context, peer, target, since)
    return code


@kernel
def _yield_then_sleep(context, peer, word, target):
    settle(context)
    until = read_coarse_clock(context + YIELD_TIMESPEC) + LONGEST_YIELDING
    for _ in range(load(context + YIELDS)):
        sched_yield()
        if load_acquire(word) >= target:
            return DONE
        if read_coarse_clock(context + YIELD_TIMESPEC) > until:
            break
    while True:
        if load_acquire(load(context + ABORT)) != 0:
            store(context + BLOCKED, peer)
            return ABORTED
        fetch_add(word + WAITERS, 1)
        seen = load_ordered(word)
        if seen < target:
            syscall(FUTEX, word, FUTEX_WAIT, seen & 0xFFFF_FFFF, load(context + POLL_INTERVAL), 0, 0)
        fetch_add(word + WAITERS, -1)
        now = load_acquire(word)
        if now >= target:
            return DONE
        if now == seen:
            store(context + BLOCKED, peer)
            return PENDING


@kernel
def wait_for_step(context, step):
    """Wait until every peer has finished ``step`` of the current operation."""
    rank = load(context + RANK)
    target = (load(context + SEQUENCE) << STEP_BITS) + step
    for peer in range(load(context + SIZE)):
        if peer != rank:
            code = wait_until(context, peer, target)
            if code != DONE:
                return code
    return DONE


@kernel
def begin(context, meta, count, nbytes):
    """Take the next sequence number, and open the record of an operation on ``nbytes``."""
    sequence = load(context + SEQUENCE) + 1
    store(context + SEQUENCE, sequence)
    open_entry(context, sequence, meta, count, nbytes)


@kernel
def end(context):
    """End the operation: the next call begins another."""
    close_entry(context, load(context + SEQUENCE))
    store(context + RESUME, 0)


@kernel
def arrive(context, meta, count, shared):
    """Publish the fingerprint of the operation, and step 1."""
    parity = (load(context + SEQUENCE) & 1) * 8
    word = control_of(context, load(context + RANK)) + parity
    store(word + META, meta + load(context + THRESHOLDS))
    store(word + COUNT, count)
    store(word + SHARED, shared)
    publish(context, 1)


@kernel
def meet(context, meta, count):
    """Wait until every peer has arrived, and compare fingerprints: DONE, PENDING, ABORTED or MISMATCH.

    A count of UNKNOWN is not compared: what belongs to it differs between ranks. Whoever finds the group
    aborted here has come too late: a peer that had arrived may have left again, and its tensors are its own.
    (``publish step 1; read ABORT`` here, ``set ABORT; read PROGRESS`` in reclaiming.py, all four sequentially
    consistent: so a rank that is not seen to have arrived finds the group aborted.)

    MISMATCH is returned only after *everybody* has arrived, so every rank returns it, and the
    next operation finds all ranks at the same sequence number.
    """
    rank = load(context + RANK)
    sequence = load(context + SEQUENCE)
    expected = meta + load(context + THRESHOLDS)
    target = (sequence << STEP_BITS) + 1
    parity = (sequence & 1) * 8
    verdict = DONE
    for peer in range(load(context + SIZE)):
        if peer != rank:
            code = wait_until(context, peer, target)
            if code != DONE:
                return code
            word = control_of(context, peer) + parity
            if load(word + META) != expected or (count != UNKNOWN and load(word + COUNT) != count):
                verdict = MISMATCH
    return verdict if load_ordered(load(context + ABORT)) == 0 else ABORTED


@kernel
def all_count(context, count):
    """Return whether every rank came with this count, after :func:`meet`."""
    parity = (load(context + SEQUENCE) & 1) * 8
    for rank in range(load(context + SIZE)):
        if load(control_of(context, rank) + parity + COUNT) != count:
            return False
    return True


@kernel
def offset_in_heap(context, address):
    """Return where in this rank's heap an address lies, or NOT_SHARED."""
    length = load_acquire(context + HEAP_BYTES)
    offset = address - (load(context + HEAPS) + load(context + RANK) * length)
    return offset if 0 <= offset < length else NOT_SHARED


@kernel
def everyone_shares(context):
    """Return whether the tensors of all ranks lie in their heaps, after :func:`meet`."""
    parity = (load(context + SEQUENCE) & 1) * 8
    for rank in range(load(context + SIZE)):
        if load(control_of(context, rank) + parity + SHARED) == NOT_SHARED:
            return False
    return True


@kernel
def shared_tensor(context, rank):
    """Return the address, here, of the tensor that ``rank`` called with, when it lies in its heap."""
    parity = (load(context + SEQUENCE) & 1) * 8
    offset = load(control_of(context, rank) + parity + SHARED)
    return load(context + HEAPS) + rank * load(context + HEAP_BYTES) + offset


@kernel
def final_barrier(context):
    """Wait until all ranks have read their peers' tensors in place: the last step of an operation that did.

    ABORTED if the group is, though all may have read: then a peer may have left before this rank had read
    its tensor, and have changed it. That is seen here: ABORT was set before the change (reclaiming.py looks
    at the peers in between, sequentially consistent), and is read after step 2 was published, which is after
    the tensor was read.
    """
    code = wait_for_step(context, 2)
    if code == DONE and load_ordered(load(context + ABORT)) != 0:
        return ABORTED
    return code
