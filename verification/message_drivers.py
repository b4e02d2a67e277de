"""Programs of messages and of queues' doorbells, like those of :mod:`verification.drivers`."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine import layout as at
from torchestra.engine.kernels import doorbell, shared_words
from torchestra.engine.native.atomics import (
    compare_exchange,
    load,
    load_acquire,
    load_ordered,
    store,
    store_ordered,
)
from torchestra.engine.p2p import immediate, kernels
from torchestra.engine.p2p import layout as w
from verification.drivers import await_word, driver, expect, fill, look_around, value

CONTEXT, RANK, BUSY, OCCUPIED = w.CONTEXT, w.RANK, w.BUSY, w.OCCUPIED
QUEUEING, ATTENTION = w.QUEUEING, w.ATTENTION
QUEUED_MEANWHILE, INTERRUPTED = w.QUEUED_MEANWHILE, w.INTERRUPTED
LOCK, LEFT_WORD, POSTED = 0, 8, 64
"""Offsets of words that the threads of a rank share: a lock, if something is left, how much was posted."""
CALLER, OTHER = -1, -2  # tokens
PENDING, DONE, ABORTED = at.PENDING, at.DONE, at.ABORTED

run, transfer, send_now, receive_now = (
    kernels.run,
    kernels.transfer,
    immediate.send_now,
    immediate.receive_now,
)
try_acquire, release, call_attention = kernels.try_acquire, kernels.release, kernels.call_attention
increment_and_wake = shared_words.increment_and_wake
ring, close, start_now, await_task = doorbell.ring, doorbell.close, doorbell.start_now, doorbell.await_task
BEGUN, CLOSED, SUBMITTED = doorbell.BEGUN, doorbell.CLOSED, doorbell.SUBMITTED


@driver
def blocking(state, record, sending, tensor, count, peer):
    """Send or receive, and wait until that is done."""
    code = transfer(state, record, sending, tensor, 8 * count, 0, peer, 0)
    while code == PENDING:
        look_around(load(state + CONTEXT))
        code = run(state, record, 1)
    if code == DONE:
        store(state + BUSY, 0)
    return code


@driver
def check_message(tensor, sender, number, count):
    """Compare a message with what its sender sent."""
    for index in range(count):
        expect(load(tensor + 8 * index), value(sender, number, index))


@driver
def stream(state, record, tensor, count, messages):
    """Send messages from rank 0 to rank 1."""
    rank = load(state + RANK)
    for number in range(messages):
        if rank == 0:
            fill(tensor, 0, number, count)
        code = blocking(state, record, rank == 0, tensor, count, 1 - rank)
        if code != DONE:
            return code
        if rank == 1:
            check_message(tensor, 0, number, count)
    return DONE


@driver
def ping_pong(state, record, tensor, count, messages):
    """Send a message to and fro between two ranks."""
    rank = load(state + RANK)
    for number in range(messages):
        sender = number & 1
        if rank == sender:
            fill(tensor, rank, number, count)
        code = blocking(state, record, rank == sender, tensor, count, 1 - rank)
        if code != DONE:
            return code
        if rank != sender:
            check_message(tensor, sender, number, count)
    return DONE


@driver
def at_once(state, record, tensor, count, messages):
    """Send from rank 0 to rank 1; both try without a record first, as short messages do."""
    rank = load(state + RANK)
    for number in range(messages):
        if rank == 0:
            fill(tensor, 0, number, count)
            code = send_now(state, tensor, 8 * count, 0, 1, 0)
        else:
            code = receive_now(state, tensor, 8 * count, 0, 0, 0)
        if code == OCCUPIED:
            code = blocking(state, record, rank == 0, tensor, count, 1 - rank)
        if code != DONE:
            return code
        if rank == 1:
            check_message(tensor, 0, number, count)
    return DONE


@driver
def any_source(state, record, tensor, count, receiver):
    """Send from two ranks to a third, which receives from whichever comes first."""
    rank = load(state + RANK)
    if rank != receiver:
        fill(tensor, rank, 0, count)
        return blocking(state, record, 1, tensor, count, receiver)
    for _ in range(2):
        code = blocking(state, record, 0, tensor, count, -1)
        if code != DONE:
            return code
        check_message(tensor, load(record + w.FROM), 0, count)
    return DONE


@driver
def _lock(words):
    """Take the lock of what threads leave (``_lock`` in progress.py)."""
    while compare_exchange(words + LOCK, 0, 1) != 0:
        pass


@driver
def post_left(state, words):
    """Post what another thread has left, as the thread that has BUSY (Transfers._post_all)."""
    _lock(words)
    left = load_acquire(words + LEFT_WORD)
    store_ordered(words + LEFT_WORD, 0)
    store_ordered(state + QUEUEING, 0)
    store_ordered(words + LOCK, 0)
    if left:
        increment_and_wake(words + POSTED)


@driver
def have_posted(state, words, token):
    """Post what was left, or have the thread do so that has BUSY (Transfers._have_posted)."""
    if try_acquire(state, token):
        post_left(state, words)
        release(state, token)
    else:
        call_attention(state)


@driver
def leave_one(state, words, token):
    """Leave a transfer to whoever works, and wait until it is posted (Transfers._submit)."""
    _lock(words)
    store_ordered(state + QUEUEING, 1)
    store_ordered(words + LEFT_WORD, 1)
    store_ordered(words + LOCK, 0)
    have_posted(state, words, token)
    await_word(words + POSTED, 1)
    return DONE


@driver
def call_beside(state, words, record, tensor, sending):
    """Send or receive by a blocking call, beside another thread that leaves a transfer."""
    fill(tensor, 0, 0, 1)
    code = transfer(state, record, sending, tensor, 8, 0, 1, 0)
    if code == OCCUPIED:  # the product leaves this one as well, and has all posted
        have_posted(state, words, CALLER)
        await_word(words + POSTED, 1)
        while code == OCCUPIED:  # the other thread gives the state back
            code = transfer(state, record, sending, tensor, 8, 0, 1, 0)
    if code == DONE:
        return DONE
    if code != QUEUED_MEANWHILE:
        while code != DONE:
            if code == INTERRUPTED:
                store_ordered(state + ATTENTION, 0)
                post_left(state, words)
            code = run(state, record, 1)
        release(state, record)
        if load_ordered(words + LEFT_WORD) == 0:
            return DONE
    have_posted(state, words, CALLER)
    return DONE


@driver
def call_and_leave(state, words, record, tensor, thread, sending):
    """Be the thread of rank 0 that calls (0), another one, which leaves a transfer (2), or rank 1.

    ``sending``: the call sends to rank 1; else it receives, and rank 1 sends when the transfer is posted.
    """
    if thread == 0:
        return call_beside(state, words, record, tensor, sending)
    if thread == 2:
        return leave_one(state, words, OTHER)
    if not sending:
        await_word(words + POSTED, 1)
        fill(tensor, 1, 0, 1)
    code = blocking(state, record, not sending, tensor, 1, 0)
    if code == DONE and sending:
        check_message(tensor, 0, 0, 1)
    return code


@driver
def queue_and_thread(words, is_thread, tasks, hurries):
    """Submit tasks and close the queue, as the program; begin them all and end, as the thread."""
    if is_thread:
        before = load_acquire(words + BEGUN)
        begun = 0
        while await_task(words):
            begun += 1
            store_ordered(words + BEGUN, before + begun)
        expect(begun >= tasks, 1)
        return DONE
    for _ in range(tasks):
        ring(words)
        if hurries:
            start_now(words)
    close(words)
    return DONE
