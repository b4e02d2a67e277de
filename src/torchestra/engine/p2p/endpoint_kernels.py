"""Kernels of an endpoint: many threads of a rank send, one at a time receives, and none waits for another.

The channels are those of ring.py, the doorbells are not: a rank has three, in the words of its doorbell that
the mailbox leaves unused, each a pair of a futex word (RUNG) and a word that tells who sleeps on it.

*Leader.* At most one thread of a rank receives, the leader. LEADING is 0 without one, 1 while it looks, 2
while it sleeps: only then it must be woken.

*Follower.* Nobody leads while the thread that received a message works at it. One thread, the follower,
sleeps until a message comes meanwhile, waits a grace for a leader to take it (LED counts how often one has
looked), and then comes back to take the lead itself. So a message that finds everybody idle wakes one thread,
which answers it without waking another, and a function that runs for long keeps no message waiting. As long
as leaders take the messages the grace grows, so that many small calls do not have it wake up for nothing.

*Room.* What a thread sleeps on that found a channel full. STATUS is 1 from when one is about to until a peer
takes that down, and wakes them all; those that still find no room set it again, each after it has looked at
RUNG. A peer does so when the channel is half empty: for each message, two threads would wake each other all
the time. It takes the others, too, as somebody always receives, so it comes to that.

A rank may post to itself, from one thread: so what comes in by other ways is found among the messages.

No wake-up is lost: a sleeper writes that it sleeps and then looks, a peer publishes and then reads who
sleeps, all sequentially consistent; and a futex compares RUNG again. A leader that leaves looks once more and
wakes the follower if there is a message, because peers that saw it lead have woken nobody; one that leaves
with a message looks when it has taken that, so that the follower sleeps on while messages come one by one.

A short message is taken in the call that finds it: its text lies in memory of the endpoint then (TEXT), until
Python says by the next call that it has as many messages as were taken (TAKEN). If it has not, because an
interrupt came first, it is given the same one again.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine.kernels.placement import rebalance_sometimes
from torchestra.engine.kernels.waiting import ALL_WAITERS, FUTEX, FUTEX_WAIT, FUTEX_WAKE, LONGEST_YIELDING
from torchestra.engine.layout import DONE, PENDING, POLL_INTERVAL, SPINS, YIELDS
from torchestra.engine.native.atomics import (
    compare_exchange,
    fetch_add,
    full_fence,
    kernel,
    load,
    load_acquire,
    load_ordered,
    sched_yield,
    short_kernel,
    spin_hint,
    store,
    store_ordered,
    store_release,
    syscall,
)
from torchestra.engine.p2p import layout as w
from torchestra.engine.p2p import ring
from torchestra.engine.recorder.clock import NANOSECONDS, read_clock, read_coarse_clock

# Byte offsets in a rank's doorbell.
LEADER = 32
FOLLOWER = 48
ROOM = 64
STATUS = 8  # of the pair: LEADING, how many follow, or 1 if somebody waits for room
NOBODY = 0
POLLING = 1
ASLEEP = 2

# Words of the private state that a mailbox uses for its lists.
OUT_PEER = 64  # of the message that was found
OUT_TAG = 72
OUT_BYTES = 80
OUT_KIND = 88
LED = 128
GRACE = 136  # address of a struct timespec, the follower's
CLOSING = 144  # 1 when nothing shall sleep any more
TEXT = 192  # address of memory for the text of a short message
TEXT_BYTES = 200  # how long that may be
TAKEN = 208  # how many messages were taken to there
RETURNED = 216  # not 0: when :func:`receive` returned with a message, by CLOCK_MONOTONIC
RETURNED_TIMESPEC = 224  # scratch for that, two words

# What the kernels that receive return besides DONE (a short message is in TEXT), PENDING and INTERRUPTED.
FOUND = 16  # another message is there
INTERRUPTED = w.INTERRUPTED
PARTS_SHIFT = 16  # in the kind of a message, above which the count of its parts stands
_WATCHES = 8
_SHORTEST_GRACE = 100_000  # nanoseconds
_LONGEST_GRACE = 800_000

put, take, take_header, next_header = ring.put, ring.take, ring.take_header, ring.next_header
peer_of = ring.peer_of


@kernel
def _doorbell(state, rank):
    return load(state + w.DOORBELLS) + rank * w.DOORBELL_BYTES


@kernel
def _sleep(state, pair, rung):
    """Sleep until a pair has been woken since RUNG was read, POLL_INTERVAL at most."""
    syscall(FUTEX, pair, FUTEX_WAIT, rung & 0xFFFF_FFFF, load(load(state + w.CONTEXT) + POLL_INTERVAL), 0, 0)


@kernel
def _wake(pair):
    fetch_add(pair, 1)
    syscall(FUTEX, pair, FUTEX_WAKE, ALL_WAITERS, 0, 0, 0)


@kernel
def _ring_for_message(state, peer):
    """Have a message noticed that was published in the channel to ``peer``."""
    lead = _doorbell(state, peer) + LEADER
    who = load_ordered(lead + STATUS)
    if who == ASLEEP:
        if compare_exchange(lead + STATUS, ASLEEP, POLLING) == ASLEEP:
            _wake(lead)
    elif who == NOBODY:
        watch = _doorbell(state, peer) + FOLLOWER
        if load_ordered(watch + STATUS) > 0:
            _wake(watch)


@kernel
def _is_half_full(state, peer):
    """Return whether more than half of the slots from ``peer`` hold messages that are yet to be taken."""
    channel = ring.channel_of(state, peer, load(state + w.RANK))
    number = load(peer_of(state, peer) + w.GOT) + (w.SLOTS >> 1)
    slot = channel + w.SLOTS_AT + (number & (w.SLOTS - 1)) * w.SLOT_BYTES
    return load_acquire(slot + w.STAMP) == number + 1


@kernel
def _ring_room(state, peer):
    """Wake those threads of ``peer`` that wait for room, as soon as there is enough."""
    room = _doorbell(state, peer) + ROOM
    is_awaited = load_ordered(room + STATUS) == 1 and not _is_half_full(state, peer)
    if is_awaited and compare_exchange(room + STATUS, 1, 0) == 1:
        _wake(room)


@kernel
def _put(state, record, peer):
    """Send some of a message: whether there was room for any."""
    moved = put(state, peer, record)  # sequentially consistent, or with a fence at its end
    if moved:
        _ring_for_message(state, peer)
    return moved


@kernel
def _push(state, record, peer):
    """Send what there is room for: whether that was all.

    All may have been sent before: the caller need not know, after an interrupt, what a kernel has returned.
    """
    while True:
        if load(record + w.STAGE) == w.RUNNING and load(record + w.MOVED) == load(record + w.LENGTH):
            return True
        if not _put(state, record, peer):
            return False


@short_kernel
def begin_send(state, record, peer, address, length, tag, kind):
    """Begin to send a message, with the channel's lock held: DONE, or PENDING if the channel is full."""
    store(record + w.STAGE, w.QUEUED)
    store(record + w.MOVED, 0)
    store(record + w.ADDRESS, address)
    store(record + w.LENGTH, length)
    store(record + w.TAG, tag)
    store(record + w.KIND, kind)
    if _put(state, record, peer) and load(record + w.MOVED) == length:
        return DONE
    return PENDING


@kernel
def continue_send(state, record, peer):
    """Send the rest: DONE, or PENDING if there was no room for POLL_INTERVAL."""
    room = _doorbell(state, load(state + w.RANK)) + ROOM
    while not _push(state, record, peer):
        rung = load_ordered(room)
        moved = load(record + w.MOVED)
        store_ordered(room + STATUS, 1)
        full_fence()
        done = _push(state, record, peer)
        if not done and load(record + w.MOVED) == moved:
            _sleep(state, room, rung)
        if done:
            break
        if load_ordered(room) == rung and load(record + w.MOVED) == moved:
            return PENDING
    return DONE


@kernel
def _has(state, peer):
    return load(peer_of(state, peer) + w.CURRENT) != w.BROKEN and next_header(state, peer) != 0


@kernel
def _find(state, only):
    """Return the first source (or this one only, unless -1) that has a message here, plus one, or 0."""
    if only >= 0:
        return only + 1 if _has(state, only) else 0
    size = load(state + w.SIZE)
    start = load(state + w.NEXT_SOURCE)
    for step in range(size):
        peer = (start + step) % size
        if _has(state, peer):
            return peer + 1
    return 0


@short_kernel
def find_message(state, only):
    """Find a message (from one source only, unless -1), with the lead: 1 and it in the OUT words, or 0."""
    store_release(state + LED, load(state + LED) + 1)
    found = _find(state, only)
    if found == 0:
        return 0
    peer = found - 1
    store(state + w.NEXT_SOURCE, peer + 1)
    header = next_header(state, peer)
    store(state + OUT_PEER, peer)
    store(state + OUT_TAG, load(header + w.MESSAGE_TAG))
    store(state + OUT_BYTES, load(header + w.MESSAGE_BYTES))
    store(state + OUT_KIND, load(header + w.MESSAGE_KIND))
    return 1


@kernel
def _take(state, peer):
    taken = take(state, peer, False)  # with a fence at its end
    if taken:
        _ring_room(state, peer)
    return taken


@kernel
def _pull(state, peer):
    """Take what has come of a message: whether that was all."""
    known = peer_of(state, peer)
    while load(known + w.LEFT) > 0 and _take(state, peer):
        pass
    return load(known + w.LEFT) == 0


@kernel
def _any_message(state):
    """Return whether there is a message, for whoever need not lead: it reads what only leaders write."""
    rank = load(state + w.RANK)
    for peer in range(load(state + w.SIZE)):
        channel = ring.channel_of(state, peer, rank)
        taken = load_acquire(channel + w.TAKEN)
        slot = channel + w.SLOTS_AT + (taken & (w.SLOTS - 1)) * w.SLOT_BYTES
        has_come = load_acquire(slot + w.STAMP) == taken + 1
        if has_come and load_acquire(peer_of(state, peer) + w.CURRENT) != w.BROKEN:
            return 1
    return 0


@kernel
def _wake_follower(state):
    """If there is a message and nobody leads, wake the follower."""
    if _any_message(state) != 0:
        watch = _doorbell(state, load(state + w.RANK)) + FOLLOWER
        if load_ordered(watch + STATUS) > 0:
            _wake(watch)


@short_kernel
def begin_receive(state, peer, address, is_last):
    """Take the message that :func:`find_message` has found: DONE, or PENDING if some is still to come.

    ``is_last``: the leader takes no other directly after it.
    """
    known = peer_of(state, peer)
    take_header(state, peer, next_header(state, peer), address)
    if load(known + w.LEFT) == 0:
        _ring_room(state, peer)
    else:
        _take(state, peer)
        if load(known + w.LEFT) != 0:
            return PENDING
    if is_last != 0:
        _wake_follower(state)
    return DONE


@short_kernel
def receive_now(state, received):
    """Find a message, with the lead, and take it if it is short: DONE, FOUND (in the OUT words) or PENDING.

    ``received``: how many short messages Python has received.
    """
    if load(state + TAKEN) != received:
        return DONE
    if find_message(state, -1) == 0:
        return PENDING
    peer = load(state + OUT_PEER)
    header = next_header(state, peer)
    length = load(state + OUT_BYTES)
    if load(state + OUT_KIND) >> PARTS_SHIFT != 1 or length > load(state + TEXT_BYTES):
        return FOUND
    if length > w.INLINE_BYTES and load(header + w.READY) != length:
        return FOUND
    begin_receive(state, peer, load(state + TEXT), 1)
    store(state + TAKEN, received + 1)
    return DONE


@kernel
def receive(state, eager, received):
    """Do as :func:`receive_now`, and sleep until there is a message, POLL_INTERVAL at most."""
    code = await_message(state, eager, -1)
    if code == DONE:
        code = receive_now(state, received)
        if load(state + RETURNED) != 0:
            store(state + RETURNED, read_clock(NANOSECONDS, state + RETURNED_TIMESPEC))
    return code


@kernel
def continue_receive(state, peer):
    """Take the rest: DONE, or PENDING if nothing came for POLL_INTERVAL."""
    lead = _doorbell(state, load(state + w.RANK)) + LEADER
    store_ordered(lead + STATUS, POLLING)
    while not _pull(state, peer):
        rung = load_ordered(lead)
        store_ordered(lead + STATUS, ASLEEP)
        full_fence()
        left = load(peer_of(state, peer) + w.LEFT)
        if not _pull(state, peer) and load(peer_of(state, peer) + w.LEFT) == left:
            _sleep(state, lead, rung)
            if not _pull(state, peer) and load(peer_of(state, peer) + w.LEFT) == left:
                leave(state)
                return PENDING
        store_ordered(lead + STATUS, POLLING)
    leave(state)
    return DONE


@kernel
def leave(state):
    """Give the lead up: peers that publish from now on wake the follower, who hears now of what is there."""
    store_ordered(_doorbell(state, load(state + w.RANK)) + LEADER + STATUS, NOBODY)
    full_fence()
    _wake_follower(state)
    return 0


@kernel
def await_message(state, eager, only):
    """Sleep, as the leader, until there is a message (from ``only``, unless -1).

    DONE, INTERRUPTED, or PENDING if none came for POLL_INTERVAL.
    """
    context = load(state + w.CONTEXT)
    lead = _doorbell(state, load(state + w.RANK)) + LEADER
    store_ordered(lead + STATUS, POLLING)
    full_fence()
    spins = load(context + SPINS)
    looks = spins + (load(context + YIELDS) if eager else 0)
    code = PENDING
    until = read_coarse_clock(state + w.YIELD_TIMESPEC) + LONGEST_YIELDING
    for number in range(looks):
        if _find(state, only) != 0:
            code = DONE
            break
        if number < spins:
            spin_hint()
        else:
            rebalance_sometimes(context)
            sched_yield()
            if read_coarse_clock(state + w.YIELD_TIMESPEC) > until:
                break
    if code == PENDING:
        rung = load_ordered(lead)
        store_ordered(lead + STATUS, ASLEEP)
        full_fence()
        if _find(state, only) == 0 and load_ordered(state + w.ATTENTION) == 0:
            _sleep(state, lead, rung)
        if _find(state, only) != 0:
            code = DONE
    if load_acquire(state + w.ATTENTION) != 0:
        code = INTERRUPTED
    if code == DONE:
        store_ordered(lead + STATUS, NOBODY)
        full_fence()
    else:
        leave(state)
    return code


@kernel
def watch(state):
    """Sleep, as the follower, until a message is there that nobody takes: DONE, INTERRUPTED or PENDING."""
    pair = _doorbell(state, load(state + w.RANK)) + FOLLOWER
    grace = load(state + GRACE)
    store(grace + 8, _SHORTEST_GRACE)
    for _ in range(_WATCHES):
        rung = load_ordered(pair)
        fetch_add(pair + STATUS, 1)
        full_fence()
        if _any_message(state) == 0 and load_ordered(state + CLOSING) == 0:
            _sleep(state, pair, rung)
        fetch_add(pair + STATUS, -1)
        if load_acquire(state + CLOSING) != 0:
            return INTERRUPTED
        if _any_message(state) == 0:
            if load_ordered(pair) == rung:
                return PENDING
            continue
        led = load_acquire(state + LED)
        syscall(FUTEX, state + CLOSING, FUTEX_WAIT, 0, grace, 0, 0)
        if load_acquire(state + LED) == led and _any_message(state) != 0:
            return DONE
        store(grace + 8, min(2 * load(grace + 8), _LONGEST_GRACE))
    return PENDING


@kernel
def abandon(state, peer):
    """Take nothing more from a peer."""
    store_release(peer_of(state, peer) + w.CURRENT, w.BROKEN)
    return 0


@kernel
def bring_to_python(state, everybody):
    """Bring the leader of this rank, or everybody that sleeps, back to Python."""
    store_ordered(state + w.ATTENTION, 1)
    doorbell = _doorbell(state, load(state + w.RANK))
    _wake(doorbell + LEADER)
    if everybody != 0:
        store_ordered(state + CLOSING, 1)
        _wake(doorbell + FOLLOWER)
        _wake(doorbell + ROOM)
    return 0
