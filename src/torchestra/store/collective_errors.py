"""Errors that all ranks raise, each after it has read the reason in the store.

A rank that raises may end its process next. When the process that serves a TCPStore ends, usually rank 0's,
the store ends too, and other ranks may not have read the reason yet. So each rank that is about to raise such
an error counts itself in the store, and the rank that serves the store waits until all ranks have done so,
except those known to be dead; but only briefly, since others may have died too, or may not raise at all.
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
def raise_on_all_ranks(
    store: Store, key: str, size: int, kind: type[DistError] = DistError
) -> Iterator[None]:
    """Let all ranks learn why the block fails before the process that serves the store may end.

    In the process that serves the store, an error of ``kind`` leaves the block when all ranks have one, or
    after 5 seconds; in other processes, and if it is a TimeoutError, at once.

    Args:
        store: the store that the ranks share.
        key: names the block; the same on all ranks, and never used before.
        kind: the class of errors that all ranks raise if one does.
    """
    try:
        yield
    except kind as error:
        if not isinstance(error, TimeoutError):
            dead = error.ranks if isinstance(error, RankFailedError) else ()
            _await_others(store, f"{key}/raised", size - len(dead))
        raise


def _await_others(store: Store, key: str, size: int) -> None:
    """Count this rank under a key; if this process serves the store, wait until ``size`` have done so."""
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
