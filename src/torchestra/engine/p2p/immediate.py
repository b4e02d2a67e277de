"""Sends and receives that need not wait, as most short ones do: no record, no queue, one header, one copy.

A send whose message fits into the first piece that its header brings, and for which there is room; a receive
from a given rank whose message is there, or comes within a few looks. Whatever else is asked for, and all
while something is under way, gets OCCUPIED: then nothing was done, and the call goes its general way
(kernels.py).

The invariant: *a message overtakes no other of its channel, and a receive no other receive*. With BUSY taken
and QUEUEING unset no send is queued and no receive posted (progress.py), so a send that puts its header into
the next slot now comes after all that were sent before it. A receive takes only the message at the front of
the channel; it may, as nothing that was sent before is elsewhere: neither half-arrived (CURRENT) nor in the
store.

These kernels keep the interpreter: what they do takes less time than to give it away. So they never sleep or
yield, and do not spin where a peer may be a thread of this process (MAX_SPINS).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine.layout import RECEIVED, SENT
from torchestra.engine.native.atomics import (
    kernel,
    load,
    short_kernel,
    spin_hint,
    store,
    store_ordered,
)
from torchestra.engine.p2p import layout as w
from torchestra.engine.p2p import ring
from torchestra.engine.p2p.exclusion import enter, leave
from torchestra.engine.recorder.recorder import close_message, open_message

_TOKEN = 1  # in BUSY: no record's address, and no other token (those are negative)

channel_of, peer_of, ring_doorbell = ring.channel_of, ring.peer_of, ring.ring_doorbell
put_header, next_header, take_header, take = ring.put_header, ring.next_header, ring.take_header, ring.take


@kernel
def _fits_first_piece(state, peer, length):
    """Return whether the header of a message would bring all of it."""
    if length <= w.INLINE_BYTES:
        return True
    size = load(state + w.RING_BYTES)
    offset = load(peer_of(state, peer) + w.SENT_BYTES) & (size - 1)
    return length <= min(load(state + w.PIECE_BYTES) >> 2, size - offset)


@short_kernel
def send_now(state, address, length, kind, peer, tag):
    """Send a message if that needs no waiting: DONE, QUEUED_MEANWHILE (sent), or OCCUPIED (nothing was done).

    All are words: the mailbox's state, the address of so many bytes, what kind they are, the receiving rank
    and the tag.
    """
    if peer == load(state + w.RANK) or not enter(state, _TOKEN):
        return w.OCCUPIED
    record = state + w.OWN_RECORD
    store(record + w.ADDRESS, address)
    store(record + w.LENGTH, length)
    store(record + w.KIND, kind)
    store(record + w.TAG, tag)
    store(record + w.MOVED, 0)
    channel = channel_of(state, load(state + w.RANK), peer)
    fits = _fits_first_piece(state, peer, length)
    if not fits or not put_header(state, peer_of(state, peer), channel, record):
        store_ordered(state + w.BUSY, 0)
        return w.OCCUPIED
    ring_doorbell(state, peer)
    context = load(state + w.CONTEXT)
    close_message(context, open_message(context, SENT | kind << 16, tag, length, peer + 1), length, True)
    return leave(state)


@kernel
def _await_header(state, peer):
    """Return the address of the header of the next message from ``peer``, or 0 after a few looks in vain."""
    for _ in range(min(load(state + w.SPIN_BUDGET), load(state + w.MAX_SPINS))):
        header = next_header(state, peer)
        if header != 0:
            return header
        spin_hint()
    return next_header(state, peer)


@kernel
def _is_wanted(header, length, kind, tag):
    """Return whether a message is the one that is asked for, and all of it is here."""
    wanted = load(header + w.MESSAGE_TAG) == tag and load(header + w.MESSAGE_KIND) == kind
    wanted = wanted and load(header + w.MESSAGE_BYTES) == length
    return wanted and (length <= w.INLINE_BYTES or load(header + w.READY) == length)


@short_kernel
def receive_now(state, address, length, kind, peer, tag):
    """Receive a message from a rank if it is there: as :func:`send_now`; any source (-1) is OCCUPIED."""
    if peer < 0 or peer == load(state + w.RANK) or not enter(state, _TOKEN):
        return w.OCCUPIED
    known = peer_of(state, peer)
    header = 0
    if load(known + w.CURRENT) == 0 and load(known + w.STORE + w.FIRST) == 0:
        header = _await_header(state, peer)
    if header == 0 or not _is_wanted(header, length, kind, tag):
        store_ordered(state + w.BUSY, 0)
        return w.OCCUPIED
    context = load(state + w.CONTEXT)
    number = open_message(context, RECEIVED | kind << 16, tag, length, peer + 1)
    take_header(state, peer, header, address)
    if length > w.INLINE_BYTES:
        take(state, peer, False)
    store(state + w.NEXT_SOURCE, peer + 1)
    close_message(context, number, length, True)
    return leave(state)
