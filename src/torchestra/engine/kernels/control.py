"""Single accesses to shared words, for Python code: with the ordering that each needs."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from numba import njit

from torchestra.engine import layout as at
from torchestra.engine.kernels.waiting import (
    EVERYBODY,
    FUTEX,
    FUTEX_WAIT,
    FUTEX_WAKE,
    control_of,
    publish,
    wait_for_step,
)
from torchestra.engine.native.atomics import (
    KERNEL_OPTIONS,
    compare_exchange,
    fetch_add,
    load,
    load_acquire,
    load_ordered,
    store_ordered,
    syscall,
)

SIZE, PATIENCE, ASKED = at.SIZE, at.PATIENCE, at.ASKED
RANK, SEQUENCE, STEP_BITS, ABANDONED = at.RANK, at.SEQUENCE, at.STEP_BITS, at.ABANDONED


@njit(**KERNEL_OPTIONS)
def read(address):
    """The word, with all that was written before it."""
    return load_acquire(address)


@njit(**KERNEL_OPTIONS)
def tell(address, value):
    """Write the word after all that was written before it."""
    store_ordered(address, value)
    return 0


@njit(**KERNEL_OPTIONS)
def claim(address):
    """Make a word 1 that was 0; return what it was."""
    return compare_exchange(address, 0, 1)


@njit(**KERNEL_OPTIONS)
def replace(address, expected, desired):
    """Make a word ``desired`` if it is ``expected``; return what it was."""
    return compare_exchange(address, expected, desired)


@njit(**KERNEL_OPTIONS)
def ask(address):
    """Count a question up and wake who sleeps on it; the number of the question."""
    number = fetch_add(address, 1) + 1
    syscall(FUTEX, address, FUTEX_WAKE, EVERYBODY, 0, 0, 0)
    return number


@njit(**KERNEL_OPTIONS)
def await_question(context, address, answered):
    """Sleep until the word is no longer ``answered``, or for a while; the word."""
    if load_ordered(address) == answered:
        syscall(FUTEX, address, FUTEX_WAIT, answered & 0xFFFF_FFFF, 0, 0, 0)
    return load_acquire(address)


@njit(**KERNEL_OPTIONS)
def wake_everybody(context):
    """Wake every rank that sleeps on any progress word, so that it looks around."""
    for rank in range(load(context + SIZE)):
        word = control_of(context, rank)
        syscall(FUTEX, word, FUTEX_WAKE, EVERYBODY, 0, 0, 0)
        syscall(FUTEX, word + ASKED, FUTEX_WAKE, EVERYBODY, 0, 0, 0)
    return 0


@njit(**KERNEL_OPTIONS)
def next_inside(context, rank):
    """The first rank from ``rank`` on that may be between steps 1 and 2 of this rank's operation, or SIZE."""
    sequence = load(context + SEQUENCE)
    for peer in range(rank, load(context + SIZE)):
        word = control_of(context, peer)
        inside = load_ordered(word) == (sequence << STEP_BITS) + 1
        if inside and peer != load(context + RANK) and load_ordered(word + ABANDONED) != sequence:
            return peer
    return load(context + SIZE)


@njit(**KERNEL_OPTIONS)
def write_to_pages(address, pages, page):
    """Write to each of so many pages what is there already, whoever else writes to them.

    (To add 0 would not do: compilers make a load of it.)
    """
    for number in range(pages):
        word = address + number * page
        found = load(word)
        now = compare_exchange(word, found, found)
        while now != found:
            found = now
            now = compare_exchange(word, found, found)
    return 0


@njit(**KERNEL_OPTIONS)
def publish_step(context, step):
    """:func:`waiting.publish`, for Python."""
    publish(context, step)
    return 0


@njit(**KERNEL_OPTIONS)
def await_step(context, step):
    """:func:`waiting.wait_for_step`, for Python."""
    return wait_for_step(context, step)
