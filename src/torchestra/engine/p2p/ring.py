"""The channels' protocol: how bytes get from one rank to another, and how ranks sleep meanwhile.

A channel has one producer (its source) and one consumer (its destination). A message is a header in the next
of SLOTS slots and, if it is longer than a header can hold, payload in a ring of bytes, in pieces:
the consumer copies piece k out while the producer copies piece k + 1 in, so a message may be longer than the
ring. Each message's payload begins at a multiple of 64 in the ring.

Who writes what. The source writes the slots (STAMP last), the ring and HEAD; the destination writes
TAKEN and TAIL. HEAD, TAIL, TAKEN and the stamps only grow. The invariant, at every moment::

    TAIL <= HEAD <= TAIL + ring        TAKEN <= messages sent <= TAKEN + SLOTS

and the bytes (slots) between the two belong to the destination, the others to the source. A slot changes
hands when its STAMP becomes the number of the message, which no earlier message in that slot had; the
header says how many bytes of payload (READY) change hands with it, the rest do with HEAD.

Why the orderings suffice. Bytes are written, then STAMP or HEAD is stored (a release); the destination loads
it (acquire) and then reads the bytes. The destination reads the bytes, then stores TAIL or TAKEN (release);
the source loads it (acquire) and then overwrites them. Nothing else is shared but the doorbells.

Sleeping. A rank sleeps on its own doorbell, and is woken by whoever published something in one of its
channels. The sleeper does ``look at RUNG; SLEEPING = 1; look at its channels; sleep if RUNG is unchanged``, a
peer ``publish; look at SLEEPING``. Between the store of SLEEPING and the look at the channels there is a
sequentially consistent fence, and between the two of the peer as well (or its store is sequentially
consistent), so at least one of them sees what the other wrote. After each of several pieces a peer looks
without a fence, which would wait for the copy to reach the cache, and once more with one before it does
anything else. Whoever takes SLEEPING down (compare and exchange) rings: RUNG += 1, and wakes. A peer that
finds it taken down need not ring: as RUNG was looked at before SLEEPING was set, it changes before the
sleeper sleeps, or wakes it, and the sleeper will look at its channels again. What a sleep misses because a
peer was killed between the two is made good when POLL_INTERVAL is over.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine.kernels.buffers import copy_out
from torchestra.engine.kernels.waiting import FUTEX, FUTEX_WAIT, FUTEX_WAKE
from torchestra.engine.layout import POLL_INTERVAL
from torchestra.engine.native.atomics import (
    compare_exchange,
    fetch_add,
    full_fence,
    kernel,
    load,
    load_acquire,
    load_ordered,
    memcpy,
    store,
    store_ordered,
    store_release,
    syscall,
)
from torchestra.engine.p2p import layout as w

PIECES_AT_ONCE = 8


@kernel
def channel_of(state, source, destination):
    """Return the address of a channel."""
    number = source * load(state + w.SIZE) + destination
    return load(state + w.CHANNELS) + number * load(state + w.CHANNEL_BYTES)


@kernel
def peer_of(state, peer):
    """Return what this mailbox knows of a peer."""
    return state + w.PEERS_AT + peer * w.PEER_BYTES


@kernel
def ring_doorbell(state, rank):
    """Wake ``rank`` if it is seen to sleep."""
    doorbell = load(state + w.DOORBELLS) + rank * w.DOORBELL_BYTES
    if load_ordered(doorbell + w.SLEEPING) == 1 and compare_exchange(doorbell + w.SLEEPING, 1, 0) == 1:
        fetch_add(doorbell + w.RUNG, 1)
        syscall(FUTEX, doorbell + w.RUNG, FUTEX_WAKE, 1, 0, 0, 0)


@kernel
def prepare_sleep(state):
    """Announce that this rank is about to sleep; it must look at its channels once more before it does."""
    doorbell = load(state + w.DOORBELLS) + load(state + w.RANK) * w.DOORBELL_BYTES
    rung = load_ordered(doorbell + w.RUNG)
    store_ordered(doorbell + w.SLEEPING, 1)
    full_fence()
    return rung


@kernel
def sleep(state, rung):
    """Sleep until the doorbell has rung since :func:`prepare_sleep`, POLL_INTERVAL at most."""
    doorbell = load(state + w.DOORBELLS) + load(state + w.RANK) * w.DOORBELL_BYTES
    interval = load(load(state + w.CONTEXT) + POLL_INTERVAL)
    syscall(FUTEX, doorbell + w.RUNG, FUTEX_WAIT, rung & 0xFFFF_FFFF, interval, 0, 0)


@kernel
def wake_up(state):
    """Say that this rank does not sleep."""
    store_ordered(load(state + w.DOORBELLS) + load(state + w.RANK) * w.DOORBELL_BYTES + w.SLEEPING, 0)


@kernel
def _put_piece(state, known, channel, record, limit):
    """Copy the next piece of a message into the ring if there is room for all of it: how many bytes."""
    ring = load(state + w.RING_BYTES)
    moved = load(record + w.MOVED)
    head = load(known + w.SENT_BYTES)
    offset = head & (ring - 1)
    length = min(limit, load(record + w.LENGTH) - moved, ring - offset)
    if head + length - load(known + w.SEEN_TAIL) > ring:
        store(known + w.SEEN_TAIL, load_acquire(channel + w.TAIL))
        if head + length - load(known + w.SEEN_TAIL) > ring:
            return 0
    memcpy(channel + w.DATA_AT + offset, load(record + w.ADDRESS) + moved, length)
    store(known + w.SENT_BYTES, head + ((length + 63) & ~63))
    store(record + w.MOVED, moved + length)
    return length


@kernel
def put_header(state, known, channel, record):
    """Publish the header of a message, with the first piece of the payload: whether there was room."""
    sent = load(known + w.SENT)
    if sent - load(known + w.SEEN_TAKEN) >= w.SLOTS:
        store(known + w.SEEN_TAKEN, load_acquire(channel + w.TAKEN))
        if sent - load(known + w.SEEN_TAKEN) >= w.SLOTS:
            return False
    slot = channel + w.SLOTS_AT + (sent & (w.SLOTS - 1)) * w.SLOT_BYTES
    length = load(record + w.LENGTH)
    if length <= w.INLINE_BYTES:
        memcpy(slot + w.INLINE, load(record + w.ADDRESS), length)
        store(record + w.MOVED, length)
    else:
        # A small first piece, so that the peer begins to copy early.
        ready = _put_piece(state, known, channel, record, load(state + w.PIECE_BYTES) >> 2)
        if ready == 0:
            return False
        store(slot + w.READY, ready)
    store(slot + w.MESSAGE_TAG, load(record + w.TAG))
    store(slot + w.MESSAGE_BYTES, length)
    store(slot + w.MESSAGE_KIND, load(record + w.KIND))
    store(known + w.SENT, sent + 1)
    store(record + w.STAGE, w.RUNNING)
    if load(record + w.MOVED) == length:
        store_ordered(slot + w.STAMP, sent + 1)
    else:
        store_release(slot + w.STAMP, sent + 1)
    return True


@kernel
def put(state, peer, record):
    """Send some more of a message, PIECES_AT_ONCE pieces at most: whether anything was sent."""
    known = peer_of(state, peer)
    channel = channel_of(state, load(state + w.RANK), peer)
    length = load(record + w.LENGTH)
    sent = False
    if load(record + w.STAGE) != w.RUNNING:
        if not put_header(state, known, channel, record):
            return False
        ring_doorbell(state, peer)
        if load(record + w.MOVED) == length:
            return True
        sent = True
    largest = load(state + w.PIECE_BYTES)
    limit = min(largest, max(largest >> 2, (length >> 3) & ~63))
    for _ in range(PIECES_AT_ONCE):
        if load(record + w.MOVED) == length or _put_piece(state, known, channel, record, limit) == 0:
            break
        store_release(channel + w.HEAD, load(known + w.SENT_BYTES))
        ring_doorbell(state, peer)
        sent = True
    if sent:
        full_fence()
        ring_doorbell(state, peer)
    return sent


@kernel
def next_header(state, peer):
    """Return the address of the header of the next message from ``peer``, or 0 if it has not come."""
    got = load(peer_of(state, peer) + w.GOT)
    channel = channel_of(state, peer, load(state + w.RANK))
    slot = channel + w.SLOTS_AT + (got & (w.SLOTS - 1)) * w.SLOT_BYTES
    return slot if load_acquire(slot + w.STAMP) == got + 1 else 0


@kernel
def take_header(state, peer, header, destination):
    """Give the slot of a header back, and prepare to take its payload to ``destination`` (0: to nowhere)."""
    known = peer_of(state, peer)
    channel = channel_of(state, peer, load(state + w.RANK))
    length = load(header + w.MESSAGE_BYTES)
    got = load(known + w.GOT) + 1
    store(known + w.GOT, got)
    if length <= w.INLINE_BYTES:
        if destination != 0:
            memcpy(destination, header + w.INLINE, length)
        store(known + w.LEFT, 0)
        store_ordered(channel + w.TAKEN, got)
        ring_doorbell(state, peer)
    else:
        store(known + w.LEFT, length)
        store(known + w.PRESENT, load(header + w.READY))
        store(known + w.DESTINATION, destination)
        # No doorbell: a piece is there, and when it has been taken the doorbell is rung.
        store_release(channel + w.TAKEN, got)


@kernel
def take(state, peer, stream):
    """Take some more of a message, PIECES_AT_ONCE pieces at most: whether anything was taken."""
    known = peer_of(state, peer)
    channel = channel_of(state, peer, load(state + w.RANK))
    ring = load(state + w.RING_BYTES)
    taken = False
    for _ in range(PIECES_AT_ONCE):
        left = load(known + w.LEFT)
        tail = load(known + w.GOT_BYTES)
        present = load(known + w.PRESENT)
        if left > 0 and present <= 0:
            present = load_acquire(channel + w.HEAD) - tail
        if left == 0 or present <= 0:
            break
        offset = tail & (ring - 1)
        length = min(load(state + w.PIECE_BYTES), left, present, ring - offset)
        destination = load(known + w.DESTINATION)
        if destination != 0:
            copy_out(destination, channel + w.DATA_AT + offset, length, stream)
            store(known + w.DESTINATION, destination + length)
        tail += (length + 63) & ~63
        store(known + w.LEFT, left - length)
        store(known + w.PRESENT, present - length)
        store(known + w.GOT_BYTES, tail)
        store_release(channel + w.TAIL, tail)
        ring_doorbell(state, peer)
        taken = True
    if taken:
        full_fence()
        ring_doorbell(state, peer)
    return taken
