"""Read and check values that ranks have written into the store for each other.

Where the store asks for no proof, any process may have written them. Values that no rank can have written are
dropped, with a warning; all checks are here, so that the callers need none.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Container, Iterator

from torchestra.store.rate_limited import RateLimitedWarnings

UNREADABLE = (ValueError, TypeError, LookupError, RecursionError)
"""What reading comes to of what no rank can have written."""

warnings = RateLimitedWarnings(logging.getLogger(__name__))


def ranks_in(value: object, allowed: Container[int]) -> tuple[int, ...]:
    """Return the ranks in a list that came as JSON; raise ValueError for anything else."""
    if not isinstance(value, list) or not all(type(each) is int and each in allowed for each in value):
        raise ValueError(f"not a list of ranks that may stand there: {value!r:.100}")
    return tuple(value)


def read_text(value: object) -> str:
    """Return a text that came as JSON. ValueError: it is none."""
    if not isinstance(value, str):
        raise ValueError(f"not a text: {value!r:.100}")
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
            warnings.warn("dropped a word that no rank can have written of %s: %.100r", what, word)


def read_proposal(text: bytes, size: int) -> tuple[int, ...] | None:
    """Return the ranks that shall go on, in ascending order; None if no rank can have proposed that."""
    try:
        ranks = ranks_in(json.loads(text), range(size))
        if not ranks or list(ranks) != sorted(set(ranks)):
            raise ValueError(f"not ranks in ascending order: {text!r:.100}")
    except UNREADABLE as error:
        warnings.warn("dropped a proposal that no rank can have made: %r", error)
        return None
    return ranks
