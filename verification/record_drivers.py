"""Programs that write flight records and read those of others while they are written.

Numbers of operations are so far apart that all lie in one entry of a ring. The clock counts how often a rank
has looked at it. What is written tells by which operation, so that a mixture of two is seen.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine import layout as at
from torchestra.engine.kernels import move
from torchestra.engine.native.atomics import load, store
from torchestra.engine.recorder import recorder
from verification.drivers import driver, expect, look_around

STAMP, BEGAN, ENDED, WHAT, AMOUNT = at.STAMP, at.BEGAN, at.ENDED, at.WHAT, at.AMOUNT
MOVED_BYTES, WAITED, AWAITED, ENTRIES = at.MOVED_BYTES, at.WAITED, at.AWAITED, at.ENTRIES
ENTRY_BYTES = at.ENTRY_BYTES
RANK, SEQUENCE, RECORD, OPERATIONS_AT = at.RANK, at.SEQUENCE, at.RECORD, at.OPERATIONS_AT
MESSAGES_AT, MESSAGES_OPENED, OTHER = at.MESSAGES_AT, at.MESSAGES_OPENED, at.OTHER
PLAN_CONTEXT, PENDING, DONE = at.PLAN_CONTEXT, at.PENDING, at.DONE

open_entry, close_entry = recorder.open_entry, recorder.close_entry
begin_wait, end_wait, read_wait = recorder.begin_wait, recorder.end_wait, recorder.read_wait
open_message, message_came = recorder.open_message, recorder.message_came
close_message, read_entry = recorder.close_message, recorder.read_entry
barrier = move.barrier


@driver
def check_entry(stamp, copy):
    """Check that all that was read of a collective is of one: the operations that :func:`collectives` has."""
    number = (stamp - 1) // ENTRIES
    before = number * number + 3 * number
    expect(load(copy + STAMP), stamp)
    expect(load(copy + WHAT), stamp)
    expect(load(copy + AMOUNT), stamp * 2)
    expect(load(copy + MOVED_BYTES), stamp * 3)
    expect(load(copy + BEGAN), before + 1)
    if load(copy + ENDED) != 0:
        expect(load(copy + ENDED), before + 2 * number + 4)
        expect(load(copy + WAITED), number + 1)
        expect(load(copy + AWAITED), 2)
    expect(load(copy + WAITED) <= number + 1, 1)


@driver
def collectives(context, entry, copy, operations, reads):
    """Record operations as rank 0, each with one wait more than the one before; read them as another."""
    if load(context + RANK) != 0:
        newest = 0
        for _ in range(reads):
            stamp = read_entry(entry, copy)
            if stamp != 0:
                expect(stamp >= newest, 1)
                newest = stamp
                check_entry(stamp, copy)
        return DONE
    for number in range(operations):
        sequence = 1 + number * ENTRIES
        store(context + SEQUENCE, sequence)
        open_entry(context, sequence, sequence, sequence * 2, sequence * 3)
        for _ in range(number + 1):
            since = begin_wait(context, 1)
            end_wait(context, 1, sequence, since)
        close_entry(context, sequence)
    return DONE


@driver
def waits(context, record, copy, number, reads):
    """Wait for ranks 0, 1 and so on as rank 0; read for whom it waits, and since when, as another."""
    if load(context + RANK) != 0:
        for _ in range(reads):
            if read_wait(record, copy) != 0:
                expect(load(copy), 2 * load(copy + 8) + 1)
        return DONE
    for peer in range(number):
        since = begin_wait(context, peer)
        end_wait(context, peer, 1, since)
    return DONE


@driver
def skip_entries(context):
    """Have the next message use the same entry."""
    opened = load(context + RECORD) + MESSAGES_OPENED
    store(opened, load(opened) + ENTRIES - 1)


@driver
def messages(context, entry, copy, unused, reads):
    """Record two receives, of which the second uses the entry while the first waits; read as another."""
    if load(context + RANK) != 0:
        for _ in range(reads):
            stamp = read_entry(entry, copy)
            if stamp != 0:
                expect(load(copy + AMOUNT), stamp * 2)
                expect(load(copy + MOVED_BYTES), stamp * 3)
                expect(load(copy + BEGAN), (stamp - 1) // ENTRIES + 1)
                if load(copy + ENDED) != 0:
                    expect(load(copy + ENDED), 4)
                    expect(load(copy + OTHER), 2)
        return DONE
    first = open_message(context, at.RECEIVED, 2, 3, 0)
    skip_entries(context)
    second = open_message(context, at.RECEIVED, (1 + ENTRIES) * 2, (1 + ENTRIES) * 3, 0)
    message_came(context, first, 2)
    close_message(context, first, 8, 1)
    message_came(context, second, 1)
    close_message(context, second, 8, 1)
    return DONE


@driver
def recorded_barriers(plan, peer, copy, operations):
    """Meet, then read the other's record: it is of this operation, or of a later one."""
    context = load(plan + PLAN_CONTEXT)
    for _ in range(operations):
        code = barrier(plan, 0)
        while code == PENDING:
            look_around(context)
            code = barrier(plan, 0)
        if code != DONE:
            return code
        sequence = load(context + SEQUENCE)
        entry = peer + OPERATIONS_AT + (sequence & (ENTRIES - 1)) * ENTRY_BYTES
        stamp = read_entry(entry, copy)
        expect(stamp, sequence)
    return DONE
