"""A store in this process's memory, for ranks that are threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from torchestra.arguments.annotations import checked_methods
from torchestra.errors import QueueEmptyError
from torchestra.store.base import (
    Store,
    Value,
    check_amount,
    check_key,
    check_keys,
    check_pairs,
    encode_value,
    interpreter_slice,
    missing_keys_error,
)
from torchestra.store.table import PendingPop, PendingWait, Table
from torchestra.types import Timeout


@checked_methods
class HashStore(Store):
    """A store for the threads of one process. :meth:`clone` returns another view of the same contents."""

    def __init__(self) -> None:
        self._table = Table()
        self._lock = threading.Lock()

    def set(self, key: str, value: Value) -> None:
        check_key(key)
        encoded = encode_value(value)
        with self._lock:
            self._table.set(key, encoded)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        check_key(key)
        amount = check_amount(amount, self)
        with self._lock:
            return self._table.add(key, amount)

    def append(self, key: str, value: Value) -> None:
        check_key(key)
        encoded = encode_value(value)
        with self._lock:
            self._table.append(key, encoded)

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        check_key(key)
        expected, desired = encode_value(expected_value), encode_value(desired_value)
        with self._lock:
            return self._table.compare_set(key, expected, desired)

    def check(self, keys: Sequence[str]) -> bool:
        keys = check_keys(keys)
        with self._lock:
            return not self._table.missing(keys)

    def delete_key(self, key: str) -> bool:
        check_key(key)
        with self._lock:
            return self._table.delete(key)

    def list_keys(self) -> list[str]:
        with self._lock:
            return self._table.listed()

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        pairs = check_pairs(keys, values)
        with self._lock:
            for key, value in pairs:
                self._table.set(key, value)

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        keys = check_keys(keys)
        came = threading.Event()
        with self._lock:
            if not self._table.missing(keys):
                return
            wait = self._table.add_wait(keys, came.set, values_only=False)
        self._await(came, wait, self._seconds(timeout))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        keys = check_keys(keys)
        came = threading.Event()
        values: list[bytes] = []

        def collect() -> None:
            # Runs under the lock, so no value can be deleted between its arrival and this read.
            values.extend(value for value in map(self._table.get, keys) if value is not None)
            came.set()

        with self._lock:
            if not self._table.missing_values(keys):
                collect()
                return values
            wait = self._table.add_wait(keys, collect, values_only=True)
        self._await(came, wait, self._seconds(None))
        return values

    def queue_push(self, key: str, value: Value) -> None:
        check_key(key)
        encoded = encode_value(value)
        with self._lock:
            self._table.push(key, encoded)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        check_key(key)
        came = threading.Event()
        taken: list[bytes] = []

        def take(value: bytes) -> bool:
            taken.append(value)
            came.set()
            return True

        with self._lock:
            value = self._table.pop(key)
            if value is not None:
                return value
            if not block:
                raise QueueEmptyError(f"queue {key!r} of {self} is empty")
            pop = self._table.add_pop(key, take)

        def give_back() -> None:
            for value in taken:
                self._table.push(key, value, front=True)

        self._await(came, pop, self._seconds(None), give_back)
        return taken[0]

    def queue_len(self, key: str) -> int:
        check_key(key)
        with self._lock:
            return self._table.queue_len(key)

    def _await(
        self,
        came: threading.Event,
        wait: PendingWait | PendingPop,
        timeout_s: float,
        interrupted: Callable[[], None] | None = None,
    ) -> None:
        deadline = time.monotonic() + timeout_s
        try:
            while not came.wait(interpreter_slice(deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    break
        except BaseException:
            with self._lock:
                self._table.cancel(wait)
                if interrupted is not None:
                    interrupted()
            raise
        with self._lock:
            if came.is_set():
                return
            missing = [wait.key] if isinstance(wait, PendingPop) else sorted(wait.missing)
            self._table.cancel(wait)
        raise missing_keys_error(self, missing, timeout_s)
