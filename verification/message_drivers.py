"""Programs of messages and of queues' doorbells, like those of :mod:`verification.drivers`."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine import layout as at
from torchestra.engine.kernels import doorbell
from torchestra.engine.native.atomics import load, load_acquire, store, store_ordered
from torchestra.engine.p2p import immediate, kernels
from torchestra.engine.p2p import layout as w
from verification.drivers import driver, expect, fill, look_around, value

CONTEXT, RANK, BUSY, OCCUPIED = w.CONTEXT, w.RANK, w.BUSY, w.OCCUPIED
PENDING, DONE, ABORTED = at.PENDING, at.DONE, at.ABORTED

run, transfer, send_now, receive_now = (
    kernels.run,
    kernels.transfer,
    immediate.send_now,
    immediate.receive_now,
)
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
