"""Keep what a process knows of where a store's replicas are, though it asks the store for nothing.

A client learns the addresses with its requests (server.py). One that makes none while all replicas are
replaced, one after another, would find none of those it knows. So each process asks now and then. That is
often enough: a majority lives at any time, so that all can only be replaced in two rounds at least, and who
is replaced has been silent for VIEW_CHANGE_TIMEOUT_S before.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Protocol

from torchestra.errors import DistError
from torchestra.store.replicated.replica import VIEW_CHANGE_TIMEOUT_S
from torchestra.system.forking import forget_in_children

_EVERY_S = 1.5 * VIEW_CHANGE_TIMEOUT_S


class Pool(Protocol):
    """Has sessions with the replicas."""

    def refresh(self) -> None:
        """Ask a replica for the addresses."""


class Refresher:
    """Refreshes the addresses of a store's replicas in a thread, as long as this process has a pool open."""

    def __init__(self) -> None:
        self.forget()
        forget_in_children(self)

    def forget(self) -> None:
        """In a forked child, begin anew with the first pool that is used there."""
        self._lock = threading.RLock()  # stores are collected, and their pools closed, at any moment
        self._pools: weakref.WeakSet[Pool] = weakref.WeakSet()
        self._ended: threading.Event | None = None  # of the thread that runs

    def add(self, pool: Pool) -> None:
        """Refresh as long as this pool is open."""
        with self._lock:
            self._pools.add(pool)
            if self._ended is None:
                self._ended = threading.Event()
                threading.Thread(
                    target=self._run, args=(self._ended,), name="torchestra-store-addresses", daemon=True
                ).start()

    def discard(self, pool: Pool) -> None:
        """Note that a pool is closed."""
        with self._lock:
            self._pools.discard(pool)
            if not self._pools and self._ended is not None:
                self._ended.set()
                self._ended = None

    def _run(self, ended: threading.Event) -> None:
        while not ended.wait(_EVERY_S):
            with self._lock:
                pool = next(iter(self._pools), None)
                if pool is None:
                    self._ended = None if self._ended is ended else self._ended
                    return
            with contextlib.suppress(DistError):  # it is asked again soon
                pool.refresh()
            del pool
