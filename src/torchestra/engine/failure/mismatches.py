"""The texts of errors about ranks that called different operations, or with different thresholds."""

from __future__ import annotations

from collections.abc import Callable

from torchestra.engine import layout as at
from torchestra.engine import operations
from torchestra.engine.kernels import shared_words
from torchestra.engine.memory.arena import Arena
from torchestra.engine.recorder.callsites import call_site

Word = Callable[[int], int]
"""Reads a word of this rank's context."""


def differing_thresholds(arena: Arena, word: Word) -> str:
    """Return this rank's thresholds, if another rank came to the operation with others; or nothing."""
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


def late_mismatch(arena: Arena, word: Word, describe: Callable[[int], str], site: str | None) -> str:
    """Return the differing calls of the ranks, after a kernel has returned LATE_MISMATCH.

    Args:
        describe: names a rank.
        site: where this rank's operation was called; None: in the calling thread.
    """
    sequence = word(at.DIFFERS)
    lines = "".join(
        f"\n  {describe(rank)} called {_called(arena, rank, sequence)}" for rank in range(arena.layout.size)
    )
    found = f"(found at {site or call_site()})"
    return f"the ranks called different operations (number {sequence} of the group):{lines}\n{found}"


def operation_now(arena: Arena, rank: int, word: Word) -> str:
    """Return which operation this rank is in."""
    sequence = word(at.SEQUENCE)
    if word(at.RESUME) == at.ENTERING:
        return f"operation {sequence}, before it was begun,"
    return f"operation {sequence}, {_called(arena, rank, sequence)}"


def _called(arena: Arena, rank: int, sequence: int) -> str:
    """Return what a rank called as an operation that is one of its last."""
    line = arena.flag_line(rank, sequence)
    if arena.word(line + at.FLAG) >> at.STEP_BITS != sequence:
        return "nothing yet"
    return operations.describe(arena.word(line + at.META), arena.word(line + at.COUNT))


def tell_call(arena: Arena, rank: int, call: str) -> None:
    """Publish what this rank called; the others read it once this rank has published its next step."""
    control = arena.control(rank)
    length = arena.set_text(control + at.CALLED, at.CALLED_BYTES, call)
    shared_words.store_ordered(arena.address + control + at.CALLED_LENGTH, length)


def call_of(arena: Arena, rank: int) -> str:
    """Return what another rank has published by :func:`tell_call`."""
    control = arena.control(rank)
    length = shared_words.load_acquire(arena.address + control + at.CALLED_LENGTH)
    return arena.text(control + at.CALLED, length)
