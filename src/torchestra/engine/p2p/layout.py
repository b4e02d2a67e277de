"""Where the words of the channels lie: in the shared area, in a mailbox's private state, in a record.

All offsets are in bytes, all words have 8. The area (zero-filled at the start) is::

    doorbells, one a rank | channels, by source and then by destination

and a channel (source, destination) is: the words below, SLOTS message headers of one cache line each, and a
ring of bytes for what does not fit into a header. Who may write which word is told in ring.py.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

PAGE = 4096

# A doorbell: what its rank sleeps on.
DOORBELL_BYTES = 128
RUNG = 0  # the futex word: counts how often a sleeper was woken
SLEEPING = 8  # 1 while the rank sleeps or is about to

# A channel.
HEAD = 0  # bytes that the source has put into the ring so far
TAKEN = 128  # headers that the destination has taken so far
TAIL = 136  # bytes that it has taken out of the ring so far
SLOTS_AT = PAGE
SLOT_BYTES = 64
SLOTS = PAGE // SLOT_BYTES
DATA_AT = 2 * PAGE

# A header. Messages of up to INLINE_BYTES travel in it.
STAMP = 0  # 1 + the number of the message in its channel, as soon as the header is complete
MESSAGE_TAG = 8
MESSAGE_BYTES = 16
MESSAGE_KIND = 24
READY = 32  # payload bytes that are in the ring when the header is published
INLINE = 32  # or the payload
INLINE_BYTES = SLOT_BYTES - INLINE

# The private state of a mailbox.
CONTEXT = 0  # address of the rank's context (layout.py), of which SPINS, YIELDS, POLL_INTERVAL … are read
DOORBELLS = 8  # address of the doorbell of rank 0
CHANNELS = 16  # address of the channel (0, 0)
CHANNEL_BYTES = 24
RING_BYTES = 32
PIECE_BYTES = 40
RANK = 48
SIZE = 56
POSTED = 64  # list of receives that wait for their message, oldest first
COMPLETED = 80  # list of records that are finished and that nobody waits for in a kernel
ATTENTION = 96  # not 0: whoever is in a kernel shall come back to Python
NEXT_SOURCE = 104  # where a search over all sources begins, for fairness
STORED = 112  # bytes of payload in the stores, all sources together
BUSY = 120  # who works with this state: 0, the record of a blocking call, or another token
QUEUEING = 128  # not 0: a blocking call must not go ahead of what is under way
SPIN_BUDGET = 136  # how often a wait spins now, SPINS at most
WAITS = 144  # how many waits there have been
YIELD_TIMESPEC = 152  # scratch of a wait that yields, two words
MAX_SPINS = 168  # how often a wait may spin that keeps the interpreter
HANDED_OVER = 176  # the thread whose blocking call Python is to take over, BUSY included; 0: none
OWN_RECORD = 192  # of a blocking call that an entry runs, or of a message that is sent at once
PEERS_AT = 320

# Of each peer, in the private state.
PEER_BYTES = 128
SENT = 0  # headers sent to it
SENT_BYTES = 8  # bytes put into the ring to it
SEEN_TAKEN = 16  # TAKEN and TAIL of that channel, as last read
SEEN_TAIL = 24
QUEUE = 32  # list of sends to it
GOT = 48  # headers taken from it
GOT_BYTES = 56  # bytes taken out of the ring from it
CURRENT = 64  # the record or stored message that is being received from it; 0: none; BROKEN
LEFT = 72  # how many of its bytes are still to come
PRESENT = 80  # how many of them are known to be in the ring
DESTINATION = 88  # where the next of them goes, or 0: nowhere
STORE = 96  # list of messages that came before a receive for them

BROKEN = -1  # CURRENT of a peer whose message was given up halfway

# A list is two words.
FIRST = 0
LAST = 8

# A record: a send, a receive, or (followed by its payload) a stored message.
RECORD_BYTES = 128
NEXT = 0
STAGE = 8
ADDRESS = 16
LENGTH = 24
KIND = 32
PEER = 40  # -1: any source
TAG = 48
SENDING = 56
MOVED = 64  # bytes sent, or arrived in the store
NOTIFY = 72  # not 0: goes to COMPLETED when it is finished
STORED_MESSAGE = 80
FROM = 88  # what was received: who sent it, how long it was and of what kind
FROM_LENGTH = 96
FROM_KIND = 104
ENTRY = 112  # the number of its entry in the rank's flight record, 0: none

# NOTIFY of a record that has no entry.
UNRECORDED = 2

# STAGE
QUEUED = 0
RUNNING = 1  # a byte of it has been moved
FINISHED = 2
MISMATCHED = 3  # finished, but the message was another than expected, and was thrown away
UNUSED = 4  # not in the kernels' hands yet

# What a kernel returns besides layout.DONE, PENDING, ABORTED and MISMATCH.
INTERRUPTED = 4
NO_MEMORY = 5
OCCUPIED = 6  # nothing was done: BUSY or QUEUEING
QUEUED_MEANWHILE = 7  # done, and somebody has queued a transfer who found the state BUSY

_LARGEST_RING = 1 << 18
_SMALLEST_RING = 1 << 14
_ALL_RINGS = 1 << 30


def ring_bytes(size: int) -> int:
    """Return the size of one ring among ``size`` ranks: a power of two."""
    ring = _LARGEST_RING
    while ring > _SMALLEST_RING and ring * size * size > _ALL_RINGS:
        ring //= 2
    return ring


def piece_bytes(size: int) -> int:
    """Return how much is copied, at most, between two publications."""
    return min(1 << 16, ring_bytes(size) // 4)


def doorbells_bytes(size: int) -> int:
    """Return the size of all doorbells, up to the first channel."""
    return -(-size * DOORBELL_BYTES // PAGE) * PAGE


def channel_bytes(size: int) -> int:
    """Return the size of one channel."""
    return DATA_AT + ring_bytes(size)


def channel_area_bytes(size: int) -> int:
    """Return the bytes that the channels of ``size`` ranks take of an arena: zero-filled, page-aligned."""
    return doorbells_bytes(size) + size * size * channel_bytes(size)


def new_private_state(context: int, area: int, rank: int, size: int) -> npt.NDArray[np.int64]:
    """Return the words of a rank's private state, with what all kernels of the channels read there.

    Args:
        context: the address of the rank's context.
        area: the address of the shared area.
    """
    words: npt.NDArray[np.int64] = np.zeros((PEERS_AT + size * PEER_BYTES) // 8, dtype=np.int64)
    for offset, value in (
        (CONTEXT, context),
        (DOORBELLS, area),
        (CHANNELS, area + doorbells_bytes(size)),
        (CHANNEL_BYTES, channel_bytes(size)),
        (RING_BYTES, ring_bytes(size)),
        (PIECE_BYTES, piece_bytes(size)),
        (RANK, rank),
        (SIZE, size),
    ):
        words[offset // 8] = value
    return words
