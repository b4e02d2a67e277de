"""The texts of errors about ranks that called different operations, or with different thresholds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torchestra.engine import layout as at
from torchestra.engine import operations
from torchestra.engine.diagnosis.differing_calls import diagnose_calls
from torchestra.engine.failure.collecting import RankView, places_of
from torchestra.engine.kernels import shared_words
from torchestra.engine.memory.arena import Arena
from torchestra.engine.recorder.callsites import call_site
from torchestra.errors import named_globally

LoadWord = Callable[[int], int]
"""Reads a word of this rank's context."""


def differing_thresholds(arena: Arena, load_word: LoadWord) -> str:
    """Return this rank's thresholds, if another rank came to the operation with others; or nothing."""
    sequence = load_word(at.SEQUENCE)
    digests = {
        (arena.load_word(arena.flag_line(rank, sequence) + at.META) & ~at.EAGER) >> at.DIGEST_BIT
        for rank in range(arena.layout.size)
    }
    if len(digests) == 1:
        return ""
    return (
        f" with thresholds of its own (direct={load_word(at.DIRECT)}, chunk={load_word(at.CHUNK)},"
        f" share={load_word(at.SHARE)}, eager={load_word(at.EAGER_BYTES)},"
        f" single_copy={load_word(at.SINGLE_COPY)} bytes; all ranks must have the same)"
    )


def mismatch_text(
    group: str,
    number: int,
    calls: Mapping[int, str],
    global_ranks: Sequence[int],
    describe: Callable[[int], str] | None = None,
) -> str:
    """Return what the ranks of a group have called as an operation, and which of them differ from most.

    Args:
        calls: by rank, the call and the line of the program.
        global_ranks: as for named_globally().
        describe: names a rank, where its number does not do.
    """
    describe = describe or (lambda rank: named_globally((rank,), global_ranks))
    lines = "".join(f"\n  {describe(rank)} called {call}" for rank, call in calls.items())
    return (
        f"the ranks of group {group!r} called different operations (number {number} of the group):"
        f"\n{diagnose_calls(calls, global_ranks)}{lines}"
    )


class Rank(RankView, Protocol):
    """The rank that has found a mismatch (membership/rank_context.py)."""

    group_ranks: Sequence[int]

    def load_word(self, offset: int) -> int:
        """Return a word of its context."""

    def describe(self, rank: int) -> str:
        """Name a rank."""


def late_mismatch(rank: Rank, site: str | None) -> str:
    """Return the differing calls of the ranks, after a kernel has returned LATE_MISMATCH.

    At which line these were is not known any more, as a rank may have gone on: so it is told where two of
    them are now, one that differs and one that does not.

    Args:
        site: where this rank's operation was called; None: in the calling thread.
    """
    arena, sequence = rank.arena, rank.load_word(at.DIFFERS)
    called = [_called(arena, each, sequence) for each in range(arena.layout.size)]
    lines = "".join(f"\n  {rank.describe(each)} called {call}" for each, call in enumerate(called))
    usual = max(called, key=called.count)
    other = next((each for each, call in enumerate(called) if call != usual), 0)
    same = [each for each, call in enumerate(called) if call == usual]
    seen = (other, rank.rank if rank.rank in same else same[0])
    own = site or call_site(otherwise=rank.program.ident)
    places = places_of(rank, seen, own)
    usually = f"{named_globally([rank.group_ranks[each] for each in same], rank.global_ranks)} {usual}"
    now = [f"{rank.describe(each)} {places[each]}" for each in dict.fromkeys(seen) if each in places]
    return (
        f"the ranks called different operations (number {sequence} of the group):\ndiagnosis: mismatch:"
        f" {rank.describe(other)} called {called[other]}, and {usually}; now {', and '.join(now)}{lines}"
    )


def operation_now(arena: Arena, rank: int, load_word: LoadWord) -> str:
    """Return which operation this rank is in."""
    sequence = load_word(at.SEQUENCE)
    if load_word(at.RESUME) == at.ENTERING:
        return f"operation {sequence}, before it was begun,"
    return f"operation {sequence}, {_called(arena, rank, sequence)}"


def _called(arena: Arena, rank: int, sequence: int) -> str:
    """Return what a rank called as an operation that is one of its last."""
    line = arena.flag_line(rank, sequence)
    if arena.load_word(line + at.FLAG) >> at.STEP_BITS != sequence:
        return "nothing yet"
    return operations.describe(arena.load_word(line + at.META), arena.load_word(line + at.COUNT))


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
