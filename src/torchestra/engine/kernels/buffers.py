"""Where the pieces of an operation lie in the arena, and how they are copied out of it."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine import layout as at
from torchestra.engine.kernels.copies import stream
from torchestra.engine.kernels.waiting import current_line
from torchestra.engine.native.atomics import kernel, load, memcpy

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
def eager_piece(context, owner, length):
    """Return where ``owner`` leaves a piece of up to EAGER_SLOT_BYTES, in an operation of eager.py."""
    if length <= PAYLOAD_BYTES:
        return current_line(context, owner) + PAYLOAD
    number = owner * WINDOW + (load(context + SEQUENCE) & (WINDOW - 1))
    return load(context + EAGER_SLOTS) + number * EAGER_SLOT_BYTES


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
