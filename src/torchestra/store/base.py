"""The key-value store through which ranks meet before they can talk, and what every store promises."""

from __future__ import annotations

import copy
import operator
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Union

from torchestra.arguments.annotations import checked_methods, is_integer
from torchestra.errors import InvalidArgumentError, StoreTimeoutError, shown
from torchestra.store.secret import Secret, job_secret
from torchestra.system.deadline import Deadline
from torchestra.types import Timeout, timeout_seconds

__all__ = ["DEFAULT_STORE_TIMEOUT", "Store", "Value"]

DEFAULT_STORE_TIMEOUT = timedelta(seconds=300)
"""How long a store waits for a key by default."""

Value = Union[str, bytes, bytearray, memoryview]
"""A value to store: bytes, or a string, which is stored as UTF-8. Stores always return bytes."""

INTERNAL_PREFIX = "\0"
"""First character of a store's internal keys, which are neither listed nor counted."""

_LARGEST_AMOUNT = (1 << 63) - 1
_INTERPRETER_SLICE = 0.05
_THREAD_SLICE = 10.0


@checked_methods
class Store:
    """A map from string keys to bytes, shared by all ranks, in which a reader may wait for a writer.

    This is torch.distributed's ``Store``. To write a store of your own, subclass it and implement
    :meth:`set`, :meth:`get`, :meth:`add`, :meth:`compare_set` and :meth:`check`; :meth:`wait` (by
    polling), :meth:`multi_get`, :meth:`multi_set` and :meth:`barrier` are then provided, to be
    overridden where the store can do better. :meth:`append`, :meth:`delete_key`, :meth:`list_keys` (and
    :meth:`num_keys`, which counts it) and the queues raise NotImplementedError until overridden.

    All stores of torchestra may be used by several threads at once, and a wait in one thread holds up
    no other.

    A wait that ends without the key raises :class:`~torchestra.StoreTimeoutError`, which names the key,
    the store and the seconds waited; the store stays usable.
    """

    _timeout: timedelta = DEFAULT_STORE_TIMEOUT
    _secret: bytes | None = None

    @property
    def secret(self) -> bytes | None:
        """Return the secret that ranks prove to each other before they share memory.

        It can be set; the default is the environment variable TORCHESTRA_SECRET, or None.
        """
        return self._secret or job_secret(None)

    @secret.setter
    def secret(self, secret: Secret) -> None:
        self._secret = job_secret(secret)

    def set(self, key: str, value: Value) -> None:
        """Store ``value`` under ``key``, in place of what was there."""
        raise _unsupported(self, "set")

    def get(self, key: str) -> bytes:
        """Wait for ``key`` and return its value.

        Raises:
            StoreTimeoutError: the key was not set within :attr:`timeout`.
        """
        raise _unsupported(self, "get")

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        """Set ``key`` to ``desired_value`` if its value is ``expected_value``, as one step.

        A key that does not exist is created if ``expected_value`` is empty, and left alone otherwise.

        Returns:
            What the key holds afterwards; for a key left non-existent, ``expected_value``.
        """
        raise _unsupported(self, "compare_set")

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all ``keys`` exist now (as a value, or as a queue that is not empty)."""
        raise _unsupported(self, "check")

    def delete_key(self, key: str) -> bool:
        """Remove ``key`` (value and queue); return whether it existed."""
        raise _unsupported(self, "delete_key")

    def list_keys(self) -> list[str]:
        """Return the keys that hold a value, in no particular order. Queues are not listed."""
        raise _unsupported(self, "list_keys")

    def num_keys(self) -> int:
        """Return how many keys :meth:`list_keys` lists.

        A store's internal keys do not count: after ``set`` of two keys the number is 2 for every kind of
        store (torch's TCPStore and FileStore may return 3).
        """
        return len(self.list_keys())

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the number under ``key`` (0 if there is none), as one step.

        The number is kept as decimal text, so that ``get`` returns ``b"6"``.

        Returns:
            The new number.

        Raises:
            InvalidArgumentError: the key does not hold a number.
        """
        raise _unsupported(self, "add")

    def append(self, key: str, value: Value) -> None:
        """Append ``value`` to the value of ``key`` (empty if it does not exist), as one step."""
        raise _unsupported(self, "append")

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Wait until all ``keys`` exist.

        Args:
            keys: the keys; with none, the wait is over at once.
            timeout: how long to wait, a timedelta or seconds; :attr:`timeout` if None.

        Raises:
            StoreTimeoutError: some did not come in time; it names them.
        """
        keys = check_keys(keys)
        timeout_s = self._seconds(timeout)
        for _ in pauses(timeout_s):
            if self.check(keys):
                return
        missing = [key for key in keys if not self.check([key])]
        if missing:
            raise missing_keys_error(self, missing, timeout_s)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of ``keys`` in their order, waiting for all of them up to :attr:`timeout`.

        Raises:
            StoreTimeoutError: some did not come in time.
        """
        keys = check_keys(keys)
        self.wait(keys)
        return [self.get(key) for key in keys]

    def await_values(self, keys: Sequence[str], timeout: Timeout | None = None) -> list[bytes]:
        """Wait for ``keys`` and return their values: :meth:`wait` and :meth:`multi_get` in one.

        Args:
            keys: the keys.
            timeout: how long to wait, a timedelta or seconds; :attr:`timeout` if None.

        Raises:
            StoreTimeoutError: some did not come in time; it names them.
        """
        # wait may take only one argument in a user's subclass.
        if timeout is None:
            self.wait(keys)
        else:
            self.wait(keys, timeout)
        return self.multi_get(keys)

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Set each key to the value at the same place in ``values``.

        Raises:
            InvalidArgumentError: the numbers of keys and values differ; nothing is set.
        """
        for key, value in check_pairs(keys, values):
            self.set(key, value)

    def queue_push(self, key: str, value: Value) -> None:
        """Put ``value`` at the end of the queue ``key``. Queues and values have separate contents."""
        raise _unsupported(self, "queue_push")

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the oldest value from the queue ``key``; callers that wait are served in order of arrival.

        Args:
            key: the queue.
            block: wait up to :attr:`timeout` while the queue is empty.

        Raises:
            StoreTimeoutError: nothing came in time.
            QueueEmptyError: the queue is empty and ``block`` is False.
        """
        raise _unsupported(self, "queue_pop")

    def queue_len(self, key: str) -> int:
        """Return how many values the queue ``key`` holds; 0 if there is no such queue."""
        raise _unsupported(self, "queue_len")

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        """Wait until ``world_size`` callers have called this with the same ``key``.

        The key may be used for another round afterwards, unless one ended in a time-out.

        Args:
            key: the name of the barrier.
            world_size: how many callers must arrive.
            timeout: how long to wait, a timedelta or seconds; :attr:`timeout` if None.

        Raises:
            StoreTimeoutError: not all arrived in time; it says how many did.
        """
        check_key(key)
        world_size = check_integer("world_size", world_size)
        if world_size < 1:
            raise InvalidArgumentError(f"a barrier needs a world_size of at least 1, got {world_size}")
        timeout_s = self._seconds(timeout)
        number = self.add(f"{key}/num_members", 1)
        turn = (number - 1) // world_size
        if number % world_size == 0:
            self.set(f"{key}/last_member/{turn}", b"1")
        try:
            self.wait([f"{key}/last_member/{turn}"], timeout_s)
        except StoreTimeoutError:
            came = self.add(f"{key}/num_members", 0) - turn * world_size
            raise StoreTimeoutError(
                f"barrier {key!r} of {self}: {came} of {world_size} came within {timeout_s:g} s; "
                "the others are late, stuck or gone"
            ) from None

    def clone(self) -> Store:
        """Return another store object for the same data, with its own time-out (initially this one's)."""
        return copy.copy(self)

    def set_timeout(self, timeout: Timeout) -> None:
        """Set how long :meth:`get`, :meth:`wait` and the other waits may take: a timedelta or seconds."""
        self._timeout = timedelta(seconds=timeout_seconds(timeout, f"{type(self).__name__}.set_timeout"))

    @property
    def timeout(self) -> timedelta:
        """Return how long a wait may take by default; initially 300 seconds."""
        return self._timeout

    def has_extended_api(self) -> bool:
        """Return whether ``append``, ``multi_get`` and ``multi_set`` work, as in all stores of torchestra."""
        return type(self).append is not Store.append

    def close(self) -> None:
        """Release the store's resources (connections, a server, its share in a file) now.

        Otherwise garbage collection or the end of the process does so. Closing twice is no error.
        """

    def __repr__(self) -> str:
        return type(self).__name__

    def _seconds(self, timeout: Timeout | None) -> float:
        return self.timeout.total_seconds() if timeout is None else timeout_seconds(timeout)


def check_key(key: str) -> str:
    if not isinstance(key, str):
        raise InvalidArgumentError(f"a key of a store must be a string, got {shown(key)}")
    if not key.isascii() and not _is_text(key):
        raise InvalidArgumentError(f"a key of a store must be text that UTF-8 can hold, got {shown(key)}")
    if key.startswith(INTERNAL_PREFIX):
        raise InvalidArgumentError(f"a key of a store must not begin with a NUL character, got {shown(key)}")
    return key


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def check_keys(keys: Sequence[str]) -> list[str]:
    if isinstance(keys, (str, bytes)) or not isinstance(keys, Sequence):
        raise InvalidArgumentError(f"keys must be a list of strings, got {shown(keys)}")
    return [check_key(key) for key in keys]


def check_pairs(keys: Sequence[str], values: Sequence[Value]) -> list[tuple[str, bytes]]:
    names = check_keys(keys)
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence) or len(values) != len(names):
        size = len(values) if isinstance(values, Sequence) else repr(values)
        raise InvalidArgumentError(f"multi_set needs a value for every key: {len(names)} keys, {size} values")
    return [(name, encode_value(value)) for name, value in zip(names, values, strict=True)]


def check_integer(what: str, number: int) -> int:
    if not is_integer(number):
        raise InvalidArgumentError(f"`{what}` must be an int, got {shown(number)}")
    return operator.index(number)


def check_amount(amount: int, store: Store) -> int:
    number = check_integer("amount", amount)
    if abs(number) > _LARGEST_AMOUNT:
        raise InvalidArgumentError(
            f"{type(store).__name__}.add: `amount` must be an int of 64 bits, got {shown(amount)}"
        )
    return number


def encode_value(value: Value) -> bytes:
    if isinstance(value, str):
        if not value.isascii() and not _is_text(value):
            raise InvalidArgumentError(
                f"a value of a store must be bytes, or text that UTF-8 can hold, got {shown(value)}"
            )
        return value.encode()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise InvalidArgumentError(f"a value of a store must be bytes or a string, got {type(value).__name__}")


def parse_number(key: str, value: bytes) -> int:
    try:
        if len(value) > 40:
            raise ValueError
        return int(value)
    except ValueError:
        shown = value if len(value) <= 40 else value[:37] + b"..."
        raise InvalidArgumentError(f"add needs a number, but key {key!r} holds {shown!r}") from None


def missing_keys_error(store: Store, missing: Sequence[str], timeout_s: float) -> StoreTimeoutError:
    """Return the error for keys that were not set in ``store`` within ``timeout_s``."""
    named = ", ".join(repr(key) for key in missing[:8])
    if len(missing) > 8:
        named += f" and {len(missing) - 8} more"
    return StoreTimeoutError(
        f"wait timeout after {timeout_s * 1000:.0f}ms, keys: {named} did not come to {store}; the rank that"
        " sets it is late, stuck or gone; look at its output, or raise the time-out"
    )


def interpreter_slice(remaining: float) -> float:
    """Return how long a call into C may block: short on the main thread, because signals are handled there.

    Other threads have no signals to handle, and thousands of them may wait.
    """
    longest = _INTERPRETER_SLICE if threading.current_thread() is threading.main_thread() else _THREAD_SLICE
    return max(0.0, min(remaining, longest))


def pauses(timeout_s: float) -> Iterator[None]:
    """Yield at once, then after pauses that grow from 1 ms to 50 ms, and a last time after ``timeout_s``."""
    return Deadline(timeout_s).polls(0.001, _INTERPRETER_SLICE)


def interruptible_sleep(timeout_s: float) -> None:
    """Sleep, in slices short enough for signals to be handled."""
    until = time.monotonic() + timeout_s
    while (remaining := until - time.monotonic()) > 0:
        time.sleep(interpreter_slice(remaining))


def _unsupported(store: Store, method: str) -> NotImplementedError:
    return NotImplementedError(f"{type(store).__name__} does not support {method}")
