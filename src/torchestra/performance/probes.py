"""Kernels that time parts of operations: flags between ranks, copies and reductions through shared buffers.

They do what the engine's kernels do (engine/kernels/), in the same compiled language, with a clock around
each part. Flags are words in memory that ranks share. Each has one writer, only grows, and is written
(release) after whatever it announces; a rank that has read a value (acquire) may read that. A wait that has
polled MAX_POLLS times returns LOST: a peer is gone.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine.kernels.buffers import copy_out
from torchestra.engine.kernels.waiting import ALL_WAITERS, FUTEX, FUTEX_WAIT, FUTEX_WAKE
from torchestra.engine.native.atomics import (
    call_reduction,
    kernel,
    load,
    load_acquire,
    memcpy,
    process_vm_readv,
    sched_yield,
    spin_hint,
    store,
    store_ordered,
    store_release,
    stream_fence,
    syscall,
)
from torchestra.engine.recorder.clock import read_clock

DONE, LOST = 0, 1
MAX_POLLS = 20_000_000
MOST_SLEEPS = 3  # for one flag: a signal, too, ends a sleep

# The words of an exchange.
OWN_FLAG, NEXT_FLAG, PREVIOUS_FLAG = 0, 8, 16
SPINS = 24  # polls before a wait yields the core
SOURCE, SOURCE_STEP = 32, 40  # copied into the buffer; bytes from one chunk to the next
TARGET, TARGET_BYTES = 48, 56  # where the next rank's buffer goes
BUFFER, NEXT_BUFFER, CHUNK = 64, 72, 80  # shared ones, and their bytes
FUNCTION, POINTERS = 88, 96  # a reduction and room for two addresses; FUNCTION 0: copy
STREAMS = 104  # whether the target is written past the caches
COPY_TICKS, FETCH_TICKS = 112, 120  # addresses: a word for each chunk
CLOCK, SCRATCH = 128, 136  # see clock.py
EXCHANGE_WORDS = 19

# The words of reads of a peer's memory.
READ_TICKS, READ_CLOCK, READ_SCRATCH, IOVECS = 0, 8, 16, 32  # two words of scratch; two iovecs
READ_WORDS = 8

_ITEM_BYTES = 4  # of float32


@kernel
def _wait(flag, target, spins):
    """Wait until a flag is at least ``target``."""
    for attempt in range(MAX_POLLS):
        if load_acquire(flag) >= target:
            return DONE
        if attempt < spins:
            spin_hint()
        else:
            sched_yield()
    return LOST


@kernel
def bounce(own, peer, rounds, begins, spins):
    """Raise the flags of two ranks in turn, ``rounds`` times each; the one that ``begins`` is the first."""
    for step in range(1, rounds + 1):
        if begins:
            store_release(own, step)
        if _wait(peer, step, spins) != DONE:
            return LOST
        if not begins:
            store_release(own, step)
    return DONE


@kernel
def wake(own, peer, rounds, delay, clock, scratch):
    """Wake a rank that runs :func:`sleep`, each time ``delay`` ticks after it says that it will sleep.

    The time at which the flag is raised is written beside the flag.
    """
    for step in range(1, rounds + 1):
        if _wait(peer, step, 0) != DONE:
            return LOST
        until = read_clock(clock, scratch) + delay
        while read_clock(clock, scratch) < until:
            spin_hint()
        store(own + 8, read_clock(clock, scratch))
        store_ordered(own, step)
        syscall(FUTEX, own, FUTEX_WAKE, ALL_WAITERS, 0, 0, 0)
    return DONE


@kernel
def sleep(own, peer, rounds, ticks, clock, scratch, timespec):
    """Sleep until woken by :func:`wake`; into ``ticks``, how long after the flag was raised this rank ran.

    ``timespec`` is the longest sleep. The system may end one earlier, without a reason.
    """
    for step in range(1, rounds + 1):
        store_release(own, step)
        sleeps = 0
        seen = load_acquire(peer)
        while seen < step:
            if sleeps == MOST_SLEEPS:
                return LOST
            syscall(FUTEX, peer, FUTEX_WAIT, seen, timespec, 0, 0)
            sleeps += 1
            seen = load_acquire(peer)
        store(ticks + 8 * (step - 1), read_clock(clock, scratch) - load(peer + 8))
    return DONE


@kernel
def read_peer(words, pid, target, source, length, chunk):
    """Read another process's memory into an own tensor, chunk by chunk; note how long each call took.

    ``length`` is a whole number of chunks. LOST: the system did not let it.
    """
    clock, scratch, iovecs = load(words + READ_CLOCK), words + READ_SCRATCH, words + IOVECS
    store(iovecs + 8, chunk)
    store(iovecs + 24, chunk)
    for number in range(length // chunk):
        store(iovecs, target + number * chunk)
        store(iovecs + 16, source + number * chunk)
        start = read_clock(clock, scratch)
        moved = process_vm_readv(pid, iovecs, 1, iovecs + 16, 1, 0)
        store(load(words + READ_TICKS) + number * 8, read_clock(clock, scratch) - start)
        if moved != chunk:
            return LOST
    return DONE


@kernel
def exchange(words, before):
    """Chunk by chunk, copy a source into the own buffer, then take the next rank's buffer into the target.

    Taking it is a copy, or a reduction of the target and the buffer. The flags were ``before``, and are two
    more for each chunk in the end.
    """
    own, spins, chunk = load(words + OWN_FLAG), load(words + SPINS), load(words + CHUNK)
    clock, scratch = load(words + CLOCK), words + SCRATCH
    pointers, target, end = load(words + POINTERS), load(words + TARGET), load(words + TARGET_BYTES)
    number = 0
    while number * chunk < end:
        length = min(chunk, end - number * chunk)
        start = read_clock(clock, scratch)
        memcpy(load(words + BUFFER), load(words + SOURCE) + number * load(words + SOURCE_STEP), length)
        store(load(words + COPY_TICKS) + number * 8, read_clock(clock, scratch) - start)
        store_release(own, before + 2 * number + 1)
        if _wait(load(words + NEXT_FLAG), before + 2 * number + 1, spins) != DONE:
            return LOST
        place = target + number * chunk
        start = read_clock(clock, scratch)
        if load(words + FUNCTION) == 0:
            copy_out(place, load(words + NEXT_BUFFER), length, load(words + STREAMS))
        else:
            store(pointers, place)
            store(pointers + 8, load(words + NEXT_BUFFER))
            call_reduction(load(words + FUNCTION), place, pointers, 2, length // _ITEM_BYTES)
        store(load(words + FETCH_TICKS) + number * 8, read_clock(clock, scratch) - start)
        store_release(own, before + 2 * number + 2)
        if _wait(load(words + PREVIOUS_FLAG), before + 2 * number + 2, spins) != DONE:
            return LOST
        number += 1
    stream_fence()
    return DONE
