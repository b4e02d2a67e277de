"""A part of another store, separated by a prefix."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torchestra.arguments.annotations import checked_methods
from torchestra.errors import InvalidArgumentError
from torchestra.store.base import Store, Value, check_key, check_keys
from torchestra.store.secret import Secret, job_secret
from torchestra.types import Timeout


@checked_methods
class PrefixStore(Store):
    """Puts ``prefix/`` before every key and passes all else on to another store.

    Several may share one store without seeing each other's keys, and they may be nested. :meth:`list_keys`
    and :meth:`num_keys` cover the keys below the prefix only (torch counts all of the underlying store's).
    The time-out is the underlying store's; :meth:`set_timeout` sets it there.

    Args:
        prefix: the string to put before the keys.
        store: the store that holds them.

    Raises:
        InvalidArgumentError: ``prefix`` is not a string, or ``store`` not a :class:`Store`.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        check_key(prefix)
        if not isinstance(store, Store):
            raise InvalidArgumentError(f"PrefixStore needs a Store of torchestra to prefix, got {store!r}")
        self._prefix = prefix
        self._store = store
        # A rank's stores have five prefixes, one in another: it asks the innermost store, not each of them.
        self._inner, self._start = store, f"{prefix}/"
        if type(store) is PrefixStore:  # a subclass may do something else
            self._inner, self._start = store._inner, store._start + self._start

    @property
    def underlying_store(self) -> Store:
        """Return the store that holds the keys (itself perhaps a PrefixStore)."""
        return self._store

    @property
    def prefix(self) -> str:
        """Return the prefix of the keys, without the ``/``."""
        return self._prefix

    @property
    def secret(self) -> bytes | None:
        return self._secret or self._store.secret

    @secret.setter
    def secret(self, secret: Secret) -> None:
        self._secret = job_secret(secret)

    def full_key(self, key: str) -> str:
        """Return the key with all prefixes: its name in the innermost store."""
        inner = self._inner
        return inner.full_key(self._full(key)) if isinstance(inner, PrefixStore) else self._full(key)

    def set(self, key: str, value: Value) -> None:
        self._inner.set(self._full(key), value)

    def get(self, key: str) -> bytes:
        return self._inner.get(self._full(key))

    def add(self, key: str, amount: int) -> int:
        return self._inner.add(self._full(key), amount)

    def append(self, key: str, value: Value) -> None:
        self._inner.append(self._full(key), value)

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        return self._inner.compare_set(self._full(key), expected_value, desired_value)

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        # wait may take only one argument in a user's subclass.
        if timeout is None:
            self._inner.wait(self._all_full(keys))
        else:
            self._inner.wait(self._all_full(keys), timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return self._inner.check(self._all_full(keys))

    def delete_key(self, key: str) -> bool:
        return self._inner.delete_key(self._full(key))

    def list_keys(self) -> list[str]:
        start = self._start
        return [key[len(start) :] for key in self._inner.list_keys() if key.startswith(start)]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._inner.multi_get(self._all_full(keys))

    def await_values(self, keys: Sequence[str], timeout: Timeout | None = None) -> list[bytes]:
        return self._inner.await_values(self._all_full(keys), timeout)

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        self._inner.multi_set(self._all_full(keys), values)

    def queue_push(self, key: str, value: Value) -> None:
        self._inner.queue_push(self._full(key), value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return self._inner.queue_pop(self._full(key), block)

    def queue_len(self, key: str) -> int:
        return self._inner.queue_len(self._full(key))

    def clone(self) -> Store:
        return PrefixStore(self._prefix, self._store.clone())

    def set_timeout(self, timeout: Timeout) -> None:
        self._inner.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        return self._inner.timeout

    def has_extended_api(self) -> bool:
        return self._inner.has_extended_api()

    def __repr__(self) -> str:
        return f"PrefixStore({self._prefix!r}, {self._store!r})"

    def _full(self, key: str) -> str:
        return f"{self._start}{check_key(key)}"

    def _all_full(self, keys: Sequence[str]) -> list[str]:
        return [f"{self._start}{key}" for key in check_keys(keys)]
