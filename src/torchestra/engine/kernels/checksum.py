"""A copy that computes a checksum in passing, while what it copies is in the first-level cache."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

from __future__ import annotations

from torchestra.engine.native.atomics import kernel, load, memcpy

LINE_BYTES = 4096
_MULTIPLIER = 1099511628211  # odd, so that no line's sum is lost in what follows


@kernel
def copy_summed(target, advance, source, length, checksum):
    """Copy ``length`` bytes, and return the checksum of them and of all that was copied before.

    It is a polynomial in the sums of the words of each line of 4096 bytes, modulo 2 to the power of 64. So it
    changes with any one word, and with what is lost or misplaced; not with words that change places within a
    line.

    Args:
        target: where to; only the next line is written there if ``advance`` is 0, for the checksum alone.
        advance: LINE_BYTES, or 0.
        source: what to copy.
        length: in bytes, at least 8.
        checksum: of what was copied before, or 0.
    """
    for _ in range(length // LINE_BYTES):
        memcpy(target, source, LINE_BYTES)
        part = 0
        for word in range(LINE_BYTES // 8):
            part += load(source + word * 8)
        checksum = checksum * _MULTIPLIER + part
        target += advance
        source += LINE_BYTES
    rest = length % LINE_BYTES
    if rest:
        memcpy(target, source, rest)
        part = load(source + rest - 8)  # the last word, which may overlap the one before
        for word in range(rest // 8):
            part += load(source + word * 8)
        checksum = checksum * _MULTIPLIER + part
    return checksum
