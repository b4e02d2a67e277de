"""Programs of an endpoint's threads, like those of :mod:`verification.drivers`.

A rank's threads share the words of its endpoint. In the product locks of Python (TryLock), taken and given
back under the interpreter's lock, let one of them send to a peer, one lead and one follow; here the words
:data:`LEADS` and :data:`FOLLOWS` do.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine import layout as at
from torchestra.engine.kernels import shared_words
from torchestra.engine.native.atomics import compare_exchange, load, load_acquire, store, store_ordered
from torchestra.engine.p2p import endpoint_kernels
from torchestra.engine.p2p import layout as w
from verification.drivers import await_word, driver, expect, fill, somebody_crashed, value

LEADS, FOLLOWS, RECEIVED, SHORT, ENDED = 0, 64, 128, 136, 192
"""Offsets of words that a rank's threads share: two locks, how many messages have come, and how many of these
in the call that found them, and whether all have.
"""

RANK, TEXT, OUT_BYTES = w.RANK, endpoint_kernels.TEXT, endpoint_kernels.OUT_BYTES
DONE, PENDING, FOUND = at.DONE, at.PENDING, endpoint_kernels.FOUND
ONE_PART = 1 << endpoint_kernels.PARTS_SHIFT

begin_send, continue_send = endpoint_kernels.begin_send, endpoint_kernels.continue_send
receive_now, receive, watch = (
    endpoint_kernels.receive_now,
    endpoint_kernels.receive,
    endpoint_kernels.watch,
)
begin_receive, continue_receive = endpoint_kernels.begin_receive, endpoint_kernels.continue_receive
bring_to_python = endpoint_kernels.bring_to_python
increment_and_wake = shared_words.increment_and_wake


@driver
def send_messages(state, record, tensor, count, messages, peer):
    """Send messages to a peer, as the thread that holds the lock of its queue (Endpoint._push)."""
    for number in range(messages):
        fill(tensor, 0, number, count)
        code = begin_send(state, record, peer, tensor, 8 * count, number, ONE_PART)
        while code != DONE:
            if somebody_crashed():
                return code
            code = continue_send(state, record, peer)
    return DONE


@driver
def check_text(text, number, count):
    """Compare a message with what was sent."""
    for index in range(count):
        expect(load(text + 8 * index), value(0, number, index))


@driver
def receive_one(state, words, received, tensor, count):
    """Receive the next message, as the leader (Endpoint.receive): DONE, FOUND, or why none was received."""
    short = load(words + SHORT)
    code = receive_now(state, short)
    if code == PENDING:
        code = receive(state, 1, short)
    if code == DONE:
        check_text(load(state + TEXT), received, count)
        store(words + SHORT, short + 1)
    elif code == FOUND:
        expect(load(state + OUT_BYTES), 8 * count)
        code = begin_receive(state, 0, tensor, 1)
        while code != DONE:
            if somebody_crashed():
                return code
            code = continue_receive(state, 0)
        check_text(tensor, received, count)
        code = FOUND
    return code


@driver
def lead(state, words, tensor, count, messages):
    """Receive, if no other thread leads, until one has received a message: whether this one has."""
    if compare_exchange(words + LEADS, 0, 1) != 0:
        return -1
    received = load(words + RECEIVED)
    code = PENDING
    if load_acquire(words + ENDED) == 0:
        code = receive_one(state, words, received, tensor, count)
    has_received = code in (DONE, FOUND)
    if has_received:
        store(words + RECEIVED, received + 1)
        if received + 1 == messages:
            increment_and_wake(words + ENDED)
            bring_to_python(state, 1)
    store_ordered(words + LEADS, 0)
    return has_received


@driver
def be_in_pool(state, words, tensor, count, messages, works):
    """Lead or follow until all messages have come (LeaderFollowersPool._serve).

    ``works``: with the first message that this thread receives it is busy to the end.
    """
    while load_acquire(words + ENDED) == 0:
        has_received = lead(state, words, tensor, count, messages)
        if has_received == 1 and works:
            await_word(words + ENDED, 1)
        if has_received == -1 and compare_exchange(words + FOLLOWS, 0, 1) == 0:
            watch(state)
            store_ordered(words + FOLLOWS, 0)
        if somebody_crashed():
            return PENDING
    return DONE


@driver
def calls(state, words, record, tensor, count, messages, receiver, works):
    """Be a thread of rank 0 that sends to a receiver, or (0) one of a pool that receives from rank 0."""
    if receiver != 0:
        return send_messages(state, record, tensor, count, messages, receiver)
    return be_in_pool(state, words, tensor, count, messages, works)
