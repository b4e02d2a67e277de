"""Match messages with receives.

*Order.* Messages of one channel are looked at in the order in which they were sent; each goes to the oldest
posted receive that wants its source (or any) and its tag. So two messages with the same tag from the same
rank are received in order, however many receives are posted and whatever else is going on.

*The store.* A message at the front of a channel that no receive wants, while a receive waits for that
source, stands in the way: it is taken into memory of this process (malloc), and found there by a later
receive, also while it is still arriving. A message that nobody waits behind stays in the channel, so that
a sender that is far ahead is slowed down. A message to oneself goes straight to its receive or
into the store: sending to oneself never waits, whatever the size.

*Records.* A send or a receive is a record of 16 words in private memory (words.py), in exactly one list
while it is QUEUED: sends by destination, receives together. A record that a byte was moved for is RUNNING:
the first of its destination's list, or CURRENT of its source.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine.kernels.buffers import streams
from torchestra.engine.layout import DONE
from torchestra.engine.native.atomics import External, kernel, load, memcpy, store, stream_fence
from torchestra.engine.p2p import layout as w
from torchestra.engine.p2p import ring
from torchestra.engine.p2p.lists import append, find, unlink
from torchestra.engine.recorder.recorder import close_message, message_came

_malloc = External("malloc", "i64", "i64")
_free = External("free", "void", "i64")

_LACKING = -1

put, take, take_header, next_header = ring.put, ring.take, ring.take_header, ring.next_header
peer_of = ring.peer_of


@kernel
def _anybody_waits_for(state, peer):
    found = load(state + w.POSTED + w.FIRST)
    while found != 0:
        wanted = load(found + w.PEER)
        if wanted == peer or wanted < 0:
            return True
        found = load(found + w.NEXT)
    return False


@kernel
def _new_stored(state, source, tag, length, kind):
    """Return a message of the store, not yet linked, its payload still to come; 0: no memory."""
    record = _malloc(w.RECORD_BYTES + length)
    if record != 0:
        store(record + w.STAGE, w.RUNNING)
        store(record + w.ADDRESS, record + w.RECORD_BYTES)
        store(record + w.LENGTH, length)
        store(record + w.KIND, kind)
        store(record + w.PEER, source)
        store(record + w.TAG, tag)
        store(record + w.STORED_MESSAGE, 1)
        store(record + w.ENTRY, 0)
        store(record + w.FROM_LENGTH, length)
        store(state + w.STORED, load(state + w.STORED) + length)
    return record


@kernel
def free_stored(state, stored):
    """Give the memory of a message of the store back; it is in no list any more."""
    store(state + w.STORED, load(state + w.STORED) - load(stored + w.LENGTH))
    _free(stored)


@kernel
def _assign(record, source, length, kind):
    """Note in a receive which message it gets: whether it is of the length and kind expected."""
    store(record + w.FROM, source)
    store(record + w.FROM_LENGTH, length)
    store(record + w.FROM_KIND, kind)
    store(record + w.STAGE, w.RUNNING)
    return length == load(record + w.LENGTH) and kind == load(record + w.KIND)


@kernel
def _finish(state, record):
    if load(record + w.STORED_MESSAGE) != 0:
        store(record + w.STAGE, w.FINISHED)  # and stays in the store
        return
    fits = load(record + w.FROM_LENGTH) == load(record + w.LENGTH)
    fits = fits and load(record + w.FROM_KIND) == load(record + w.KIND)
    fits = fits or load(record + w.SENDING) != 0
    close_message(load(state + w.CONTEXT), load(record + w.ENTRY), load(record + w.LENGTH), fits)
    store(record + w.STAGE, w.FINISHED if fits else w.MISMATCHED)
    if load(record + w.NOTIFY) != 0:
        append(state + w.COMPLETED, record)


@kernel
def send_to_self(state, record):
    """Finish a send to this rank: DONE or NO_MEMORY."""
    rank = load(state + w.RANK)
    length = load(record + w.LENGTH)
    kind = load(record + w.KIND)
    receiver = find(state + w.POSTED, rank, load(record + w.TAG))
    if receiver != 0:
        message_came(load(state + w.CONTEXT), load(receiver + w.ENTRY), rank)
        if _assign(receiver, rank, length, kind):
            memcpy(load(receiver + w.ADDRESS), load(record + w.ADDRESS), length)
    else:
        receiver = _new_stored(state, rank, load(record + w.TAG), length, kind)
        if receiver == 0:
            return w.NO_MEMORY
        memcpy(load(receiver + w.ADDRESS), load(record + w.ADDRESS), length)
        append(peer_of(state, rank) + w.STORE, receiver)
    _finish(state, receiver)
    _finish(state, record)
    return DONE


@kernel
def receive_stored(state, source, record):
    """Let a receive have the oldest message of the store that it wants: whether there is one."""
    known = peer_of(state, source)
    stored = find(known + w.STORE, source, load(record + w.TAG))
    if stored == 0:
        return False
    length = load(stored + w.LENGTH)
    fits = _assign(record, source, length, load(stored + w.KIND))
    message_came(load(state + w.CONTEXT), load(record + w.ENTRY), source)
    arriving = load(known + w.CURRENT) == stored
    arrived = length
    if arriving:
        arrived -= load(known + w.LEFT)
    if fits:
        memcpy(load(record + w.ADDRESS), load(stored + w.ADDRESS), arrived)
    if arriving:
        store(known + w.CURRENT, record)
        store(known + w.DESTINATION, load(record + w.ADDRESS) + arrived if fits else 0)
    else:
        _finish(state, record)
    free_stored(state, stored)
    return True


@kernel
def _begin_message(state, peer):
    """Take the header at the front of a channel, if a receive wants it or waits behind it.

    1: taken, 0: there is none, or it can stay, _LACKING: no memory to take it into.
    """
    if load(state + w.POSTED + w.FIRST) == 0 or peer == load(state + w.RANK):
        return 0
    header = next_header(state, peer)
    if header == 0:
        return 0
    tag = load(header + w.MESSAGE_TAG)
    length = load(header + w.MESSAGE_BYTES)
    kind = load(header + w.MESSAGE_KIND)
    known = peer_of(state, peer)
    record = find(state + w.POSTED, peer, tag)
    if record != 0:
        destination = load(record + w.ADDRESS) if _assign(record, peer, length, kind) else 0
        message_came(load(state + w.CONTEXT), load(record + w.ENTRY), peer)
        store(state + w.NEXT_SOURCE, peer + 1)
    elif _anybody_waits_for(state, peer):
        record = _new_stored(state, peer, tag, length, kind)
        if record == 0:
            return _LACKING
        destination = load(record + w.ADDRESS)
        append(known + w.STORE, record)
    else:
        return 0
    take_header(state, peer, header, destination)
    store(known + w.CURRENT, record)
    return 1


@kernel
def _pull(state, peer):
    """Receive some more from a peer: 1 if anything was moved, 0 if not, or _LACKING."""
    known = peer_of(state, peer)
    current = load(known + w.CURRENT)
    moved = 0
    if current == 0:
        moved = _begin_message(state, peer)
        if moved <= 0:
            return moved
        current = load(known + w.CURRENT)
    elif current == w.BROKEN:
        return 0
    if load(known + w.LEFT) > 0:
        stream = streams(load(state + w.CONTEXT), 2 * load(current + w.FROM_LENGTH))
        if take(state, peer, stream):
            moved = 1
        if stream and load(known + w.LEFT) == 0:
            stream_fence()
    if load(known + w.LEFT) == 0:
        store(known + w.CURRENT, 0)
        _finish(state, current)
    return moved


@kernel
def _push(state, peer):
    """Send some more of the oldest send to a peer: 1 if anything was moved."""
    queue = peer_of(state, peer) + w.QUEUE
    record = load(queue + w.FIRST)
    if record == 0 or not put(state, peer, record):
        return 0
    if load(record + w.MOVED) == load(record + w.LENGTH):
        unlink(queue, 0, record)
        _finish(state, record)
    return 1


@kernel
def advance(state, record):
    """Move something of one record (0: of all): 1 if anything was moved, 0 if not, or _LACKING."""
    size = load(state + w.SIZE)
    if record != 0:
        peer = load(record + w.PEER)
        if load(record + w.SENDING) != 0:
            return _push(state, peer)
        if peer >= 0:
            return _pull(state, peer)
    moved = 0
    start = load(state + w.NEXT_SOURCE)
    for step in range(size):
        peer = (start + step) % size
        if record == 0 and _push(state, peer) != 0:
            moved = 1
        pulled = _pull(state, peer)
        if pulled < 0:
            return pulled
        moved |= pulled
    return moved
