"""The flight recorder: what every rank did last and how long it waited for whom, in the arena for all to see.

Each rank has a record in the arena (layout.py) with rings of ENTRIES entries, one of collectives and one of
messages, that is written in passing and never read by the rank itself. Number n lies in entry n modulo
ENTRIES. Of collectives, n is the sequence number of the group. Where the group has several hosts, these are
the steps that its operations consist of within this one, and the operations themselves lie in a third ring.
Messages to and from other hosts (message_records.py) lie in a fourth; they and those within the host are
numbered together, so the last ENTRIES of both are always there.

Who writes. A ring has one writer at a time: the thread that runs the rank's collectives, that holds its
mailbox, or that holds the lock of its recorder (multihost/message_recorder.py). Anybody reads at any time,
also when the writer is dead; a reader writes nothing, and no writer waits for readers.

The invariant: *an entry that is seen with the same stamp before and after it was read holds what that number
was written with*. The writer takes the stamp away (0), and everything that it writes afterwards comes after
that (fence); the new stamp comes after everything (release). So whoever reads any word of the new operation
between two looks at the stamp sees another stamp, or none, at the second look (every word is read with
acquire, so that the second look is not done early). Within the life of an entry three words change: WAITED
and AWAITED, and ENDED, which is written last (release).

A wait is written likewise: WAITING_SINCE is its stamp, and WAITING_FOR what is in it (:func:`read_wait`).

Tallies count what has ended, by kind and size class; each word of them has one writer, who also writes the
entries, and grows. What readers sum up from them may be one operation ahead in one word.

What it costs. A collective writes one cache line, adds to another and reads the clock twice, some 25 ns
(clock.py). Waiting is accounted for only when a wait has come to the end of its spinning, where time is no
longer short. A message costs as much on either side, and a third reading of the clock when a receive gets its
message; one between hosts some 1.3 µs, most of them Python's.

An entry of a message is opened when the call is made, and may be gone by the time the message has come: more
than ENTRIES receives can wait at once.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine import layout as at
from torchestra.engine.native.atomics import (
    fetch_add,
    kernel,
    load,
    load_acquire,
    release_fence,
    store,
    store_release,
)
from torchestra.engine.recorder.clock import now

RECORD, OPERATIONS_AT, WAITED_FOR_AT = at.RECORD, at.OPERATIONS_AT, at.WAITED_FOR_AT
ENTRIES, ENTRY_BYTES = at.ENTRIES, at.ENTRY_BYTES
STAMP, BEGAN, ENDED, WHAT, AMOUNT = at.STAMP, at.BEGAN, at.ENDED, at.WHAT, at.AMOUNT
MOVED_BYTES, WAITED, AWAITED = at.MOVED_BYTES, at.WAITED, at.AWAITED
TOTAL_BYTES, TOTAL_WAITED = at.TOTAL_BYTES, at.TOTAL_WAITED
MESSAGES_AT, MESSAGES_OPENED, MESSAGES_BYTES = at.MESSAGES_AT, at.MESSAGES_OPENED, at.MESSAGES_BYTES
MESSAGES_WAITED, BACKGROUND, OTHER, SIZE = at.MESSAGES_WAITED, at.BACKGROUND, at.OTHER, at.SIZE
MULTIHOST_AT, MULTIHOST_NUMBER, MULTIHOST_WAITED = at.MULTIHOST_AT, at.MULTIHOST_NUMBER, at.MULTIHOST_WAITED
MULTIHOST_BYTES = at.MULTIHOST_BYTES
WAITING_SINCE, WAITING_FOR, SEQUENCE = at.WAITING_SINCE, at.WAITING_FOR, at.SEQUENCE
PHASE, PHASE_PEER, PHASE_WAITED, LONGEST = at.PHASE, at.PHASE_PEER, at.PHASE_WAITED, at.LONGEST

TALLIES_AT, MULTIHOST_TALLIES_AT, TALLIED_KINDS = at.TALLIES_AT, at.MULTIHOST_TALLIES_AT, at.TALLIED_KINDS
SIZE_CLASSES, TALLY_BYTES = at.SIZE_CLASSES, at.TALLY_BYTES
TALLY_CALLS, TALLY_MOVED = at.TALLY_CALLS, at.TALLY_MOVED
TALLY_TICKS, TALLY_WAITED = at.TALLY_TICKS, at.TALLY_WAITED
SMALL, MEDIUM, LARGE, HUGE = at.SIZE_CLASS_BOUNDS
KIND_MASK = (1 << 8) - 1

_ATTEMPTS = 8


@kernel
def tally_entry(tallies, entry, moved_bytes, offset, ended):
    """Count the operation of an entry, which ends now, in its tally.

    Args:
        tallies: the address of the table.
        moved_bytes: by it.
        offset: to be added to its kind.
    """
    kind = (load(entry + WHAT) & KIND_MASK) + offset
    if kind >= TALLIED_KINDS:
        kind = TALLIED_KINDS - 1
    size_class = 0
    if moved_bytes > SMALL:
        size_class = 1
        if moved_bytes > MEDIUM:
            size_class = 2
        if moved_bytes > LARGE:
            size_class = 3
        if moved_bytes > HUGE:
            size_class = 4
    own = tallies + (kind * SIZE_CLASSES + size_class) * TALLY_BYTES
    store(own + TALLY_CALLS, load(own + TALLY_CALLS) + 1)
    store(own + TALLY_MOVED, load(own + TALLY_MOVED) + moved_bytes)
    store(own + TALLY_TICKS, load(own + TALLY_TICKS) + ended - load(entry + BEGAN))
    store(own + TALLY_WAITED, load(own + TALLY_WAITED) + load(entry + WAITED))


@kernel
def write_entry(entry, stamp, began, what, amount, moved_bytes, other):
    """Give an entry to another operation or message, which runs from now on."""
    store_release(entry + STAMP, 0)
    release_fence()
    store(entry + BEGAN, began)
    store(entry + ENDED, 0)
    store(entry + WHAT, what)
    store(entry + AMOUNT, amount)
    store(entry + MOVED_BYTES, moved_bytes)
    store(entry + WAITED, 0)
    store(entry + AWAITED, other)
    store_release(entry + STAMP, stamp)


@kernel
def _entry(context, sequence):
    return load(context + RECORD) + OPERATIONS_AT + (sequence & (ENTRIES - 1)) * ENTRY_BYTES


@kernel
def open_entry(context, sequence, what, amount, moved_bytes):
    """Begin a collective."""
    write_entry(_entry(context, sequence), sequence, now(context), what, amount, moved_bytes, 0)


@kernel
def close_entry(context, sequence):
    """End a collective."""
    record = load(context + RECORD)
    entry = _entry(context, sequence)
    store(record + TOTAL_BYTES, load(record + TOTAL_BYTES) + load(entry + MOVED_BYTES))
    ended = now(context)
    tally_entry(record + TALLIES_AT, entry, load(entry + MOVED_BYTES), 0, ended)
    store_release(entry + ENDED, ended)


@kernel
def fail_entry(context):
    """Mark the current collective as left with an error, unless it has ended."""
    entry = _entry(context, load(context + SEQUENCE))
    if load(entry + STAMP) != 0 and load(entry + ENDED) == 0:
        store_release(entry + ENDED, -now(context))
    return 0


@kernel
def begin_wait(context, peer):
    """Begin a wait for ``peer`` that has left its spinning phase; return the time."""
    since = now(context)
    record = load(context + RECORD)
    release_fence()
    store(record + WAITING_FOR, peer)
    store_release(record + WAITING_SINCE, since)
    return since


@kernel
def end_wait(context, peer, target, since):
    """End the wait that began at ``since``, for ``peer`` to get to ``target``, or interrupt it.

    Peers are waited for one after the other. Who is waited for after another, to get to the same point, was
    the later of the two, so the time that the other was waited for is put down to it as well.
    """
    record = load(context + RECORD)
    store_release(record + WAITING_SINCE, 0)
    waited = now(context) - since
    entry = _entry(context, load(context + SEQUENCE))
    if load(entry + WAITED) == 0:
        store(record + LONGEST, 0)
    store(entry + WAITED, load(entry + WAITED) + waited)
    store(record + TOTAL_WAITED, load(record + TOTAL_WAITED) + waited)
    if load(record + PHASE) == target:
        before = load(record + PHASE_WAITED)
        blamed = record + WAITED_FOR_AT + load(record + PHASE_PEER) * 8
        store(blamed, load(blamed) - before)
        waited += before
    blamed = record + WAITED_FOR_AT + peer * 8
    store(blamed, load(blamed) + waited)
    store(record + PHASE, target)
    store(record + PHASE_PEER, peer)
    store(record + PHASE_WAITED, waited)
    if waited >= load(record + LONGEST):
        store(record + LONGEST, waited)
        store(entry + AWAITED, peer + 1)


@kernel
def end_wait_elsewhere(context, since):
    """End a wait for ranks of other hosts, begun by :func:`begin_wait` for -1."""
    record = load(context + RECORD)
    store_release(record + WAITING_SINCE, 0)
    store(record + TOTAL_WAITED, load(record + TOTAL_WAITED) + now(context) - since)
    return 0


@kernel
def open_multihost_entry(context, number, what, amount, moved_bytes):
    """Begin a collective over several hosts."""
    record = load(context + RECORD)
    store(record + MULTIHOST_NUMBER, number)
    store(record + MULTIHOST_WAITED, load(record + TOTAL_WAITED))
    write_entry(_crossing(record), number, now(context), what, amount, moved_bytes, 0)
    return 0


@kernel
def close_multihost_entry(context, well):
    """End the collective over several hosts."""
    record = load(context + RECORD)
    entry = _crossing(record)
    store(entry + WAITED, load(record + TOTAL_WAITED) - load(record + MULTIHOST_WAITED))
    ended = now(context)
    if well:
        store(record + MULTIHOST_BYTES, load(record + MULTIHOST_BYTES) + load(entry + MOVED_BYTES))
        tally_entry(record + MULTIHOST_TALLIES_AT, entry, load(entry + MOVED_BYTES), 0, ended)
    store_release(entry + ENDED, ended if well else -ended)
    return 0


@kernel
def _crossing(record):
    return record + MULTIHOST_AT + (load(record + MULTIHOST_NUMBER) & (ENTRIES - 1)) * ENTRY_BYTES


@kernel
def open_message(context, what, tag, nbytes, other):
    """Begin a send or a receive; return its number."""
    record = load(context + RECORD)
    number = fetch_add(record + MESSAGES_OPENED, 1) + 1
    write_entry(_message(record, number), number, now(context), what, tag, nbytes, other)
    return number


@kernel
def message_came(context, number, source):
    """Note that the message of a receive has come. (Here and below, number 0 is none that is recorded.)"""
    if number == 0:
        return
    record = load(context + RECORD)
    entry = _message(record, number)
    if load(entry + STAMP) == number:
        waited = now(context) - load(entry + BEGAN)
        store(entry + WAITED, waited)
        store(entry + OTHER, source + 1)
        if load(entry + WHAT) & BACKGROUND == 0:
            blamed = record + WAITED_FOR_AT + (load(context + SIZE) + source) * 8
            store(blamed, load(blamed) + waited)
            store(record + MESSAGES_WAITED, load(record + MESSAGES_WAITED) + waited)


@kernel
def close_message(context, number, nbytes, well):
    """End a send or a receive."""
    if number == 0:
        return
    record = load(context + RECORD)
    entry = _message(record, number)
    store(record + MESSAGES_BYTES, load(record + MESSAGES_BYTES) + nbytes)
    if load(entry + STAMP) == number:
        ended = now(context)
        if well:
            tally_entry(record + TALLIES_AT, entry, nbytes, 0, ended)
        store_release(entry + ENDED, ended if well else -ended)


@kernel
def _message(record, number):
    return record + MESSAGES_AT + (number & (ENTRIES - 1)) * ENTRY_BYTES


@kernel
def read_entry(entry, copy):
    """Copy an entry as it was at one moment: its stamp, or 0 if it was being written all the time."""
    for _ in range(_ATTEMPTS):
        stamp = load_acquire(entry + STAMP)
        for offset in range(BEGAN, ENTRY_BYTES, 8):
            store(copy + offset, load_acquire(entry + offset))
        if stamp != 0 and load_acquire(entry + STAMP) == stamp:
            store(copy + STAMP, stamp)
            return stamp
    store(copy + STAMP, 0)
    return 0


@kernel
def read_wait(record, copy):
    """Copy since when a rank has waited, and for whom; return 0 if it does not, or did until just now."""
    since = load_acquire(record + WAITING_SINCE)
    store(copy, since)
    store(copy + 8, load_acquire(record + WAITING_FOR))
    return since != 0 and load_acquire(record + WAITING_SINCE) == since


@kernel
def read_ring(ring, copy):
    """:func:`read_entry` of every entry of a ring."""
    for offset in range(0, ENTRIES * ENTRY_BYTES, ENTRY_BYTES):
        read_entry(ring + offset, copy + offset)
    return 0
