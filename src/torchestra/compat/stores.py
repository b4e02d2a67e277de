"""torchestra's stores, adapted to behave as torch's: what they count, list, accept and refuse.

Each derives from torchestra's own store. ``isinstance`` also holds for the plain stores of torchestra that
groups were made over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

from torchestra import store as own
from torchestra.errors import InvalidArgumentTypeError, shown
from torchestra.store.base import DEFAULT_STORE_TIMEOUT, Value
from torchestra.store.tcp.client import WORKERS
from torchestra.store.tcp.protocol import Request
from torchestra.types import Timeout

__all__ = ["FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"]

_LARGEST_AMOUNT = (1 << 63) - 1
_NO_QUEUES = "queue support is not implemented: a FileStore has no queues, as in torch"


class _EveryStore(type):
    def __instancecheck__(cls, instance: object) -> bool:
        """Return whether an object is of this class, or of torchestra's own of this name."""
        same = _OWN.get(cls)
        return type.__instancecheck__(cls, instance) or (same is not None and isinstance(instance, same))


class Store(own.Store, metaclass=_EveryStore):
    """As ``torch.distributed.Store``: the base of all stores, and of classes in Python.

    A class must define ``set``, ``get``, ``add``, ``compare_set`` and ``check`` (in torch ``wait`` and
    ``clone`` too, which have a default here). ``append`` then uses ``compare_set``, and ``multi_get`` uses
    ``get``.
    """

    _extended: ClassVar[bool] = False

    def set(self, key: str | bytes, value: Value) -> None:
        super().set(_text(key), value)

    def get(self, key: str | bytes) -> bytes:
        return super().get(_text(key))

    def add(self, key: str | bytes, amount: int) -> int:
        number = int(amount) if isinstance(amount, bool) else amount
        if isinstance(number, int) and abs(number) > _LARGEST_AMOUNT:
            raise InvalidArgumentTypeError(
                f"{type(self).__name__}.add: `amount` must be an int of 64 bits, got {shown(amount)}"
            )
        return super().add(_text(key), number)

    def append(self, key: str | bytes, value: Value) -> None:
        """Append to a key's value; by ``compare_set`` if the class does not define it."""
        if self._extended:
            super().append(_text(key), value)
            return
        tail = value.encode() if isinstance(value, str) else bytes(value)
        wanted = tail
        held = self.compare_set(_text(key), b"", tail)
        while held != wanted:
            wanted = held + tail
            held = self.compare_set(_text(key), held, wanted)

    def compare_set(self, key: str | bytes, expected_value: Value, desired_value: Value) -> bytes:
        return super().compare_set(_text(key), expected_value, desired_value)

    def check(self, keys: Iterable[str | bytes]) -> bool:
        return super().check(_texts(keys))

    def delete_key(self, key: str | bytes) -> bool:
        return super().delete_key(_text(key))

    def wait(self, keys: Iterable[str | bytes], timeout: Timeout | None = None) -> None:
        super().wait(_texts(keys), timeout)

    def multi_get(self, keys: Iterable[str | bytes]) -> list[bytes]:
        names = _texts(keys)
        if self._extended:
            return super().multi_get(names)
        values = [self.get(name) for name in names]
        for value in values:
            if not isinstance(value, bytes):
                raise InvalidArgumentTypeError(
                    f"{type(self).__name__}.get must return bytes, it returned {shown(value)}"
                )
        return values

    def multi_set(self, keys: Iterable[str | bytes], values: Sequence[Value]) -> None:
        super().multi_set(_texts(keys), values)

    def queue_push(self, key: str | bytes, value: Value) -> None:
        super().queue_push(_text(key), value)

    def queue_pop(self, key: str | bytes, block: bool = True) -> bytes:
        return super().queue_pop(_text(key), block)

    def queue_len(self, key: str | bytes) -> int:
        return super().queue_len(_text(key))

    def set_timeout(self, timeout: Timeout) -> None:
        if not isinstance(timeout, (timedelta, float)):
            raise InvalidArgumentTypeError(
                f"{type(self).__name__}.set_timeout: `timeout` must be a timedelta or a float, got"
                f" {shown(timeout)}"
            )
        super().set_timeout(timeout)

    def has_extended_api(self) -> bool:
        """Return whether ``append``, ``multi_get`` and ``multi_set`` are one step each."""
        return self._extended


class HashStore(Store, own.HashStore):
    """As ``torch.distributed.HashStore``: a store in this process's memory."""

    _extended = True


class FileStore(Store, own.FileStore):
    """As ``torch.distributed.FileStore``: its users are counted in a key, and it has no queues."""

    _extended = True

    def __init__(self, file_name: str, world_size: int = -1) -> None:
        own.FileStore.__init__(self, file_name, world_size)

    def list_keys(self) -> list[str]:
        return [*super().list_keys(), "efcount/"]

    def delete_key(self, key: str | bytes) -> bool:
        """Remove a key; True whether or not there was one, as in torch."""
        super().delete_key(key)
        return True

    def queue_push(self, key: str | bytes, value: Value) -> None:
        raise NotImplementedError(_NO_QUEUES)

    def queue_pop(self, key: str | bytes, block: bool = True) -> bytes:
        raise NotImplementedError(_NO_QUEUES)

    def queue_len(self, key: str | bytes) -> int:
        raise NotImplementedError(_NO_QUEUES)

    def has_extended_api(self) -> bool:
        return False


class TCPStore(Store, own.TCPStore):
    """As ``torch.distributed.TCPStore``: the count of workers is a key, and only the default has queues.

    ``use_libuv`` False gives no queues; there is one server here, whichever is asked for.
    """

    _extended = True

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = DEFAULT_STORE_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
    ) -> None:
        self._libuv = bool(use_libuv)
        own.TCPStore.__init__(
            self,
            host_name,
            port,
            world_size,
            is_master,
            timeout,
            wait_for_workers,
            multi_tenant,
            master_listen_fd,
            use_libuv,
        )

    @property
    def libuvBackend(self) -> bool:
        """Return whether the caller asked for torch's default server, which has queues."""
        return self._libuv

    def num_keys(self) -> int:
        counted = self._ask(Request.CHECK, [WORKERS.encode()]) == [b"1"]
        return super().num_keys() + counted

    def queue_push(self, key: str | bytes, value: Value) -> None:
        self._check_queues()
        super().queue_push(key, value)

    def queue_pop(self, key: str | bytes, block: bool = True) -> bytes:
        self._check_queues()
        return super().queue_pop(key, block)

    def queue_len(self, key: str | bytes) -> int:
        self._check_queues()
        return super().queue_len(key)

    def _check_queues(self) -> None:
        if not self._libuv:
            raise NotImplementedError("queues not implemented on legacy TCPStore backend (use_libuv=False)")


class PrefixStore(Store, own.PrefixStore):
    """As ``torch.distributed.PrefixStore``: counts all keys of the store below it."""

    _extended = True

    def __init__(self, prefix: str, store: own.Store) -> None:
        if not isinstance(store, own.Store):
            raise InvalidArgumentTypeError(f"PrefixStore: `store` must be a Store, got {shown(store)}")
        own.PrefixStore.__init__(self, prefix, store)

    @property
    def _underlying_non_prefix_store(self) -> own.Store:
        """Return the innermost store."""
        store = self.underlying_store
        while isinstance(store, own.PrefixStore):
            store = store.underlying_store
        return store

    def num_keys(self) -> int:
        return self.underlying_store.num_keys()

    def clone(self) -> own.Store:
        return PrefixStore(self.prefix, self.underlying_store.clone())

    def has_extended_api(self) -> bool:
        return self.underlying_store.has_extended_api()


_OWN: dict[type, type] = {
    Store: own.Store,
    HashStore: own.HashStore,
    FileStore: own.FileStore,
    TCPStore: own.TCPStore,
    PrefixStore: own.PrefixStore,
}


def _text(key: Any) -> Any:
    """Return a key as text; the store refuses keys that are neither text nor bytes."""
    return key.decode() if isinstance(key, bytes) else key


def _texts(keys: Any) -> Any:
    if isinstance(keys, (str, bytes)) or not isinstance(keys, Iterable):
        return keys
    return [_text(key) for key in keys]
