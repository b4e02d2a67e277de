"""A store in a file, for processes that share a file system."""

from __future__ import annotations

import os
from collections.abc import Sequence

from torchestra.arguments.annotations import checked_methods
from torchestra.errors import InvalidArgumentError, QueueEmptyError, shown
from torchestra.store.base import (
    Store,
    Value,
    check_amount,
    check_integer,
    check_key,
    check_keys,
    check_pairs,
    encode_value,
    missing_keys_error,
)
from torchestra.store.filelog import LONGEST, Kind
from torchestra.store.sharedfile import SharedFile
from torchestra.types import Timeout


@checked_methods
class FileStore(Store):
    """A store in a file that every rank can read and write.

    Each change is a record at the end of the file, written under a lock (``flock``); each user replays
    what is new. If a process is killed while it writes, the next writer cuts off its incomplete
    record. A wait wakes up when the file changes (inotify), and looks every 10 to 50 ms besides, as
    the system does not see what other hosts change. So waiting ``queue_pop`` callers are served in no
    particular order.

    With a ``world_size``, the file is deleted when that many users have joined and the last has left
    (:meth:`close`, garbage collection, or any end of its process); and a file whose remaining users are all
    killed processes of this host is left over from an earlier job, so it is started anew. Without a
    ``world_size``, the file and its keys stay.

    Args:
        file_name: the file; created, readable by this user only, if it does not exist. A file that belongs
            to another user, or that others may write to, is refused, and so is a symbolic link. Its directory
            must exist, on a file system with working locks.
        world_size: how many users there will be; negative or None if unknown.

    Raises:
        InvalidArgumentError: the path cannot be opened for reading and writing, or is not safe to use.
        DistStoreError: the file does not hold a FileStore, or cannot be locked.
    """

    def __init__(self, file_name: str | os.PathLike[str], world_size: int | None = -1) -> None:
        try:
            path = os.path.abspath(os.fspath(file_name))
            if b"\0" in os.fsencode(path):
                raise ValueError
        except (TypeError, ValueError):  # UnicodeEncodeError is one
            raise InvalidArgumentError(
                f"FileStore: `file_name` must be a path, got {shown(file_name)}"
            ) from None
        world_size = -1 if world_size is None else check_integer("world_size", world_size)
        self._original: FileStore | None = None
        self._file = SharedFile(path, world_size)
        self._file.join(self)

    @property
    def path(self) -> str:
        """Return the absolute path of the file."""
        return self._file.path

    def set(self, key: str, value: Value) -> None:
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        pairs = [(key, self._fitting(value)) for key, value in check_pairs(keys, values)]
        with self._file.writing() as write:
            write([(Kind.SET, key, value) for key, value in pairs])

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self.await_values(keys)

    def await_values(self, keys: Sequence[str], timeout: Timeout | None = None) -> list[bytes]:
        keys = check_keys(keys)
        timeout_s = self._seconds(timeout)
        missing = keys
        for _ in self._file.changes(timeout_s):
            with self._file.reading() as table:
                missing = table.missing_values(keys)
                if not missing:
                    return [value for value in map(table.get, keys) if value is not None]
        raise missing_keys_error(self, missing, timeout_s)

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        keys = check_keys(keys)
        timeout_s = self._seconds(timeout)
        missing = keys
        for _ in self._file.changes(timeout_s):
            with self._file.reading() as table:
                missing = table.missing(keys)
                if not missing:
                    return
        raise missing_keys_error(self, missing, timeout_s)

    def check(self, keys: Sequence[str]) -> bool:
        keys = check_keys(keys)
        with self._file.reading() as table:
            return not table.missing(keys)

    def add(self, key: str, amount: int) -> int:
        check_key(key)
        amount = check_amount(amount, self)
        with self._file.writing() as write:
            total = write.table.sum(key, amount)
            write([(Kind.SET, key, str(total).encode())])
            return total

    def append(self, key: str, value: Value) -> None:
        check_key(key)
        tail = self._fitting(encode_value(value))
        with self._file.writing() as write:
            write([(Kind.APPEND, key, tail)])

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        check_key(key)
        expected, desired = encode_value(expected_value), self._fitting(encode_value(desired_value))
        with self._file.writing() as write:
            if write.table.compared(key, expected):
                write([(Kind.SET, key, desired)])
                return desired
            held = write.table.get(key)
            return expected if held is None else held

    def delete_key(self, key: str) -> bool:
        check_key(key)
        with self._file.writing() as write:
            if key not in write.table:
                return False
            write([(Kind.DELETE, key, b"")])
            return True

    def list_keys(self) -> list[str]:
        with self._file.reading() as table:
            return table.listed()

    def queue_push(self, key: str, value: Value) -> None:
        check_key(key)
        encoded = self._fitting(encode_value(value))
        with self._file.writing() as write:
            write([(Kind.PUSH, key, encoded)])

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        check_key(key)
        timeout_s = self._seconds(None) if block else 0.0
        for _ in self._file.changes(timeout_s):
            if self.queue_len(key) == 0:
                continue
            with self._file.writing() as write:
                value = write.table.first(key)
                if value is not None:
                    write([(Kind.POP, key, b"")])
                    return value
        if block:
            raise missing_keys_error(self, [key], timeout_s)
        raise QueueEmptyError(f"queue {key!r} of {self} is empty")

    def queue_len(self, key: str) -> int:
        check_key(key)
        with self._file.reading() as table:
            return table.queue_len(key)

    def clone(self) -> Store:
        clone = super().clone()
        assert isinstance(clone, FileStore)
        # The file counts the original as its user, so the original must live as long as its clones.
        clone._original = self._original or self
        return clone

    def close(self) -> None:
        self._file.leave()

    def __repr__(self) -> str:
        return f"FileStore({self.path})"

    def _fitting(self, value: bytes) -> bytes:
        if len(value) > LONGEST:
            raise InvalidArgumentError(f"a value of {self} may have up to 4 GiB, got {len(value)} bytes")
        return value
