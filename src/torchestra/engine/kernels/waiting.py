"""Ranks wait for each other: publish and wait, arrival, fingerprint, and how far apart they may be.

The protocol. Every rank has FLAGS lines, which only it writes; operation n has line n modulo FLAGS. The
line's FLAG only grows: n in the upper bits, the step of it that the rank has finished in the lower 24. A rank
publishes a step when everything it wrote for that step is in place (a release at least), and a peer that sees
the value (acquire) may read what was written before it. As the steps of an operation are the same on every
rank, "rank p has finished step s of operation n" is one comparison, and stays true when p has gone on. A rank
begins one operation after the other; so **who has published step 1 of operation n + 1 has finished n, and
reads nothing of it any more**.

The window. Not every operation has everybody wait for everybody (eager.py), so ranks may be some operations
apart. SEEN, of a rank, is the last operation that it has seen all peers begin. A rank that begins operation n
has SEEN >= n - WINDOW + 1 (:func:`enter` waits for it); so what it writes in operation n into a place that
was last used in n - WINDOW or before is read by nobody any more. An operation that uses one of two places, by
parity, asks for SEEN >= n - 1, which it has if the last operation was a meeting of all. Nobody waits in a
circle: of the ranks that are the furthest behind, all others have published what they wait for.

Sleeping. A waiter looks SPINS times, yields the core YIELDS times, then counts itself in the peer's WAITERS
word and sleeps on the lower half of FLAG (a futex). Where other programs compute, each yield may cost a time
slice of theirs, so it yields for LONGEST_YIELDING at most. No wake-up is lost: the waiter does ``WAITERS +=
1; read FLAG``, the publisher ``write FLAG; read WAITERS``, all four sequentially consistent (or with a full
fence between the two), so at least one of the two sees the other's write; and a futex compares the word again
when it goes to sleep. A sequentially consistent store waits for the line to come from the peers' caches. So
small operations only release FLAG (:func:`post`) and have the fence before they first yield, or at their end,
when the line has long come: :func:`wake_sleepers`. A sleep that saw no progress for SLEEP returns
PENDING to Python, which looks at signals, the deadline and the peers' lives and calls the kernel again.

Starting. Between :func:`stop_waiting` and :func:`wait_again` a wait returns PENDING at once, having woken who
sleeps, since this rank may not come back for long. So a kernel with one meeting, called there, either has
published its piece, after which no peer waits for this rank in that operation, or has RESUME at ENTERING. The
rank begins no other operation before it has called the kernel again, to the end, with the same arguments.

The fingerprint. In the line of an operation, beside FLAG, is what the rank was called for: META (with a
digest of the thresholds by which it cuts its work) and COUNT, written before step 1 is published. A rank
compares them with its own before SEEN passes the operation: in the operation, if it waits for all peers
there, else when it begins a later one. FLAGS = 2 WINDOW lines suffice: to write the line of operation j again
a peer has SEEN >= j + WINDOW + 1, so this rank had begun that operation, and compared those up to j + 2
before.

A difference that is found where all ranks wait for all is a MISMATCH, which all of them return. If one
of the ranks did not wait (EAGER), it may be elsewhere: whoever finds it, now or later, returns LATE_MISMATCH.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

import platform

from torchestra.engine import layout as at
from torchestra.engine.kernels.placement import rebalance_sometimes
from torchestra.engine.native.atomics import (
    fetch_add,
    full_fence,
    kernel,
    load,
    load_acquire,
    load_ordered,
    sched_yield,
    spin_hint,
    store,
    store_ordered,
    store_release,
    syscall,
)
from torchestra.engine.recorder.clock import read_coarse_clock
from torchestra.engine.recorder.recorder import begin_wait, close_entry, end_wait, open_entry

FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221}.get(platform.machine(), 98)
FUTEX_WAIT = 0
FUTEX_WAKE = 1
ALL_WAITERS = 0x7FFF_FFFF
LONGEST_YIELDING = 10_000_000  # nanoseconds

CONTROL_BYTES, STEP_BITS = at.CONTROL_BYTES, at.STEP_BITS
RANK, SIZE, CONTROL, ABORT = at.RANK, at.SIZE, at.CONTROL, at.ABORT
HEAPS, HEAP_BYTES, NOT_SHARED = at.HEAPS, at.HEAP_BYTES, at.NOT_SHARED
SEQUENCE, RESUME, BLOCKED, SLEEP = at.SEQUENCE, at.RESUME, at.BLOCKED, at.SLEEP
SPINS, YIELDS, YIELD_TIMESPEC = at.SPINS, at.YIELDS, at.YIELD_TIMESPEC
UNKNOWN = at.UNKNOWN
WAITERS, FLAG_LINES, FLAGS, LINE = at.WAITERS, at.FLAG_LINES, at.FLAGS, at.LINE
META, COUNT, SHARED, LENDS, EAGER = at.META, at.COUNT, at.SHARED, at.LENDS, at.EAGER
SEEN, DIFFERS, WINDOW = at.SEEN, at.DIFFERS, at.WINDOW
THRESHOLDS, HOLDS_INTERPRETER = at.THRESHOLDS, at.HOLDS_INTERPRETER
DONE, PENDING, ABORTED, MISMATCH = at.DONE, at.PENDING, at.ABORTED, at.MISMATCH
LATE_MISMATCH, ENTERING = at.LATE_MISMATCH, at.ENTERING


@kernel
def control_of(context, rank):
    """Return the address of the control block of a rank."""
    return load(context + CONTROL) + rank * CONTROL_BYTES


@kernel
def flag_line(context, rank, sequence):
    """Return the address of a rank's line of an operation, which begins with FLAG."""
    return control_of(context, rank) + FLAG_LINES + (sequence & (FLAGS - 1)) * LINE


@kernel
def current_line(context, rank):
    """Return the address of a rank's line of the current operation."""
    return flag_line(context, rank, load(context + SEQUENCE))


@kernel
def _wake_if_any(context, line):
    if load_ordered(control_of(context, load(context + RANK)) + WAITERS) > 0:
        syscall(FUTEX, line, FUTEX_WAKE, ALL_WAITERS, 0, 0, 0)


@kernel
def publish(context, step):
    """Tell the peers that this rank has finished ``step`` of its current operation."""
    line = current_line(context, load(context + RANK))
    store_ordered(line, (load(context + SEQUENCE) << STEP_BITS) + step)
    _wake_if_any(context, line)


@kernel
def wake_sleepers(context):
    """Wake who sleeps on what this rank has posted. Nobody sleeps through it: the fence is of the proof."""
    full_fence()
    _wake_if_any(context, current_line(context, load(context + RANK)))


@kernel
def wait_until(context, peer, target):
    """Wait until FLAG of ``peer`` is at least ``target``: DONE, PENDING or ABORTED."""
    word = flag_line(context, peer, target >> STEP_BITS)
    if load_acquire(word) >= target:
        return DONE
    for _ in range(load(context + SPINS)):
        spin_hint()
        if load_acquire(word) >= target:
            return DONE
    if load(context + HOLDS_INTERPRETER) != 0:
        wake_sleepers(context)
        store(context + BLOCKED, peer)
        return PENDING
    since = begin_wait(context, peer)
    code = _yield_then_sleep(context, peer, word, target)
    end_wait(context, peer, target, since)
    return code


@kernel
def stop_waiting(context):
    """Have waits return PENDING at once until :func:`wait_again`, which takes what this returns."""
    spins = load(context + SPINS)
    store(context + SPINS, 0)
    store(context + HOLDS_INTERPRETER, 1)
    return spins


@kernel
def wait_again(context, spins):
    """Have waits wait."""
    store(context + HOLDS_INTERPRETER, 0)
    store(context + SPINS, spins)


@kernel
def _yield_then_sleep(context, peer, word, target):
    wake_sleepers(context)
    rebalance_sometimes(context)
    until = read_coarse_clock(context + YIELD_TIMESPEC) + LONGEST_YIELDING
    for _ in range(load(context + YIELDS)):
        sched_yield()
        if load_acquire(word) >= target:
            return DONE
        if read_coarse_clock(context + YIELD_TIMESPEC) > until:
            break
    waiters = control_of(context, peer) + WAITERS
    while True:
        if load_acquire(load(context + ABORT)) != 0:
            store(context + BLOCKED, peer)
            return ABORTED
        fetch_add(waiters, 1)
        seen = load_ordered(word)
        if seen < target:
            syscall(FUTEX, word, FUTEX_WAIT, seen & 0xFFFF_FFFF, load(context + SLEEP), 0, 0)
        fetch_add(waiters, -1)
        now = load_acquire(word)
        if now >= target:
            return DONE
        if now == seen:
            store(context + BLOCKED, peer)
            return PENDING


@kernel
def _wait_for_all(context, target):
    rank = load(context + RANK)
    for peer in range(load(context + SIZE)):
        if peer != rank:
            code = wait_until(context, peer, target)
            if code != DONE:
                return code
    return DONE


@kernel
def wait_for_step(context, step):
    """Wait until every peer has finished ``step`` of the current operation."""
    return _wait_for_all(context, (load(context + SEQUENCE) << STEP_BITS) + step)


@kernel
def begin(context, meta, count, nbytes):
    """Take the next sequence number, and open the record of an operation on ``nbytes``."""
    sequence = load(context + SEQUENCE) + 1
    store(context + SEQUENCE, sequence)
    open_entry(context, sequence, meta, count, nbytes)


@kernel
def enter(context, meta, count, nbytes, apart):
    """Begin an operation, in which the peers may be ``apart`` operations behind: DONE when they are not more.

    To be called, once more after PENDING too, while RESUME is not above 0. ``apart`` is from 1 to WINDOW - 1.
    """
    if load(context + RESUME) != ENTERING:
        begin(context, meta, count, nbytes)
    begun = load(context + SEQUENCE) - apart
    if load(context + SEEN) < begun:
        store(context + RESUME, ENTERING)
        code = _wait_for_all(context, (begun << STEP_BITS) + 1)
        if code == DONE:
            code = _compare_until(context, begun)
        if code == DONE:
            code = _see_more(context)
        if code != DONE:
            return code
        store(context + RESUME, 0)
    return DONE if load_acquire(load(context + ABORT)) == 0 else ABORTED


@kernel
def _see_more(context):
    """Compare the operations that all peers happen to have begun before this one, too."""
    sequence = load(context + SEEN) + 1
    while sequence < load(context + SEQUENCE):
        for peer in range(load(context + SIZE)):
            if load_acquire(flag_line(context, peer, sequence)) <= sequence << STEP_BITS:
                return DONE
        code = _compare_until(context, sequence)
        if code != DONE:
            return code
        sequence += 1
    return DONE


@kernel
def _compare_until(context, last):
    """Compare the fingerprints of operations after SEEN, up to one that all peers have begun."""
    rank = load(context + RANK)
    for sequence in range(load(context + SEEN) + 1, last + 1):
        own = flag_line(context, rank, sequence)
        for peer in range(load(context + SIZE)):
            line = flag_line(context, peer, sequence)
            if load(line + META) != load(own + META) or load(line + COUNT) != load(own + COUNT):
                return differs_late(context, sequence)
        store(context + SEEN, sequence)
    return DONE


@kernel
def differs_late(context, sequence):
    """Return LATE_MISMATCH, in this operation."""
    wake_sleepers(context)
    store(context + DIFFERS, sequence)
    return LATE_MISMATCH


@kernel
def end(context):
    """End the operation: the next call begins another."""
    close_entry(context, load(context + SEQUENCE))
    store(context + RESUME, 0)


@kernel
def end_posted(context):
    """:func:`end` an operation that has only posted its step."""
    wake_sleepers(context)
    end(context)


@kernel
def arrive(context, meta, count, shared):
    """Publish the fingerprint of the operation, where the tensor lies, and step 1."""
    line = current_line(context, load(context + RANK))
    store(line + META, meta + load(context + THRESHOLDS))
    store(line + COUNT, count)
    store(line + SHARED, shared)
    store(line + LENDS, 0)
    publish(context, 1)


@kernel
def post(context, meta, count):
    """:func:`arrive`, where nothing is done in place. :func:`wake_sleepers` must come before the end."""
    line = current_line(context, load(context + RANK))
    store(line + META, meta + load(context + THRESHOLDS))
    store(line + COUNT, count)
    store_release(line, (load(context + SEQUENCE) << STEP_BITS) + 1)


@kernel
def meet(context, meta, count):
    """Wait until every peer has arrived, and compare fingerprints: DONE, or whatever it is instead.

    A count of UNKNOWN is not compared: what belongs to it differs between ranks. Whoever finds the group
    aborted here has come too late: a peer that had arrived may have left again, and its tensors are its own.
    (``publish step 1; read ABORT`` here, ``set ABORT; read FLAG`` in reclaiming.py, all four sequentially
    consistent: so a rank that is not seen to have arrived finds the group aborted. Where step 1 was only
    posted, no rank touches a peer's tensor.)

    MISMATCH is returned only after *everybody* has arrived, so every rank returns it, and the
    next operation finds all ranks at the same sequence number.
    """
    rank = load(context + RANK)
    sequence = load(context + SEQUENCE)
    expected = meta + load(context + THRESHOLDS)
    target = (sequence << STEP_BITS) + 1
    verdict = DONE
    metas = expected
    for peer in range(load(context + SIZE)):
        if peer != rank:
            code = wait_until(context, peer, target)
            if code != DONE:
                return code
            line = flag_line(context, peer, sequence)
            metas = metas | load(line + META)
            if load(line + META) != expected or (count != UNKNOWN and load(line + COUNT) != count):
                verdict = MISMATCH
    if load_ordered(load(context + ABORT)) != 0:
        return ABORTED
    if load(context + SEEN) < sequence - 1:
        code = _compare_until(context, sequence - 1)
        if code != DONE:
            return code
    if verdict == MISMATCH and metas & EAGER:
        return differs_late(context, sequence)
    store(context + SEEN, sequence)
    if verdict != DONE:
        wake_sleepers(context)  # the operation ends here, without end_posted()
    return verdict


@kernel
def await_piece(context, peer, meta, count):
    """Wait until one peer has arrived, where nobody else is needed, and compare its fingerprint.

    What is not DONE is left with RESUME set.
    """
    sequence = load(context + SEQUENCE)
    code = wait_until(context, peer, (sequence << STEP_BITS) + 1)
    if code == DONE:
        line = flag_line(context, peer, sequence)
        if load(line + META) != meta + load(context + THRESHOLDS) or load(line + COUNT) != count:
            code = differs_late(context, sequence)
        elif load(context + SIZE) == 2 and load(context + SEEN) == sequence - 1:
            store(context + SEEN, sequence)
    if code != DONE:
        store(context + RESUME, 1)
    return code


@kernel
def all_count(context, count):
    """Return whether every rank came with this count, after :func:`meet`."""
    for rank in range(load(context + SIZE)):
        line = current_line(context, rank)
        if load(line + COUNT) != count:
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
    """Return whether all ranks have one tensor, which lies in the rank's heap, after :func:`meet`."""
    for rank in range(load(context + SIZE)):
        line = current_line(context, rank)
        if load(line + SHARED) < 0:
            return False
    return True


@kernel
def shared_tensor(context, rank):
    """Return the address, here, of the tensor that ``rank`` called with, when it lies in its heap."""
    offset = load(current_line(context, rank) + SHARED)
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
