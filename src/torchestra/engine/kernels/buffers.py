"""Where the pieces of an operation lie in the arena, and how they are copied out of it."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine import layout as at
from torchestra.engine.kernels.copies import copy_past_caches, stream
from torchestra.engine.kernels.waiting import current_line
from torchestra.engine.native.atomics import kernel, load, memcpy, store, stream_fence
from torchestra.engine.recorder.clock import now

SLOTS, SLOT_BYTES, CHUNK_BUFFERS, CHUNK_BUFFER_BYTES, SEQUENCE = (
    at.SLOTS,
    at.SLOT_BYTES,
    at.CHUNK_BUFFERS,
    at.CHUNK_BUFFER_BYTES,
    at.SEQUENCE,
)
SIZE, STREAM_ABOVE = at.SIZE, at.STREAM_ABOVE
PAYLOAD, PAYLOAD_BYTES = at.PAYLOAD, at.PAYLOAD_BYTES
EAGER_SLOTS, EAGER_SLOT_BYTES, WINDOW = at.EAGER_SLOTS, at.EAGER_SLOT_BYTES, at.WINDOW
FILLS, FILL_TICKS = at.FILLS, at.FILL_TICKS

_MEASURED_BYTES = 1 << 15
_MEASURED_EVERY = 64
_FIRST_MEASURED = 7
_MUCH_FASTER = 2
_PAST_CACHES_FROM = 1 << 12

SHARED_PATH = 1 << 60
"""RESUME of an operation that goes on over the peers' own tensors."""


@kernel
def buffer_of(context, rank, chunk):
    """Return where ``rank`` keeps chunk number ``chunk`` of the current operation.

    Chunk 0 may be written before the others have arrived: it goes into the slot of the operation's parity,
    which nobody reads any more (everybody was seen in the operation before, as waiting.enter was asked for
    peers 1 apart, and so had finished the one before that). Later chunks go through the three chunk buffers,
    and are written only after everybody has arrived, that is, has finished every earlier operation.
    """
    if chunk == 0:
        parity = load(context + SEQUENCE) & 1
        return load(context + SLOTS) + (rank * 2 + parity) * load(context + SLOT_BYTES)
    return load(context + CHUNK_BUFFERS) + (rank * 3 + chunk % 3) * load(context + CHUNK_BUFFER_BYTES)


@kernel
def first_piece(context, owner, longest):
    """:func:`buffer_of` chunk 0, or where the flag lies if the ``longest`` piece of all ranks fits there.

    Beside the flag it comes with the same cache line. A line is written again FLAGS operations later.
    """
    if longest <= PAYLOAD_BYTES:
        return current_line(context, owner) + PAYLOAD
    return buffer_of(context, owner, 0)


@kernel
def apart(longest):
    """Return how far apart ranks may be that write :func:`first_piece`, for waiting.enter."""
    return WINDOW - 1 if longest <= PAYLOAD_BYTES else 1


@kernel
def eager_slot(context, owner):
    """Return the address of the eager slot of ``owner`` for the current operation."""
    number = owner * WINDOW + (load(context + SEQUENCE) & (WINDOW - 1))
    return load(context + EAGER_SLOTS) + number * EAGER_SLOT_BYTES


@kernel
def eager_piece(context, owner, length):
    """Return where ``owner`` leaves a piece of up to EAGER_SLOT_BYTES, in an operation of eager.py."""
    if length <= PAYLOAD_BYTES:
        return current_line(context, owner) + PAYLOAD
    return eager_slot(context, owner)


@kernel
def fill(context, target, source, length):
    """Copy a piece into a buffer; peers see it if they see what is published later."""
    put(context, target, source, length)
    settle(context)


@kernel
def put(context, target, source, length):
    """Copy a part of a piece into a buffer, from which peers have read what was there before.

    Their caches have its lines still. Where a processor takes long to make other caches drop a line that it
    writes (virtual cores far from each other: 2 GB/s), stores past the caches are many times as fast, and
    elsewhere somewhat slower. So now and then two stretches are copied, one by each, and timed.
    :func:`settle` must come before the piece is published.
    """
    if length >= 2 * _MEASURED_BYTES:
        number = load(context + FILLS)
        store(context + FILLS, number + 1)
        if number & (_MEASURED_EVERY - 1) == _FIRST_MEASURED:
            began = now(context)
            memcpy(target, source, _MEASURED_BYTES)
            between = now(context)
            copy_past_caches(target + _MEASURED_BYTES, source + _MEASURED_BYTES, _MEASURED_BYTES)
            _note(context + FILL_TICKS, between - began)
            _note(context + FILL_TICKS + 8, now(context) - between)
            target += 2 * _MEASURED_BYTES
            source += 2 * _MEASURED_BYTES
            length -= 2 * _MEASURED_BYTES
    if length >= _PAST_CACHES_FROM and _past_caches(context):
        stream(target, source, length)
    else:
        memcpy(target, source, length)


@kernel
def _note(word, ticks):
    """Note how long it took; no more than twice as long as before, as it may have been interrupted."""
    before = load(word)
    store(word, min(ticks, 2 * before) if before > 0 else ticks)


@kernel
def settle(context):
    """Have peers see what was put, if they see what is published later.

    One look suffices for several parts: what changes the answer between them is a measurement, and that ends
    with a fence of its own.
    """
    if _past_caches(context):
        stream_fence()


@kernel
def _past_caches(context):
    return load(context + FILL_TICKS) > _MUCH_FASTER * load(context + FILL_TICKS + 8)


@kernel
def peer_slot(context, owner, reader):
    """Return which of the SIZE - 1 parts of the buffer of ``owner`` is meant for ``reader``."""
    size = load(context + SIZE)
    return (reader - owner - 1 + size) % size


@kernel
def streams(context, touched):
    """Return whether results are written past the caches.

    Args:
        touched: bytes of its own tensors that a rank reads and writes in the operation. Where there are many,
            those of all ranks do not stay in the last-level cache anyway.
    """
    return touched > load(context + STREAM_ABOVE)


@kernel
def copy_out(target, source, length, past_caches):
    """Copy into a result; past the caches when the whole of it is too large to stay in one anyway."""
    if past_caches and length >= 4096:
        stream(target, source, length)
    else:
        memcpy(target, source, length)
