"""The programs that ranks run in a model, written as kernels: they call the product's, and check results.

When a kernel returns PENDING, the product checks the peers in Python (RankContext.finish), and aborts the
group if one has died. :func:`look_around` stands for that.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine import layout as at
from torchestra.engine.kernels import exchange, move, prefix, reduce, shared_words
from torchestra.engine.kernels.waiting import stop_waiting, wait_again
from torchestra.engine.native.atomics import load, load_acquire, store, store_ordered
from torchestra.engine.native.declarations import External, KernelSource

ABORT, PLAN_CONTEXT, RANK, SIZE, RESUME = at.ABORT, at.PLAN_CONTEXT, at.RANK, at.SIZE, at.RESUME
TARGETS, TARGET_BYTES, SOURCES, SOURCE_BYTES = at.TARGETS, at.TARGET_BYTES, at.SOURCES, at.SOURCE_BYTES
PENDING, DONE, ABORTED, MISMATCH, LATE_MISMATCH = (
    at.PENDING,
    at.DONE,
    at.ABORTED,
    at.MISMATCH,
    at.LATE_MISMATCH,
)
PLAN_META = at.PLAN_META

all_reduce, all_gather, barrier, broadcast = reduce.all_reduce, move.all_gather, move.barrier, move.broadcast
all_reduce_iovec = reduce.all_reduce_iovec
reduce_scatter_even, all_to_all_even = reduce.reduce_scatter_even, exchange.all_to_all_even
gather, scatter, scan = move.gather, move.scatter, prefix.scan
increment_and_wake, sleep_while = shared_words.increment_and_wake, shared_words.sleep_while

expect = External("expect", "i64", "i64", "i64")
"""Fail unless two words are equal."""
somebody_crashed = External("somebody_crashed", "i64")
"""Return whether a rank has crashed."""


def driver(function):
    """Make a program from a function on words."""
    return KernelSource(function, keeps_interpreter=False)


@driver
def value(rank, operation, index):
    """Return an element that a rank sends: different for every rank, operation and index."""
    return (operation + 1) * 10000 + index * 100 + rank + 1


@driver
def fill(tensor, rank, operation, count):
    """Write the elements that a rank sends."""
    for index in range(count):
        store(tensor + 8 * index, value(rank, operation, index))


@driver
def element(tensor, rest, first, index):
    """Return the address of an element of two tensors taken as one."""
    return tensor + 8 * index if index < first else rest + 8 * (index - first)


@driver
def look_around(context):
    """Abort the group if a rank has crashed; called after PENDING, as in RankContext.finish."""
    if somebody_crashed():
        store_ordered(load(context + ABORT), 1)


@driver
def abort_after(context, code):
    """Abort the group if the ranks are no longer in the same operation, as in RankContext.finish."""
    if code == LATE_MISMATCH:
        store_ordered(load(context + ABORT), 1)
    return code


@driver
def all_reduces(plan, count, tensor, root, operations):
    """Reduce sums into all ranks, or the root."""
    context = load(plan + PLAN_CONTEXT)
    rank = load(context + RANK)
    size = load(context + SIZE)
    for operation in range(operations):
        fill(tensor, rank, operation, count)
        code = all_reduce(plan, count, tensor)
        while code == PENDING:
            look_around(context)
            code = all_reduce(plan, count, tensor)
        if code != DONE:
            return abort_after(context, code)
        if root < 0 or root == rank:
            for index in range(count):
                total = 0
                for peer in range(size):
                    total += value(peer, operation, index)
                expect(load(tensor + 8 * index), total)
    return DONE


@driver
def list_all_reduces(plan, count, tensor, rest, parts, first, operations):
    """Reduce sums of two tensors as one, of ``first`` elements and the rest."""
    context = load(plan + PLAN_CONTEXT)
    rank = load(context + RANK)
    store(parts, 0)
    store(parts + 8, first)
    store(parts + 16, count)
    store(parts + 24, tensor)
    store(parts + 32, rest)
    for operation in range(operations):
        for index in range(count):
            store(element(tensor, rest, first, index), value(rank, operation, index))
        code = all_reduce_iovec(plan, count, parts, 2)
        while code == PENDING:
            look_around(context)
            code = all_reduce_iovec(plan, count, parts, 2)
        if code != DONE:
            return abort_after(context, code)
        for index in range(count):
            total = 0
            for peer in range(load(context + SIZE)):
                total += value(peer, operation, index)
            expect(load(element(tensor, rest, first, index)), total)
    return DONE


@driver
def await_word(word, least):
    """Sleep until a word is at least so much."""
    found = load_acquire(word)
    while found < least:
        found = sleep_while(word, found)


@driver
def started(plan, count, tensor, words, operations):
    """Reduce; rank 0 starts, and ends only when rank 1 has: whoever has started is waited for no more.

    Every second time rank 1 begins when rank 0 has started: whoever starts waits for nobody.
    """
    context = load(plan + PLAN_CONTEXT)
    rank = load(context + RANK)
    for operation in range(operations):
        fill(tensor, rank, operation, count)
        if rank == 0:
            spins = stop_waiting(context)
            code = all_reduce(plan, count, tensor)
            wait_again(context, spins)
            increment_and_wake(words)
            await_word(words + 64, operation + 1)
        elif operation % 2 == 1:
            await_word(words, operation + 1)
        if rank == 1 or code == PENDING:
            code = all_reduce(plan, count, tensor)
        while code == PENDING:
            code = all_reduce(plan, count, tensor)
        if code != DONE:
            return code
        if rank == 1:
            increment_and_wake(words + 64)
        for index in range(count):
            expect(load(tensor + 8 * index), value(0, operation, index) + value(1, operation, index))
    return DONE


@driver
def broadcasts(plan, count, tensor, root, operations):
    """Broadcast from the root."""
    context = load(plan + PLAN_CONTEXT)
    rank = load(context + RANK)
    for operation in range(operations):
        fill(tensor, rank, operation, count)
        code = broadcast(plan, count, tensor)
        while code == PENDING:
            look_around(context)
            code = broadcast(plan, count, tensor)
        if code != DONE:
            return abort_after(context, code)
        for index in range(count):
            expect(load(tensor + 8 * index), value(root, operation, index))
    return DONE


@driver
def all_gathers(plan, count, tensor, output, operations):
    """Gather the pieces of all ranks on all."""
    context = load(plan + PLAN_CONTEXT)
    rank = load(context + RANK)
    for operation in range(operations):
        fill(tensor, rank, operation, count)
        code = all_gather(plan, count, tensor, output)
        while code == PENDING:
            look_around(context)
            code = all_gather(plan, count, tensor, output)
        if code != DONE:
            return abort_after(context, code)
        for peer in range(load(context + SIZE)):
            for index in range(count):
                expect(load(output + 8 * (peer * count + index)), value(peer, operation, index))
    return DONE


@driver
def gathers(plan, count, tensor, output, root, operations):
    """Gather the pieces of all ranks on the root."""
    context = load(plan + PLAN_CONTEXT)
    rank = load(context + RANK)
    for operation in range(operations):
        fill(tensor, rank, operation, count)
        for peer in range(load(context + SIZE)):
            store(load(context + TARGETS) + 8 * peer, output + 8 * peer * count if rank == root else 0)
            store(load(context + TARGET_BYTES) + 8 * peer, 8 * count)
        code = gather(plan, count, tensor)
        while code == PENDING:
            look_around(context)
            code = gather(plan, count, tensor)
        if code != DONE:
            return abort_after(context, code)
        if rank == root:
            for peer in range(load(context + SIZE)):
                for index in range(count):
                    expect(load(output + 8 * (peer * count + index)), value(peer, operation, index))
    return DONE


@driver
def exchanges(plan, count, tensor, output, operations):
    """Send each rank a piece, and receive one from each."""
    context = load(plan + PLAN_CONTEXT)
    rank = load(context + RANK)
    size = load(context + SIZE)
    for operation in range(operations):
        fill(tensor, rank, operation, size * count)
        code = all_to_all_even(plan, 8 * count, tensor, output)
        while code == PENDING:
            look_around(context)
            code = all_to_all_even(plan, 8 * count, tensor, output)
        if code != DONE:
            return abort_after(context, code)
        for peer in range(size):
            for index in range(count):
                expect(
                    load(output + 8 * (peer * count + index)), value(peer, operation, rank * count + index)
                )
    return DONE


@driver
def reduce_scatters(plan, count, tensor, output, operations):
    """Reduce, and leave each rank its piece."""
    context = load(plan + PLAN_CONTEXT)
    rank = load(context + RANK)
    size = load(context + SIZE)
    for operation in range(operations):
        fill(tensor, rank, operation, size * count)
        code = reduce_scatter_even(plan, count, tensor, output)
        while code == PENDING:
            look_around(context)
            code = reduce_scatter_even(plan, count, tensor, output)
        if code != DONE:
            return abort_after(context, code)
        for index in range(count):
            total = 0
            for peer in range(size):
                total += value(peer, operation, rank * count + index)
            expect(load(output + 8 * index), total)
    return DONE


@driver
def barriers(plan, operations):
    """Meet several times."""
    context = load(plan + PLAN_CONTEXT)
    for _ in range(operations):
        code = barrier(plan, 0)
        while code == PENDING:
            look_around(context)
            code = barrier(plan, 0)
        if code != DONE:
            return abort_after(context, code)
    return DONE


@driver
def barriers_with_mismatch(plan, operations, wrong):
    """Meet several times; the second time this rank passes another count, which the others must detect."""
    context = load(plan + PLAN_CONTEXT)
    for operation in range(operations):
        count = wrong if operation == 1 else 0
        code = barrier(plan, count)
        while code == PENDING:
            code = barrier(plan, count)
        expect(code, MISMATCH if operation == 1 else DONE)
        store(context + RESUME, 0)
    return DONE


@driver
def scatters(plan, count, tensor, output, root, operations):
    """Give each rank a piece of the root's."""
    context = load(plan + PLAN_CONTEXT)
    rank = load(context + RANK)
    size = load(context + SIZE)
    for operation in range(operations):
        fill(tensor, rank, operation, size * count)
        for peer in range(size):
            store(load(context + SOURCES) + 8 * peer, tensor + 8 * peer * count)
            store(load(context + SOURCE_BYTES) + 8 * peer, 8 * count if rank == root else 0)
            store(load(context + TARGETS) + 8 * peer, output if peer == root else 0)
            store(load(context + TARGET_BYTES) + 8 * peer, 8 * count if peer == root else 0)
        code = scatter(plan, count, output)
        while code == PENDING:
            look_around(context)
            code = scatter(plan, count, output)
        if code != DONE:
            return abort_after(context, code)
        for index in range(count):
            expect(load(output + 8 * index), value(root, operation, rank * count + index))
    return DONE


@driver
def scans(plan, count, tensor, operations):
    """Reduce, for each rank, the tensors of the ranks up to it."""
    context = load(plan + PLAN_CONTEXT)
    rank = load(context + RANK)
    for operation in range(operations):
        fill(tensor, rank, operation, count)
        code = scan(plan, count, tensor, 1)
        while code == PENDING:
            look_around(context)
            code = scan(plan, count, tensor, 1)
        if code != DONE:
            return abort_after(context, code)
        for index in range(count):
            total = 0
            for peer in range(rank + 1):
                total += value(peer, operation, index)
            expect(load(tensor + 8 * index), total)
    return DONE


@driver
def differing_broadcasts(plan, count, tensor, root, wrong):
    """Broadcast with a count that differs from the other rank's: all detect it, at the latest in the next."""
    context = load(plan + PLAN_CONTEXT)
    rank = load(context + RANK)
    for operation in range(3):
        fill(tensor, rank, operation, count)
        asked = wrong if operation == 1 else count
        code = broadcast(plan, asked, tensor)
        while code == PENDING:
            code = broadcast(plan, asked, tensor)
        if code != DONE:
            expect(code in (LATE_MISMATCH, ABORTED), 1)
            return abort_after(context, code)
    code = barrier(plan, 0)
    while code == PENDING:
        code = barrier(plan, 0)
    expect(code in (LATE_MISMATCH, ABORTED), 1)
    return abort_after(context, code)


@driver
def alternating(plan, reduction, count, tensor, operations):
    """Alternate an all_reduce, in which all meet, with a broadcast from rank 0, whose root does not wait.

    ``plan`` is the broadcast's, ``reduction`` the all_reduce's.
    """
    context = load(plan + PLAN_CONTEXT)
    rank = load(context + RANK)
    for operation in range(operations):
        fill(tensor, rank, operation, count)
        meets = operation % 2 == 0
        code = PENDING
        while code == PENDING:
            if meets:
                code = all_reduce(reduction, count, tensor)
            else:
                code = broadcast(plan, count, tensor)
        if code != DONE:
            return code
        for index in range(count):
            total = value(0, operation, index)
            if meets:
                total += value(1, operation, index)
            expect(load(tensor + 8 * index), total)
    return DONE
