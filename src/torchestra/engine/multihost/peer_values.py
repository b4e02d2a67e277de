"""Read and check values that ranks have written into the store for each other.

Where the store asks for no proof, any process may have written them. Values that no rank can have written are
dropped, with a warning; all checks are here, so that the callers need none.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from torchestra.store.rate_limited import RateLimitedWarnings
from torchestra.store.unreadable import UNREADABLE

V = TypeVar("V")

warnings = RateLimitedWarnings(logging.getLogger(__name__))


def ranks_in(value: object, allowed: Container[int]) -> tuple[int, ...]:
    """Return the ranks in a list that came as JSON; raise ValueError for anything else."""
    if not isinstance(value, list) or not all(type(each) is int and each in allowed for each in value):
        raise ValueError(f"not a list of valid ranks: {value!r:.100}")
    return tuple(value)


def read_text(value: object) -> str:
    """Return a text that came as JSON. ValueError: it is none."""
    if not isinstance(value, str):
        raise ValueError(f"not a text: {value!r:.100}")
    return value


def read_counts(value: object) -> list[int]:
    """Return numbers, from 0 on, in a list that came as JSON. ValueError: it has something else."""
    if not isinstance(value, list) or not all(type(each) is int and 0 <= each < 1 << 63 for each in value):
        raise ValueError(f"not a list of numbers: {value!r:.100}")
    return value


def ranks_in_words(text: bytes, count: int, size: int, what: str) -> Iterator[tuple[int, ...]]:
    """Yield the ranks in each word of a text, as ``3`` or ``3:1``.

    Args:
        text: as ranks have written it, word after word.
        count: how many ranks are in a word.
        what: the name of the text, for the warning about words that no rank can have written.
    """
    for word in text.split():
        ranks = word.split(b":")
        # isdigit(), for int() reads more; the length, for it does not read numbers of thousands of digits.
        if len(ranks) == count and all(
            rank.isdigit() and len(rank) < 10 and int(rank) < size for rank in ranks
        ):
            yield tuple(map(int, ranks))
        else:
            warnings.warn("ignored an invalid word in %s: %.100r", what, word)


class GrowingText(Generic[V]):
    """A text to which ranks append words: those that were there at the last look are not read again.

    A rank that waits for 1,000 others looks again and again at the list of those that have come.

    Args:
        read: reads words.
    """

    def __init__(self, read: Callable[[bytes], Iterable[V]]) -> None:
        self._read = read
        self._text = b""
        self._values: list[V] = []

    def values(self, text: bytes) -> Sequence[V]:
        """Return what all words of a text say."""
        if not text.startswith(self._text):
            self._text = b""
            self._values.clear()
        self._values += self._read(text[len(self._text) :])
        self._text = text
        return self._values


def read_proposal(text: bytes, size: int) -> tuple[tuple[int, ...], bytes] | None:
    """Return the ranks that shall go on, ascending, and the key; None if no rank can have proposed that."""
    try:
        value, key = json.loads(text)
        ranks, secret = ranks_in(value, range(size)), bytes.fromhex(key)
        if not ranks or list(ranks) != sorted(set(ranks)):
            raise ValueError(f"not ranks in ascending order: {text!r:.100}")
    except UNREADABLE as error:
        warnings.warn("ignored an invalid proposal of survivors: %r", error)
        return None
    return ranks, secret
