"""Copies that compute a checksum in passing, and the checksum alone.

It is a polynomial in the sums of pages of 4096 bytes, modulo 2 to the power of 64. Each word of a page is
combined with a key of its place, and then its halves are multiplied (as in NH: Black and others, *UMAC: Fast
and Secure Message Authentication*, 1999); the word itself is added, so that a change of one half is always
seen. Two values that differ otherwise have the same checksum by chance only, once in 2 to the power of 64
times; who looks for such values finds some, as the keys are known. Four pages take turns, because what
prefetches from memory follows each page by itself.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine.kernels.copies import stream
from torchestra.engine.native.atomics import kernel, load, memcpy, store, stream_fence

_PAGE_BYTES = 4096
_BLOCK_BYTES = 4 * _PAGE_BYTES
_MULTIPLIER = 1099511628211  # odd, so that no page's sum is lost in what follows
_KEY = 0x1F83D9ABFB41BD6B
# 2 to the power of 64 by the golden ratio: keys of neighbours differ in all bits.
_NEXT_KEY = -0x61C8864680B583EB
_LOW_HALF = 0xFFFFFFFF


@kernel
def _mixed(word, key):
    """Return what a word adds to its page's sum."""
    word ^= key
    return (word & _LOW_HALF) * ((word >> 32) & _LOW_HALF) + word


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
        key = _KEY
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
            first += _mixed(a, key)
            second += _mixed(b, key)
            third += _mixed(c, key)
            fourth += _mixed(d, key)
            key += _NEXT_KEY
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
        key = _KEY
        for word in range(_PAGE_BYTES // 8):
            at = word * 8
            first += _mixed(load(source + at), key)
            second += _mixed(load(source + _PAGE_BYTES + at), key)
            third += _mixed(load(source + 2 * _PAGE_BYTES + at), key)
            fourth += _mixed(load(source + 3 * _PAGE_BYTES + at), key)
            key += _NEXT_KEY
        checksum = (checksum * _MULTIPLIER + first) * _MULTIPLIER + second
        checksum = (checksum * _MULTIPLIER + third) * _MULTIPLIER + fourth
        source += _BLOCK_BYTES
    return _last_pages(source, length % _BLOCK_BYTES, checksum)


@kernel
def _last_pages(source, length, checksum):
    """Return the checksum when ``length`` bytes, fewer than four pages, are added at the end."""
    for _ in range(length // _PAGE_BYTES):
        checksum = checksum * _MULTIPLIER + _sum(source, _PAGE_BYTES)
        source += _PAGE_BYTES
    rest = length % _PAGE_BYTES
    if rest:
        part = _sum(source, rest)
        if rest % 8:
            part += _mixed(load(source + rest - 8), rest)  # overlaps the last whole word
        checksum = checksum * _MULTIPLIER + part
    return checksum


@kernel
def _sum(source, length):
    """Return the sum of the whole words of at most a page."""
    part = 0
    key = _KEY
    for word in range(length // 8):
        part += _mixed(load(source + word * 8), key)
        key += _NEXT_KEY
    return part
