"""A count that one rank changes and all ranks read alike, without waiting for each other.

How many wait to be let in changes at any time, but all ranks must get one answer at one point of their
programs, or some would call ``grow()`` and others not. So a rank counts its *polls*, and a change takes
effect at a poll that no rank has come to yet. One word of the arena holds the counts before and after that
poll, and whether the change is settled. A rank at its poll number L writes L into its own word, and then
reads the shared one. The rank that changes the count, the *publisher*,

1. waits until all ranks have come past the change before;
2. writes (TENTATIVE, F, new, old) with F above the polls of all ranks, and then reads these again;
3. if they are all below F still, writes (SETTLED, F, new, old), and else (SETTLED, F, old, old).

A rank returns ``old`` if L < F, and otherwise waits until the word is settled and returns its ``new``.

Why all ranks that poll for the L-th time return the same. Stores and loads of the two words are sequentially
consistent: so if a rank at poll L >= F reads the shared word before it is TENTATIVE, the publisher's second
reading shows L, and the change comes to nothing: the rank has returned ``old``, and the word says ``old`` for
all others. Otherwise all ranks at polls from F on read the word TENTATIVE or SETTLED. By 1 no rank can read
it after the next change has been written while it still is before F. The publisher may die between 2 and 3;
then a rank that waits makes the word (SETTLED, F, old, old) by compare-and-exchange, as the publisher does
its third step, and one of them is taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torchestra.engine import layout as at
from torchestra.engine.kernels import shared_words
from torchestra.engine.membership.rank_context import RankContext

_COUNT_BITS, _POLL_BITS = 10, 40
MAX_COUNT = (1 << _COUNT_BITS) - 1
_SETTLED, _TENTATIVE = 0, 1
_FIRST_MARGIN, _LARGEST_MARGIN = 2, 1 << 12
_CHECK_S = 0.05


def _pack(state: int, since: int, new: int, old: int) -> int:
    return ((since << _COUNT_BITS | new) << _COUNT_BITS | old) << 1 | state


def _unpack(word: int) -> tuple[int, int, int, int]:
    counts = word >> 1
    return (
        word & 1,
        counts >> 2 * _COUNT_BITS,
        counts >> _COUNT_BITS & MAX_COUNT,
        counts & MAX_COUNT,
    )


class PendingJoiners:
    """One rank's view of the count, in the arena of its context. Rank 0 publishes."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        arena = context.arena
        start, block = arena.layout.agreement, arena.layout.agreement_bytes
        self._word = arena.address + start + at.WAITING_JOINERS
        first = arena.address + start + at.LINE + at.POLLS
        self._polls = [first + rank * block for rank in range(context.size)]
        self._own, self._polled = self._polls[context.rank], 0
        self._read, self._since, self._new, self._old = 0, 0, 0, 0
        self._margin = _FIRST_MARGIN

    def count(self) -> int:
        """Return the count; every rank must call this at the same points of its program."""
        self._polled += 1
        word = shared_words.store_then_load(self._own, self._polled, self._word)
        if word != self._read:
            self._take_over(word)
        return self._new if self._polled >= self._since else self._old

    def _take_over(self, word: int) -> None:
        state, since, new, old = _unpack(word)
        polled_at = time.monotonic()
        while state == _TENTATIVE and self._polled >= since:
            if time.monotonic() - polled_at > _CHECK_S:
                polled_at = time.monotonic()
                if 0 in self._context.gone():
                    shared_words.compare_exchange(self._word, word, _pack(_SETTLED, since, old, old))
            time.sleep(0)
            word = shared_words.load_acquire(self._word)
            state, since, new, old = _unpack(word)
        # A tentative word that does not concern this poll may change, and is read again at the next.
        self._read = word if state == _SETTLED else -1
        self._since, self._new, self._old = since, new, old

    def publish(self, count: int, between: Callable[[], None] = lambda: None) -> bool:
        """Change the count, on one thread of rank 0; return whether it has that value, or will have.

        Args:
            between: called between steps 2 and 3; for tests.
        """
        count = min(count, MAX_COUNT)
        _, since, current, _ = _unpack(shared_words.load_acquire(self._word))
        if count == current:
            return True
        polls = self._all_polls()
        if min(polls) < since:
            return False
        since = max(polls) + self._margin
        tentative = _pack(_TENTATIVE, since, count, current)
        shared_words.store_then_load(self._word, tentative, self._word)
        between()
        early = max(self._all_polls()) < since
        settled = _pack(_SETTLED, since, count if early else current, current)
        taken = shared_words.compare_exchange(self._word, tentative, settled) == tentative
        self._margin = _FIRST_MARGIN if early else min(2 * self._margin, _LARGEST_MARGIN)
        return early and bool(taken)

    def _all_polls(self) -> list[int]:
        # By an exchange, which is sequentially consistent.
        return [shared_words.compare_exchange(address, -1, -1) for address in self._polls]
