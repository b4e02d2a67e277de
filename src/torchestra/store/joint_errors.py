"""Errors that all ranks raise, each when it has read in the store that the others do.

A rank that raises may end its process next. With the process that serves a TCPStore, rank 0's as a rule, the
store ends, in which others may not have read the reason yet. So whoever is about to raise such an error is
counted, and the one that serves the store waits until all are, except for ranks that are known to have died;
but not for long, since others may have, or raise nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torchestra.errors import DistError, RankFailedError
from torchestra.store.base import Store
from torchestra.store.prefix import PrefixStore
from torchestra.store.tcp import TCPStore

_COUNT_SECONDS, _WAIT_SECONDS = 1.0, 5.0


@contextlib.contextmanager
def raising_together(store: Store, key: str, size: int, kind: type[DistError] = DistError) -> Iterator[None]:
    """Have all ranks know why the block fails before the store ends with the process of one of them.

    Errors of a kind, except those of somebody's time, leave the block where this process serves the store
    when all ranks have one, or after 5 seconds; elsewhere at once.

    Args:
        store: what the ranks share.
        key: names the block, the same on all of them and never used before.
        kind: of errors, such as all ranks raise if one does.
    """
    try:
        yield
    except kind as error:
        if not isinstance(error, TimeoutError):
            dead = error.ranks if isinstance(error, RankFailedError) else ()
            _await_others(store, f"{key}/raised", size - len(dead))
        raise


def _await_others(store: Store, key: str, size: int) -> None:
    """Count this rank under a key; where the store is served from here, wait until ``size`` have done so."""
    if isinstance(store, PrefixStore):
        key = store.full_key(key)
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return
    with contextlib.closing(store.clone()) as own, contextlib.suppress(DistError, OSError):
        own.set_timeout(_COUNT_SECONDS)  # it may be gone
        if own.add(key, 1) >= size:
            own.set(f"{key}/all", b"")
        elif store.is_served_here:
            own.wait([f"{key}/all"], _WAIT_SECONDS)
