"""Copies of large memory past the caches."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine.native.atomics import kernel, memcpy, stream_fence, stream_line

_PAGE_BYTES = 4096
_PAGES = 4
_BLOCK_BYTES = _PAGES * _PAGE_BYTES
_STRETCH_BYTES = 256


@kernel
def stream(target, source, length):
    """Copy by streaming stores, which spare the read of the line that an ordinary store to memory costs.

    Four pages take turns, because what prefetches from memory follows each page by itself. What is written
    is not ordered with later stores before a stream_fence().
    """
    head = min((64 - target % 64) % 64, length)
    memcpy(target, source, head)
    target += head
    source += head
    length -= head
    for block in range(length // _BLOCK_BYTES):
        first = block * _BLOCK_BYTES
        for stretch in range(_PAGE_BYTES // _STRETCH_BYTES):
            for page in range(_PAGES):
                at = first + page * _PAGE_BYTES + stretch * _STRETCH_BYTES
                for line in range(_STRETCH_BYTES // 64):
                    stream_line(target + at + line * 64, source + at + line * 64)
    for line in range(length // _BLOCK_BYTES * (_BLOCK_BYTES // 64), length // 64):
        stream_line(target + line * 64, source + line * 64)
    rest = length % 64
    memcpy(target + length - rest, source + length - rest, rest)


@kernel
def copy_past_caches(target, source, length):
    """Do :func:`stream`; all that is stored later is visible after it."""
    stream(target, source, length)
    stream_fence()
    return 0
