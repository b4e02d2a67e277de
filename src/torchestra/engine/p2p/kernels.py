"""The kernels that a mailbox calls: they queue transfers and move messages until one is finished.

*Who works.* One thread at a time works with the state and the records in it: the one whose token is in BUSY.
A blocking call that has the mailbox to itself, nearly always, takes and leaves it inside its one kernel.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine.kernels.placement import rebalance_sometimes
from torchestra.engine.kernels.waiting import LONGEST_YIELDING
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
from torchestra.engine.native.atomics import (
    compare_exchange,
    kernel,
    load,
    load_acquire,
    load_ordered,
    sched_yield,
    spin_hint,
    store,
    store_ordered,
)
from torchestra.engine.p2p import layout as w
from torchestra.engine.p2p import ring
from torchestra.engine.p2p.exclusion import enter, leave
from torchestra.engine.p2p.lists import append, remove, unlink
from torchestra.engine.p2p.matching import advance, free_stored, receive_stored, send_to_self
from torchestra.engine.recorder.clock import read_coarse_clock
from torchestra.engine.recorder.recorder import close_message, open_message

_ROUNDS = 256  # after so many rounds that moved something a kernel lets Python look at signals
_YIELDS_OF_THREAD = 20
_PROBE = 64
_FEW_YIELDS = 8

ring_doorbell, peer_of = ring.ring_doorbell, ring.peer_of
prepare_sleep, sleep, wake_up = ring.prepare_sleep, ring.sleep, ring.wake_up


@kernel
def _outcome(record):
    return DONE if load(record + w.STAGE) == w.FINISHED else MISMATCH


@kernel
def _spins(state):
    """Return how often a wait that begins now shall spin before it yields the core.

    Spinning is in vain while the peer waits for this very core. That is learned: see :func:`_learn`; and
    every _PROBE-th wait spins as often as it may, to find out whether that is still so.
    """
    waits = load(state + w.WAITS) + 1
    store(state + w.WAITS, waits)
    if waits % _PROBE == 0:
        return load(load(state + w.CONTEXT) + SPINS)
    return load(state + w.SPIN_BUDGET)


@kernel
def _learn(state, idle, spins):
    """Return whether a wait is over after ``idle`` looks in vain, ``spins`` of them spinning."""
    if idle <= spins:
        store(state + w.SPIN_BUDGET, load(load(state + w.CONTEXT) + SPINS))
    elif idle <= spins + _FEW_YIELDS:
        store(state + w.SPIN_BUDGET, load(state + w.SPIN_BUDGET) >> 1)


@kernel
def _sleep_until_moved(state, record):
    """Sleep until something of a record (0: of any) moves, or ATTENTION is set: DONE, PENDING, NO_MEMORY."""
    rung = prepare_sleep(state)
    moved = advance(state, record)
    if moved == 0 and load_ordered(state + w.ATTENTION) == 0:
        sleep(state, rung)
        moved = advance(state, record)
        if moved == 0:
            wake_up(state)
            return PENDING
    wake_up(state)
    return w.NO_MEMORY if moved < 0 else DONE


@kernel
def run(state, record, eager):
    """Work until a record is finished (0: until any that is to be notified is).

    DONE, MISMATCH (the record's), PENDING (nothing moved for POLL_INTERVAL, or much moved and Python shall
    have a look), ABORTED, INTERRUPTED (ATTENTION is set), NO_MEMORY; call again to go on. ``eager``: somebody
    waits for it, so that spinning may pay.
    """
    context = load(state + w.CONTEXT)
    spins = 0
    yields = load(context + YIELDS)
    if not eager:
        yields = min(yields, _YIELDS_OF_THREAD)
    idle = 0
    until = 0
    rounds = 0
    while True:
        moved = advance(state, record)
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
                rebalance_sometimes(context)
                until = read_coarse_clock(state + w.YIELD_TIMESPEC) + LONGEST_YIELDING
            sched_yield()
            if read_coarse_clock(state + w.YIELD_TIMESPEC) > until:
                idle = spins + yields
        else:
            if load_acquire(load(context + ABORT)) != 0:
                return ABORTED
            code = _sleep_until_moved(state, record)
            if code != DONE:
                return code
            idle = 0


@kernel
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
    entry = 0
    if notify != w.UNRECORDED:
        entry = open_message(load(state + w.CONTEXT), what, tag, length, peer + 1)
    store(record + w.ENTRY, entry)
    if sending != 0:
        store(record + w.MOVED, 0)
        if peer == load(state + w.RANK):
            return send_to_self(state, record)
        append(peer_of(state, peer) + w.QUEUE, record)
    else:
        size = load(state + w.SIZE)
        if peer >= 0:
            found = receive_stored(state, peer, record)
        else:
            found = False
            start = load(state + w.NEXT_SOURCE)
            for step in range(size):
                found = found or receive_stored(state, (start + step) % size, record)
        if not found:
            append(state + w.POSTED, record)
    if load(record + w.STAGE) < w.FINISHED and advance(state, record) < 0:
        return w.NO_MEMORY
    return _outcome(record) if load(record + w.STAGE) >= w.FINISHED else PENDING


@kernel
def post(state, record, sending, address, length, kind, peer, tag, notify):
    """Queue a transfer that goes to COMPLETED when it is finished: PENDING, DONE, MISMATCH or NO_MEMORY.

    ``notify``: 1, or UNRECORDED.
    """
    return _enqueue(state, record, sending, address, length, kind, peer, tag, notify)


@kernel
def transfer(state, record, sending, address, length, kind, peer, tag):
    """Run a blocking call to its end, if nothing else is under way.

    OCCUPIED: something is, and nothing was done. DONE, QUEUED_MEANWHILE: finished. Otherwise the record
    stays in BUSY, so that no one else comes in between: it is finished, but does not fit (MISMATCH), or goes
    on with :func:`run`.
    """
    if not enter(state, record):
        return w.OCCUPIED
    code = _enqueue(state, record, sending, address, length, kind, peer, tag, 0)
    if code == PENDING:
        code = run(state, record, 1)
    return leave(state) if code == DONE else code


@kernel
def try_acquire(state, token):
    """Take the state for oneself: whether it was free."""
    return compare_exchange(state + w.BUSY, 0, token) == 0


@kernel
def release(state, token):
    """Let the state go, if one has it."""
    return compare_exchange(state + w.BUSY, token, 0) == token


@kernel
def cancel(state, record):
    """Take a record out of the state; the STAGE it had. If that is RUNNING, its channel is lost."""
    stage = load(record + w.STAGE)
    if stage < w.FINISHED:
        if load(record + w.SENDING) != 0:
            remove(peer_of(state, load(record + w.PEER)) + w.QUEUE, record)
        elif stage == w.QUEUED:
            remove(state + w.POSTED, record)
        else:
            store(peer_of(state, load(record + w.FROM)) + w.CURRENT, w.BROKEN)
        close_message(load(state + w.CONTEXT), load(record + w.ENTRY), 0, False)
        store(record + w.STAGE, w.FINISHED)
        store(record + w.NOTIFY, 0)
    return stage


@kernel
def forget(state, record):
    """Take a record out of COMPLETED if it is the first there."""
    if load(state + w.COMPLETED + w.FIRST) == record:
        unlink(state + w.COMPLETED, 0, record)
    return 0


@kernel
def call_attention(state):
    """Bring whoever is in a kernel of this mailbox back to Python. Everybody may."""
    store_ordered(state + w.ATTENTION, 1)
    ring_doorbell(state, load(state + w.RANK))


@kernel
def discard(state):
    """Free the store."""
    for peer in range(load(state + w.SIZE)):
        store_of_peer = peer_of(state, peer) + w.STORE
        while load(store_of_peer + w.FIRST) != 0:
            stored = load(store_of_peer + w.FIRST)
            unlink(store_of_peer, 0, stored)
            free_stored(state, stored)
    return load(state + w.STORED)
