"""A store of torchestra as one of torch.distributed, whose C++ calls its methods."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C import _distributed_c10d as c10d

from torchestra.store import PrefixStore, Store

_Base: Any = c10d.Store
_PROBE = "probe"

# C++ refers only to its half of a store, and calls methods of the Python half, which must outlive it. Prefix
# stores of groups may keep it as long as the process lives, so each adopted world leaves one here.
_alive: list[AdoptedStore] = []


class AdoptedStore(_Base):  # type: ignore[misc]
    """Passes everything on to a store of torchestra. Its errors come back as RuntimeErrors from torch's C++.

    Args:
        store: the store of torchestra.

    Attributes:
        adopted: the same.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.adopted = self._store = store
        self._asked = threading.local()
        super().set_timeout(store.timeout)
        _alive.append(self)

    def part_within(self, outer: Any) -> Store:
        """Return the adopted store as ``outer``, a chain of torch's prefix stores around this one, shows it.

        Torch's do not tell their prefixes. So ``outer`` is asked for a key, and this store sees what comes.
        """
        asked: list[str] = []
        self._asked.keys = asked
        try:
            outer.check([_PROBE])
        finally:
            del self._asked.keys
        before = asked[0].removesuffix(_PROBE)
        return PrefixStore(before.removesuffix("/"), self.adopted) if before else self.adopted

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value under a key."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return the sum."""
        return self._store.add(key, amount)

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of a key."""
        self._store.append(key, value)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set a key if it has the expected value; return what it then has."""
        return self._store.compare_set(key, expected_value, desired_value)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        if hasattr(self._asked, "keys"):
            self._asked.keys += keys
            return False
        return self._store.check(list(keys))

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether there was one."""
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        """Return how many keys there are."""
        return self._store.num_keys()

    def list_keys(self) -> list[str]:
        """Return the keys."""
        return self._store.list_keys()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for several keys and return their values."""
        return self._store.multi_get(list(keys))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Store several values."""
        self._store.multi_set(list(keys), list(values))

    def has_extended_api(self) -> bool:
        """Return whether it has ``append``, ``multi_get`` and ``multi_set``."""
        return True

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist."""
        self._store.wait(list(keys), timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long a wait may take."""
        super().set_timeout(timeout)
        self._store.set_timeout(timeout)

    def clone(self) -> AdoptedStore:
        """Return another client of the same store."""
        return AdoptedStore(self._store.clone())
