"""The client of a store of torch.distributed, above all the one that torchrun's agent serves.

Under torchrun the agent already listens on MASTER_PORT with torch's own TCPStore, so the ranks meet
there through torch's client. That client waits inside C++, where it ignores Ctrl-C and blocks the other
threads; so nothing here waits in it, but polls for keys every 1 to 50 ms.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from torchestra.errors import DistNetworkError, DistStoreError
from torchestra.store.authenticated_values import (
    UnauthenticatedValueError,
    is_authenticated,
    open_pieces,
    prove,
)
from torchestra.store.base import (
    Store,
    Value,
    check_amount,
    check_key,
    check_keys,
    encode_value,
    parse_number,
)
from torchestra.store.secret import SECRET_ADVICE
from torchestra.store.tcp.address import Address, dial
from torchestra.store.tcp.pool import retried
from torchestra.types import Timeout, timeout_seconds

_T = TypeVar("_T")
_REQUEST_SECONDS = 60.0
_LAST_SECONDS = 5.0
_clients: weakref.WeakSet[Any] = weakref.WeakSet()
"""The lock of each of torch's clients, held during its requests."""


class TorchStore(Store):
    """A store of torch.distributed, with the methods and errors of torchestra's stores.

    Queues are not supported.

    Args:
        store: an instance of ``torch.distributed.Store``.
        name: its name in messages; its type's name if None.
        proves: the job's secret, if values are to bear a proof that their writer knows it, and values without
            one are to be refused (see :mod:`torchestra.store.authenticated_values`); for keys that nobody
            else uses.
        within_host: whether only processes of this host can use the store.

    Anybody who can reach torch's store can use it; it knows no secrets. Ranks interpret its values as text
    only, and pass the memory that they share to processes that prove the job's secret, if there is one, and
    are of the same user (see :mod:`torchestra.engine.memory.fd_passing`).
    """

    def __init__(
        self,
        store: Any,
        name: str | None = None,
        proves: bytes | None = None,
        *,
        within_host: bool = False,
    ) -> None:
        self._store = store
        self.within_host = within_host
        self._proves = proves
        self._counted: set[str] = set()  # numbers, which torch's server counts and nobody can prove
        self._name = name or f"torch's {type(store).__name__}"
        self._asking = threading.RLock()  # clones share it
        _clients.add(self._asking)
        self.set_timeout(store.timeout)

    @property
    def torch_store(self) -> Any:
        """Return the store of torch.distributed."""
        return self._store

    def set(self, key: str, value: Value) -> None:
        check_key(key)
        encoded = self._authenticated(key, value)
        self._ask(lambda: self._store.set(key, encoded))

    def get(self, key: str) -> bytes:
        return self._opened(key, self._get(key))

    def _get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(self._ask(lambda: self._store.get(key)))

    def add(self, key: str, amount: int) -> int:
        check_key(key)
        amount = check_amount(amount, self)
        # torch's server closes the connection of a client that adds to a word; the client is then unusable.
        if self.check([key]):
            parse_number(key, self._get(key))
        self._counted.add(key)
        return int(self._ask(lambda: self._store.add(key, amount)))

    def append(self, key: str, value: Value) -> None:
        check_key(key)
        encoded = self._authenticated(key, value)
        self._ask(lambda: self._store.append(key, encoded))

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        check_key(key)
        expected = self._authenticated(key, expected_value) if encode_value(expected_value) else b""
        desired = self._authenticated(key, desired_value)
        return self._opened(key, bytes(self._ask(lambda: self._store.compare_set(key, expected, desired))))

    def check(self, keys: Sequence[str]) -> bool:
        keys = check_keys(keys)
        return bool(self._ask(lambda: self._store.check(keys)))

    def delete_key(self, key: str) -> bool:
        check_key(key)
        return bool(self._ask(lambda: self._store.delete_key(key)))

    def list_keys(self) -> list[str]:
        return [str(key) for key in self._ask(self._store.list_keys)]

    def __repr__(self) -> str:
        return self._name

    def _authenticated(self, key: str, value: Value) -> bytes:
        encoded = encode_value(value)
        return encoded if self._proves is None else prove(self._proves, key, encoded)

    def _opened(self, key: str, value: bytes) -> bytes:
        if key in self._counted and value.removeprefix(b"-").isdigit():
            return value
        if self._proves is None:
            if not is_authenticated(value):
                return value
            raise DistStoreError(f"{self}: other ranks have a secret, and this one has none; {SECRET_ADVICE}")
        opened = open_pieces(self._proves, key, value)
        if opened is None:
            raise UnauthenticatedValueError(
                f"{self}: the value of {key!r} was written by somebody who does not know this rank's secret,"
                f" and is not trusted; {SECRET_ADVICE}"
            )
        return opened

    def _ask(self, request: Callable[[], _T]) -> _T:
        try:
            with self._asking:
                return request()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise DistStoreError(f"{self}: {reason}; has the process that serves it ended?") from error


def connect_to_agent(host: str, port: int, timeout: Timeout, secret: bytes | None = None) -> TorchStore:
    """Return a client of the store that torchrun's agent serves.

    Args:
        host: MASTER_ADDR.
        port: MASTER_PORT.
        timeout: for connecting and for later waits; a timedelta or seconds.
        secret: the job's, if it has one. Then only values that its ranks have written are accepted.

    Raises:
        DistNetworkError: nobody listens there, or something other than torch's store does.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address = Address.checked(host, port, listening=False)
    started = time.monotonic()
    timeout_s = timeout_seconds(timeout)
    # torch's constructor waits for the server in C++, so it is called only when there is one.
    retried(address, lambda deadline: dial(address, deadline, secured=True).close(), timeout_s)
    remaining = max(1.0, min(timeout_s - (time.monotonic() - started), _REQUEST_SECONDS))
    try:
        store = TCPStore(host, port, world_size=None, is_master=False, timeout=timedelta(seconds=remaining))
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise DistNetworkError(f"torchrun's store at {address} did not answer: {reason}") from error
    adapter = TorchStore(store, f"torchrun's store ({address})", secret)
    adapter.set_timeout(timeout)
    return adapter


def _ask_no_more() -> None:
    """Keep other threads out of torch's client when the interpreter ends.

    A thread that returns from C++ to an interpreter that has ended crashes the process; this thread may still
    make requests. Other exit handlers that use a store run before this one, see :mod:`torchestra.store`.
    """
    for asking in tuple(_clients):
        asking.acquire(timeout=_LAST_SECONDS)


atexit.register(_ask_no_more)
