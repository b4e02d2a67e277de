"""torch's collectives over a store, for small control messages."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torchestra.errors import InvalidArgumentError
from torchestra.store import Store
from torchestra.store.base import DEFAULT_STORE_TIMEOUT, Value

__all__ = ["_ControlCollectives", "_StoreCollectives"]


class _ControlCollectives:
    """The base class of control collectives."""


class _StoreCollectives(_ControlCollectives):
    """Collectives over a store; a key serves one operation.

    Args:
        store: the store that all ranks share.
        rank: this rank.
        world_size: how many ranks there are.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._used: set[str] = set()

    def barrier(self, key: str, timeout: timedelta = DEFAULT_STORE_TIMEOUT, block: bool = True) -> None:
        """Wait until all ranks have called this; with ``block`` False, return at once."""
        self._begin(key)
        if self._store.add(f"{key}/num_members", 1) == self._world_size:
            self._store.set(f"{key}/last_member", "<val_ignored>")
        if block:
            self._store.wait([f"{key}/last_member"], timeout)

    def all_sum(self, key: str, data: int, timeout: timedelta = DEFAULT_STORE_TIMEOUT) -> int:
        """Return the sum of all ranks' numbers."""
        self._begin(key)
        self._store.add(f"{key}/sum", data)
        if self._store.add(f"{key}/num_members", 1) == self._world_size:
            self._store.set(f"{key}/last_member", "<val_ignored>")
        self._store.wait([f"{key}/last_member"], timeout)
        return self._store.add(f"{key}/sum", 0)

    def broadcast_send(self, key: str, data: Value, timeout: timedelta = DEFAULT_STORE_TIMEOUT) -> None:
        """Send some bytes to all other ranks."""
        self._begin(key)
        self._store.set(f"{key}:broadcast", data)

    def broadcast_recv(self, key: str, timeout: timedelta = DEFAULT_STORE_TIMEOUT) -> bytes:
        """Return the bytes that a rank sends to all others."""
        self._begin(key)
        return self._store.await_values([f"{key}:broadcast"], timeout)[0]

    def gather_send(self, key: str, data: Value, timeout: timedelta = DEFAULT_STORE_TIMEOUT) -> None:
        """Send some bytes to the rank that gathers."""
        self._begin(key)
        self._store.set(f"{key}:gather:{self._rank}", data)

    def gather_recv(self, key: str, data: Value, timeout: timedelta = DEFAULT_STORE_TIMEOUT) -> list[bytes]:
        """Return every rank's bytes, in order; ``data`` are this rank's."""
        self.gather_send(key, data, timeout)
        return self._store.await_values(self._keys(f"{key}:gather"), timeout)

    def scatter_send(
        self, key: str, data: Sequence[Value], timeout: timedelta = DEFAULT_STORE_TIMEOUT
    ) -> bytes:
        """Send each rank its bytes; return this rank's."""
        self._begin(key)
        if len(data) < self._world_size:
            raise InvalidArgumentError(
                f"scatter_send: `data` must have an entry for each of {self._world_size} ranks, got"
                f" {len(data)}"
            )
        self._store.multi_set(self._keys(f"{key}:scatter"), data)
        return self._store.get(f"{key}:scatter:{self._rank}")

    def scatter_recv(self, key: str, timeout: timedelta = DEFAULT_STORE_TIMEOUT) -> bytes:
        """Return the bytes that another rank sends to this one."""
        self._begin(key)
        return self._store.await_values([f"{key}:scatter:{self._rank}"], timeout)[0]

    def all_gather(self, key: str, data: Value, timeout: timedelta = DEFAULT_STORE_TIMEOUT) -> list[bytes]:
        """Return every rank's bytes, in order."""
        return self.gather_recv(key, data, timeout)

    def _keys(self, name: str) -> list[str]:
        return [f"{name}:{rank}" for rank in range(self._world_size)]

    def _begin(self, key: str) -> None:
        """Refuse a key that this rank has used before."""
        if key in self._used:
            raise InvalidArgumentError(f"Key {key} has already been used: use one key per operation")
        self._used.add(key)
