"""The words of errors about ranks that called the same operation, but would have worked past each other."""

from __future__ import annotations

from collections.abc import Callable

from torchestra.engine import layout as at
from torchestra.engine.memory.arena import Arena


def differing_thresholds(arena: Arena, word: Callable[[int], int]) -> str:
    """Return this rank's thresholds, if another rank came to the current operation with others; or nothing.

    Args:
        word: reads a word of this rank's context.
    """
    sequence = word(at.SEQUENCE)
    digests = {
        (arena.word(arena.flag_line(rank, sequence) + at.META) & ~at.EARLY) >> at.DIGEST_BIT
        for rank in range(arena.layout.size)
    }
    if len(digests) == 1:
        return ""
    return (
        f" with thresholds of its own (direct={word(at.DIRECT)}, chunk={word(at.CHUNK)},"
        f" share={word(at.SHARE)}, early={word(at.EARLY_BYTES)} bytes; all ranks must have the same)"
    )
