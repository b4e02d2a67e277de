"""Single accesses to shared words, for Python code: with the ordering that each needs."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine import layout as at
from torchestra.engine.kernels.waiting import (
    ALL_WAITERS,
    FUTEX,
    FUTEX_WAIT,
    FUTEX_WAKE,
    control_of,
    current_line,
    flag_line,
    publish,
    wait_for_step,
)
from torchestra.engine.native import atomics
from torchestra.engine.native.atomics import fetch_add, kernel, load, load_ordered, short_kernel, syscall

SIZE, WAITERS, FLAGS, ABORT = at.SIZE, at.WAITERS, at.FLAGS, at.ABORT
RANK, SEQUENCE, STEP_BITS, ABANDONED = at.RANK, at.SEQUENCE, at.STEP_BITS, at.ABANDONED


@short_kernel
def load_acquire(address):
    """Return the word, and see all that was written before it."""
    return atomics.load_acquire(address)


@short_kernel
def load_each(address, stride, count, output):
    """Do :func:`load_acquire` of so many words, ``stride`` bytes apart, in turn, into ``output``."""
    for number in range(count):
        atomics.store(output + 8 * number, atomics.load_acquire(address + number * stride))
    return 0


@short_kernel
def store_ordered(address, value):
    """Write the word after all that was written before it (sequentially consistent)."""
    atomics.store_ordered(address, value)
    return 0


@short_kernel
def compare_exchange(address, expected, desired):
    """Make a word ``desired`` if it is ``expected``; return what it was."""
    return atomics.compare_exchange(address, expected, desired)


@short_kernel
def store_then_load(address, value, other):
    """Write a word, then return another: if two ranks do so crosswise, one sees what the other wrote."""
    atomics.store_ordered(address, value)
    return load_ordered(other)


@kernel
def increment_and_wake(address):
    """Count a word up, wake all that sleep on it, and return it."""
    value = fetch_add(address, 1) + 1
    syscall(FUTEX, address, FUTEX_WAKE, ALL_WAITERS, 0, 0, 0)
    return value


@kernel
def sleep_while(address, value):
    """Sleep until a word is no longer ``value``, or is woken; return it."""
    if load_ordered(address) == value:
        syscall(FUTEX, address, FUTEX_WAIT, value & 0xFFFF_FFFF, 0, 0, 0)
    return atomics.load_acquire(address)


@kernel
def sleep_while_for(address, value, limit):
    """Sleep until a word is no longer ``value``, is woken, or the timespec at ``limit`` has passed."""
    if load_ordered(address) == value:
        syscall(FUTEX, address, FUTEX_WAIT, value & 0xFFFF_FFFF, limit, 0, 0)
    return 0


@kernel
def wake(address):
    """Wake all that sleep on a word."""
    syscall(FUTEX, address, FUTEX_WAKE, ALL_WAITERS, 0, 0, 0)
    return 0


@kernel
def wake_all(context):
    """Wake every rank that sleeps on any flag, so that it looks around."""
    for rank in range(load(context + SIZE)):
        if load_ordered(control_of(context, rank) + WAITERS) > 0:
            for number in range(FLAGS):
                syscall(FUTEX, flag_line(context, rank, number), FUTEX_WAKE, ALL_WAITERS, 0, 0, 0)
    return 0


@kernel
def mark_aborted(context):
    """Make the group unusable for all ranks, and wake them."""
    atomics.store_ordered(load(context + ABORT), 1)
    return wake_all(context)


@kernel
def next_reader(context, rank):
    """Return the first rank from ``rank`` on that may be between this operation's steps 1 and 2, or SIZE."""
    sequence = load(context + SEQUENCE)
    for peer in range(rank, load(context + SIZE)):
        inside = load_ordered(current_line(context, peer)) == (sequence << STEP_BITS) + 1
        abandoned = load_ordered(control_of(context, peer) + ABANDONED)
        if inside and peer != load(context + RANK) and abandoned != sequence:
            return peer
    return load(context + SIZE)


@kernel
def write_to_pages(address, pages, page):
    """Write to each of so many pages what is there already, whoever else writes to them.

    (To add 0 would not do: compilers make a load of it.)
    """
    for number in range(pages):
        word = address + number * page
        found = load(word)
        now = atomics.compare_exchange(word, found, found)
        while now != found:
            found = now
            now = atomics.compare_exchange(word, found, found)
    return 0


@kernel
def publish_step(context, step):
    """:func:`waiting.publish`, for Python."""
    publish(context, step)
    return 0


@kernel
def await_step(context, step):
    """:func:`waiting.wait_for_step`, for Python."""
    return wait_for_step(context, step)
