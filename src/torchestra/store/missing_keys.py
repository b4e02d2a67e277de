"""Finding the keys that a store lacks, in a few requests."""

from __future__ import annotations

from collections.abc import Sequence

from torchestra.store.base import Store


def missing_indices(store: Store, keys: Sequence[str]) -> list[int]:
    """Return the indices of the keys that the store does not have, in ascending order.

    A store only tells whether all of some keys exist, so the keys are searched by bisection: m missing keys
    of n cost O(m log n) requests.
    """
    missing: list[int] = []
    ranges = [(0, len(keys))]
    while ranges:
        start, stop = ranges.pop()
        if start == stop or store.check(keys[start:stop]):
            continue
        if stop - start == 1:
            missing.append(start)
        else:
            middle = (start + stop) // 2
            ranges += [(middle, stop), (start, middle)]
    return missing
