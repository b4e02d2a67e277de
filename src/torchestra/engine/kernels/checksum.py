"""Copies that compute a checksum in passing, and the checksum alone.

It is a polynomial in the sums of the words of each page of 4096 bytes, modulo 2 to the power of 64. So it
changes with any one word, and with what is lost or misplaced; not with words that change places within a
page. Four pages take turns, because what prefetches from memory follows each page by itself.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine.kernels.copies import stream
from torchestra.engine.native.atomics import kernel, load, memcpy, store, stream_fence

_PAGE_BYTES = 4096
_BLOCK_BYTES = 4 * _PAGE_BYTES
_MULTIPLIER = 1099511628211  # odd, so that no page's sum is lost in what follows


@kernel
def copy_summed(target, source, length, checksum):
    """Copy ``length`` bytes into the cache; return the checksum of all that was copied before and of them.

    Args:
        target, source: where to, and what.
        length: in bytes, at least 8.
        checksum: of what was copied before, or 0.
    """
    for _ in range(length // _BLOCK_BYTES):
        first = 0
        second = 0
        third = 0
        fourth = 0
        for word in range(_PAGE_BYTES // 8):
            at = word * 8
            a = load(source + at)
            b = load(source + _PAGE_BYTES + at)
            c = load(source + 2 * _PAGE_BYTES + at)
            d = load(source + 3 * _PAGE_BYTES + at)
            store(target + at, a)
            store(target + _PAGE_BYTES + at, b)
            store(target + 2 * _PAGE_BYTES + at, c)
            store(target + 3 * _PAGE_BYTES + at, d)
            first += a
            second += b
            third += c
            fourth += d
        checksum = (checksum * _MULTIPLIER + first) * _MULTIPLIER + second
        checksum = (checksum * _MULTIPLIER + third) * _MULTIPLIER + fourth
        target += _BLOCK_BYTES
        source += _BLOCK_BYTES
    rest = length % _BLOCK_BYTES
    memcpy(target, source, rest)
    return _last_pages(source, rest, checksum)


@kernel
def stream_summed(target, source, length, checksum):
    """Do the same, but past the caches; all that is stored later is visible after it."""
    for _ in range(length // _BLOCK_BYTES):
        stream(target, source, _BLOCK_BYTES)
        checksum = summed(source, _BLOCK_BYTES, checksum)
        target += _BLOCK_BYTES
        source += _BLOCK_BYTES
    rest = length % _BLOCK_BYTES
    memcpy(target, source, rest)
    stream_fence()
    return _last_pages(source, rest, checksum)


@kernel
def summed(source, length, checksum):
    """Return the checksum that a copy of ``length`` bytes, at least 8, has."""
    for _ in range(length // _BLOCK_BYTES):
        first = 0
        second = 0
        third = 0
        fourth = 0
        for word in range(_PAGE_BYTES // 8):
            at = word * 8
            first += load(source + at)
            second += load(source + _PAGE_BYTES + at)
            third += load(source + 2 * _PAGE_BYTES + at)
            fourth += load(source + 3 * _PAGE_BYTES + at)
        checksum = (checksum * _MULTIPLIER + first) * _MULTIPLIER + second
        checksum = (checksum * _MULTIPLIER + third) * _MULTIPLIER + fourth
        source += _BLOCK_BYTES
    return _last_pages(source, length % _BLOCK_BYTES, checksum)


@kernel
def _last_pages(source, length, checksum):
    """Return the checksum when ``length`` bytes, fewer than four pages, are added at the end."""
    for _ in range(length // _PAGE_BYTES):
        part = 0
        for word in range(_PAGE_BYTES // 8):
            part += load(source + word * 8)
        checksum = checksum * _MULTIPLIER + part
        source += _PAGE_BYTES
    rest = length % _PAGE_BYTES
    if rest:
        part = 0
        if rest % 8:
            part = load(
                source + rest - 8
            )  # overlaps the one before; all of it twice would lose its highest bit
        for word in range(rest // 8):
            part += load(source + word * 8)
        checksum = checksum * _MULTIPLIER + part
    return checksum
