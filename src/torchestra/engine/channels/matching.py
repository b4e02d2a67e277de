"""Which message goes to which receive, and the kernels that a mailbox calls.

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

*Who works.* One thread at a time works with the state and the records in it: the one whose token is in BUSY.
A blocking call that has the mailbox to itself, nearly always, takes and leaves it inside its one kernel.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from numba import njit, types

from torchestra.engine.atomics import (
    KERNEL_OPTIONS,
    compare_exchange,
    load,
    load_acquire,
    load_ordered,
    memcpy,
    sched_yield,
    spin_hint,
    store,
    store_ordered,
    store_release,
    stream_fence,
)
from torchestra.engine.channels import ring
from torchestra.engine.channels import words as w
from torchestra.engine.kernels.buffers import streams
from torchestra.engine.layout import (
    ABORT,
    ABORTED,
    BACKGROUND,
    DONE,
    MISMATCH,
    PENDING,
    RECEIVED,
    SENT,
    SPINS,
    YIELDS,
)
from torchestra.engine.placement import settle
from torchestra.engine.recording import close_message, message_came, open_message

_WORD = types.int64
_malloc = types.ExternalFunction("malloc", _WORD(_WORD))
_free = types.ExternalFunction("free", types.void(_WORD))

_ROUNDS = 256  # after so many rounds that moved something a kernel lets Python look at signals
_YIELDS_OF_THREAD = 20
_PROBE = 64
_FEW_YIELDS = 8
_LACKING = -1

put, take, take_header, next_header = ring.put, ring.take, ring.take_header, ring.next_header
ring_bell, peer_of = ring.ring_bell, ring.peer_of
prepare_sleep, sleep, wake_up = ring.prepare_sleep, ring.sleep, ring.wake_up


@njit(**KERNEL_OPTIONS)
def _append(queue, record):
    store(record + w.NEXT, 0)
    if load(queue + w.FIRST) == 0:
        store(queue + w.FIRST, record)
    else:
        store(load(queue + w.LAST) + w.NEXT, record)
    store(queue + w.LAST, record)


@njit(**KERNEL_OPTIONS)
def _unlink(queue, before, record):
    after = load(record + w.NEXT)
    if before == 0:
        store(queue + w.FIRST, after)
    else:
        store(before + w.NEXT, after)
    if after == 0:
        store(queue + w.LAST, before)


@njit(**KERNEL_OPTIONS)
def _remove(queue, record):
    """Unlink ``record`` if it is in the list."""
    before = 0
    found = load(queue + w.FIRST)
    while found != 0:
        if found == record:
            _unlink(queue, before, found)
            return
        before = found
        found = load(found + w.NEXT)


@njit(**KERNEL_OPTIONS)
def _find(queue, peer, tag):
    """Unlink the oldest record for a peer (or for any) with a tag: its address, or 0."""
    before = 0
    found = load(queue + w.FIRST)
    while found != 0:
        wanted = load(found + w.PEER)
        if load(found + w.TAG) == tag and (wanted == peer or wanted < 0):
            _unlink(queue, before, found)
            return found
        before = found
        found = load(found + w.NEXT)
    return 0


@njit(**KERNEL_OPTIONS)
def _anybody_waits_for(state, peer):
    found = load(state + w.POSTED + w.FIRST)
    while found != 0:
        wanted = load(found + w.PEER)
        if wanted == peer or wanted < 0:
            return True
        found = load(found + w.NEXT)
    return False


@njit(**KERNEL_OPTIONS)
def _new_stored(state, source, tag, length, kind):
    """A message of the store, not yet linked, its payload still to come; 0: no memory."""
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


@njit(**KERNEL_OPTIONS)
def _free_stored(state, stored):
    store(state + w.STORED, load(state + w.STORED) - load(stored + w.LENGTH))
    _free(stored)


@njit(**KERNEL_OPTIONS)
def _assign(record, source, length, kind):
    """Note in a receive which message it gets: whether it is of the length and kind expected."""
    store(record + w.FROM, source)
    store(record + w.FROM_LENGTH, length)
    store(record + w.FROM_KIND, kind)
    store(record + w.STAGE, w.RUNNING)
    return length == load(record + w.LENGTH) and kind == load(record + w.KIND)


@njit(**KERNEL_OPTIONS)
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
        _append(state + w.COMPLETED, record)


@njit(**KERNEL_OPTIONS)
def _send_to_self(state, record):
    """Finish a send to this rank: DONE or NO_MEMORY."""
    rank = load(state + w.RANK)
    length = load(record + w.LENGTH)
    kind = load(record + w.KIND)
    receiver = _find(state + w.POSTED, rank, load(record + w.TAG))
    if receiver != 0:
        message_came(load(state + w.CONTEXT), load(receiver + w.ENTRY), rank)
        if _assign(receiver, rank, length, kind):
            memcpy(load(receiver + w.ADDRESS), load(record + w.ADDRESS), length)
    else:
        receiver = _new_stored(state, rank, load(record + w.TAG), length, kind)
        if receiver == 0:
            return w.NO_MEMORY
        memcpy(load(receiver + w.ADDRESS), load(record + w.ADDRESS), length)
        _append(peer_of(state, rank) + w.STORE, receiver)
    _finish(state, receiver)
    _finish(state, record)
    return DONE


@njit(**KERNEL_OPTIONS)
def _receive_stored(state, source, record):
    """Let a receive have the oldest message of the store that it wants: whether there is one."""
    known = peer_of(state, source)
    stored = _find(known + w.STORE, source, load(record + w.TAG))
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
        store(known + w.LANDING, load(record + w.ADDRESS) + arrived if fits else 0)
    else:
        _finish(state, record)
    _free_stored(state, stored)
    return True


@njit(**KERNEL_OPTIONS)
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
    record = _find(state + w.POSTED, peer, tag)
    if record != 0:
        landing = load(record + w.ADDRESS) if _assign(record, peer, length, kind) else 0
        message_came(load(state + w.CONTEXT), load(record + w.ENTRY), peer)
        store(state + w.NEXT_SOURCE, peer + 1)
    elif _anybody_waits_for(state, peer):
        record = _new_stored(state, peer, tag, length, kind)
        if record == 0:
            return _LACKING
        landing = load(record + w.ADDRESS)
        _append(known + w.STORE, record)
    else:
        return 0
    take_header(state, peer, header, landing)
    store(known + w.CURRENT, record)
    return 1


@njit(**KERNEL_OPTIONS)
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
        stream = streams(load(state + w.CONTEXT), load(current + w.FROM_LENGTH))
        if take(state, peer, stream):
            moved = 1
        if stream and load(known + w.LEFT) == 0:
            stream_fence()
    if load(known + w.LEFT) == 0:
        store(known + w.CURRENT, 0)
        _finish(state, current)
    return moved


@njit(**KERNEL_OPTIONS)
def _push(state, peer):
    """Send some more of the oldest send to a peer: 1 if anything was moved."""
    queue = peer_of(state, peer) + w.QUEUE
    record = load(queue + w.FIRST)
    if record == 0 or not put(state, peer, record):
        return 0
    if load(record + w.MOVED) == load(record + w.LENGTH):
        _unlink(queue, 0, record)
        _finish(state, record)
    return 1


@njit(**KERNEL_OPTIONS)
def _advance(state, record):
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


@njit(**KERNEL_OPTIONS)
def _outcome(record):
    return DONE if load(record + w.STAGE) == w.FINISHED else MISMATCH


@njit(**KERNEL_OPTIONS)
def _spins(state):
    """How often a wait that begins now shall spin before it yields the core.

    Spinning is in vain while the peer waits for this very core. That is learned: see :func:`_learn`; and
    every _PROBE-th wait spins as often as it may, to find out whether that is still so.
    """
    waits = load(state + w.WAITS) + 1
    store(state + w.WAITS, waits)
    if waits % _PROBE == 0:
        return load(load(state + w.CONTEXT) + SPINS)
    return load(state + w.SPIN_BUDGET)


@njit(**KERNEL_OPTIONS)
def _learn(state, idle, spins):
    """A wait is over after ``idle`` looks in vain, ``spins`` of them spinning."""
    if idle <= spins:
        store(state + w.SPIN_BUDGET, load(load(state + w.CONTEXT) + SPINS))
    elif idle <= spins + _FEW_YIELDS:
        store(state + w.SPIN_BUDGET, load(state + w.SPIN_BUDGET) >> 1)


@njit(**KERNEL_OPTIONS)
def run(state, record, eager):
    """Work until a record is finished (0: until any that is to be notified is).

    DONE, MISMATCH (the record's), PENDING (nothing moved for PATIENCE, or much moved and Python shall have a
    look), ABORTED, INTERRUPTED (ATTENTION is set), NO_MEMORY; call again to go on. ``eager``: somebody waits
    for it, so that spinning may pay.
    """
    context = load(state + w.CONTEXT)
    spins = 0
    yields = load(context + YIELDS)
    if not eager:
        yields = min(yields, _YIELDS_OF_THREAD)
    idle = 0
    rounds = 0
    while True:
        moved = _advance(state, record)
        if moved < 0:
            return w.NO_MEMORY
        if moved > 0 and idle > 0 and eager:
            _learn(state, idle, spins)
        if record != 0:
            if load(record + w.STAGE) >= w.FINISHED:
                return _outcome(record)
        elif load(state + w.COMPLETED + w.FIRST) != 0:
            return DONE
        if load_acquire(state + w.ATTENTION) != 0:
            return w.INTERRUPTED
        if moved > 0:
            idle = 0
            rounds += 1
            if rounds == _ROUNDS:
                return PENDING
            continue
        if idle == 0 and eager:
            spins = _spins(state)
        idle += 1
        if idle <= spins:
            spin_hint()
        elif idle <= spins + yields:
            if idle == spins + 1:
                settle(context)
            sched_yield()
        else:
            if load_acquire(load(context + ABORT)) != 0:
                return ABORTED
            rung = prepare_sleep(state)
            moved = _advance(state, record)
            if moved == 0 and load_ordered(state + w.ATTENTION) == 0:
                sleep(state, rung)
                moved = _advance(state, record)
                if moved == 0:
                    wake_up(state)
                    return PENDING
            wake_up(state)
            if moved < 0:
                return w.NO_MEMORY
            idle = 0


@njit(**KERNEL_OPTIONS)
def _enqueue(state, record, sending, address, length, kind, peer, tag, notify):
    """Fill in a record, queue it, and move what can be moved at once: DONE, MISMATCH, PENDING, NO_MEMORY."""
    store(record + w.STAGE, w.QUEUED)
    store(record + w.SENDING, sending)
    store(record + w.ADDRESS, address)
    store(record + w.LENGTH, length)
    store(record + w.KIND, kind)
    store(record + w.PEER, peer)
    store(record + w.TAG, tag)
    store(record + w.NOTIFY, notify)
    what = (SENT if sending != 0 else RECEIVED) | (BACKGROUND if notify != 0 else 0) | kind << 16
    store(record + w.ENTRY, open_message(load(state + w.CONTEXT), what, tag, length, peer + 1))
    if sending != 0:
        store(record + w.MOVED, 0)
        if peer == load(state + w.RANK):
            return _send_to_self(state, record)
        _append(peer_of(state, peer) + w.QUEUE, record)
    else:
        size = load(state + w.SIZE)
        if peer >= 0:
            found = _receive_stored(state, peer, record)
        else:
            found = False
            start = load(state + w.NEXT_SOURCE)
            for step in range(size):
                found = found or _receive_stored(state, (start + step) % size, record)
        if not found:
            _append(state + w.POSTED, record)
    if load(record + w.STAGE) < w.FINISHED and _advance(state, record) < 0:
        return w.NO_MEMORY
    return _outcome(record) if load(record + w.STAGE) >= w.FINISHED else PENDING


@njit(**KERNEL_OPTIONS)
def post(state, record, sending, address, length, kind, peer, tag):
    """Queue a transfer that goes to COMPLETED when it is finished: PENDING, DONE, MISMATCH or NO_MEMORY."""
    return _enqueue(state, record, sending, address, length, kind, peer, tag, 1)


@njit(**KERNEL_OPTIONS)
def transfer(state, record, sending, address, length, kind, peer, tag):
    """A blocking call: to its end, if nothing else is under way.

    OCCUPIED: something is, and nothing was done. DONE or MISMATCH: finished. Otherwise it goes on with
    :func:`run`, and the record stays in BUSY, so that no one else comes in between.
    """
    if load_acquire(state + w.QUEUEING) != 0 or compare_exchange(state + w.BUSY, 0, record) != 0:
        return w.OCCUPIED
    if load_acquire(state + w.QUEUEING) != 0:
        store_release(state + w.BUSY, 0)
        return w.OCCUPIED
    code = _enqueue(state, record, sending, address, length, kind, peer, tag, 0)
    if code == PENDING:
        code = run(state, record, 1)
    if code in (DONE, MISMATCH):
        store_release(state + w.BUSY, 0)
    return code


@njit(**KERNEL_OPTIONS)
def occupy(state, token):
    """Take the state for oneself: whether it was free."""
    return compare_exchange(state + w.BUSY, 0, token) == 0


@njit(**KERNEL_OPTIONS)
def vacate(state, token):
    """Let the state go, if one has it."""
    return compare_exchange(state + w.BUSY, token, 0) == token


@njit(**KERNEL_OPTIONS)
def cancel(state, record):
    """Take a record out of the state; the STAGE it had. If that is RUNNING, its channel is lost."""
    stage = load(record + w.STAGE)
    if stage < w.FINISHED:
        if load(record + w.SENDING) != 0:
            _remove(peer_of(state, load(record + w.PEER)) + w.QUEUE, record)
        elif stage == w.QUEUED:
            _remove(state + w.POSTED, record)
        else:
            store(peer_of(state, load(record + w.FROM)) + w.CURRENT, w.BROKEN)
        close_message(load(state + w.CONTEXT), load(record + w.ENTRY), 0, False)
        store(record + w.STAGE, w.FINISHED)
        store(record + w.NOTIFY, 0)
    return stage


@njit(**KERNEL_OPTIONS)
def forget(state, record):
    """Take a record out of COMPLETED if it is the first there."""
    if load(state + w.COMPLETED + w.FIRST) == record:
        _unlink(state + w.COMPLETED, 0, record)
    return 0


@njit(**KERNEL_OPTIONS)
def call_attention(state):
    """Bring whoever is in a kernel of this mailbox back to Python. Everybody may."""
    store_ordered(state + w.ATTENTION, 1)
    ring_bell(state, load(state + w.RANK))


@njit(**KERNEL_OPTIONS)
def discard(state):
    """Free the store."""
    for peer in range(load(state + w.SIZE)):
        store_of_peer = peer_of(state, peer) + w.STORE
        while load(store_of_peer + w.FIRST) != 0:
            stored = load(store_of_peer + w.FIRST)
            _unlink(store_of_peer, 0, stored)
            _free_stored(state, stored)
    return load(state + w.STORED)


_ENTRIES = (
    (post, 8),
    (transfer, 8),
    (run, 3),
    (cancel, 2),
    (forget, 2),
    (occupy, 2),
    (vacate, 2),
    (call_attention, 1),
    (discard, 1),
)


def warm_up_channels() -> None:
    """Compile the kernels, or load them from Numba's cache."""
    for kernel, arguments in _ENTRIES:
        kernel.compile((_WORD,) * arguments)
