"""Errors that all ranks raise, each when it has read in the store that the others do.

A rank that raises may end its process next. With rank 0's process, as a rule, the store ends, in which others
may not have read the reason yet; and a launcher ends all other ranks as soon as one has failed. So whoever is
about to raise such an error waits for those that have yet to read it, except for ranks that are known to have
died, and not for long, since others may have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torchestra.errors import DistError, RankFailedError
from torchestra.store.base import Store

__all__ = ["raising_together"]

_WAIT_SECONDS = 5.0


@contextlib.contextmanager
def raising_together(store: Store, key: str, size: int, *kinds: type[Exception]) -> Iterator[None]:
    """Let errors of some kinds out of the block when all ranks have one, or after 5 seconds.

    Args:
        store: what the ranks share.
        key: names the block, the same on all of them and never used before.
        size: how many ranks there are.
        kinds: the errors that all ranks raise, if one does.
    """
    try:
        yield
    except kinds as error:
        dead = error.ranks if isinstance(error, RankFailedError) else ()
        with contextlib.suppress(DistError, OSError):
            store.barrier(f"{key}/raised", size - len(dead), _WAIT_SECONDS)
        raise
