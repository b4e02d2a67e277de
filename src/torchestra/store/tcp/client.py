"""A store served over the network by one of the ranks, or by a separate process."""

from __future__ import annotations

import copy
import math
import time
import weakref
from collections.abc import Sequence

from torchestra.arguments.annotations import checked_methods
from torchestra.errors import InvalidArgumentError, QueueEmptyError, StoreTimeoutError, shown
from torchestra.store.base import (
    DEFAULT_STORE_TIMEOUT,
    INTERNAL_PREFIX,
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
from torchestra.store.secret import Secret, job_secret
from torchestra.store.tcp.address import Address
from torchestra.store.tcp.pool import GRACE_SECONDS, ConnectionPool, invalid_reply
from torchestra.store.tcp.protocol import Reply, Request
from torchestra.store.tcp.server import TCPStoreServer
from torchestra.store.tcp.shared_server import ServerLease, serves
from torchestra.types import Timeout

_MOST_DESCRIPTORS = 1 << 31
WORKERS = f"{INTERNAL_PREFIX}workers"


@checked_methods
class TCPStore(Store):
    """A store whose contents are in one process, the master's, and which the other processes reach over TCP.

    With ``is_master`` the object also runs the server, in a thread, until it is closed, collected, or its
    process ends; from then on operations of the others raise :class:`~torchestra.DistNetworkError`. Without a
    secret the store is for processes of one user on one host: whatever name of this host ``host_name`` is,
    the server listens, and clients connect, on the loopback interface. With a secret it is for all processes
    that know it. A client may be started before the master: it retries until the time-out. After a fork the
    child opens its own connections; the server stays with the parent.

    A value may have up to 1 GiB. All operations, the waiting ones too, react to Ctrl-C at once and end at
    their deadline: the time-out, plus a few seconds if the server does not answer.

    Args:
        host_name: where the server is, or the interface the master listens on (that one only).
            ``unix:@name`` is a Unix socket without a file, for processes of one user on one host.
        port: its port; for a master, 0 lets the system choose one (see :attr:`port`).
        world_size: how many TCPStores, the master's included, there will be; None if unknown.
        is_master: run the server here.
        timeout: for connecting, ``wait_for_workers`` and all later waits; a timedelta or seconds.
        wait_for_workers: a master with a ``world_size`` waits until that many have connected.
        multi_tenant: masters of this process with the same host and port share one server.
        master_listen_fd: a bound socket, for the master to listen on and to own.
        use_libuv: accepted because torch has it; torchestra has only one kind of server.
        secret: both sides prove that they know it; the environment variable TORCHESTRA_SECRET if None.

    Raises:
        DistNetworkError: no server answered in time, the port is in use, or the secrets differ; or
            there is no secret, and other hosts or users are involved.
        StoreTimeoutError: not all workers connected in time.
        InvalidArgumentError: the port is not one of 0 to 65535, or 0 for a client.

    Attributes:
        host: as given.
        port: where the server listens.
    """

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Timeout = DEFAULT_STORE_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
        *,
        secret: Secret = None,
    ) -> None:
        self.set_timeout(timeout)
        if world_size is not None:
            world_size = check_integer("world_size", world_size)
        if master_listen_fd is not None and not 0 <= master_listen_fd < _MOST_DESCRIPTORS:
            raise InvalidArgumentError(
                f"TCPStore: `master_listen_fd` must be an open descriptor, got {shown(master_listen_fd)}"
            )
        known = job_secret(secret)
        address = Address.checked(host_name, port, listening=is_master)
        lease = ServerLease(address, known, master_listen_fd, shared=multi_tenant) if is_master else None
        self._server: TCPStoreServer | None = lease.server if lease else None
        self._address = Address(address.host, self._server.port) if self._server else address
        self._secret = known
        self._pool = ConnectionPool(self._address, known, own=is_master)
        self._finalizer = weakref.finalize(self, _shut, self._pool, lease)
        try:
            self._pool.connect(self.timeout.total_seconds())
            if world_size is not None and world_size > 0:
                self._report_for_work(world_size, is_master and wait_for_workers)
        except BaseException:
            self.close()
            raise

    @property
    def host(self) -> str:
        return self._address.host

    @property
    def port(self) -> int:
        return self._address.port

    @property
    def is_served_here(self) -> bool:
        """Return whether the server is in this process."""
        return self._server is not None or serves(self.port)

    def set(self, key: str, value: Value) -> None:
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        fields = [field for key, value in check_pairs(keys, values) for field in (key.encode(), value)]
        self._ask(Request.SET, fields, 0)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self.await_values(keys)

    def await_values(self, keys: Sequence[str], timeout: Timeout | None = None) -> list[bytes]:
        return self._ask_and_wait(Request.GET, check_keys(keys), self._seconds(timeout))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        self._ask_and_wait(Request.WAIT, check_keys(keys), self._seconds(timeout))

    def add(self, key: str, amount: int) -> int:
        check_key(key)
        amount = check_amount(amount, self)
        return self._number(Request.ADD, [key.encode(), str(amount).encode()])

    def append(self, key: str, value: Value) -> None:
        check_key(key)
        self._ask(Request.APPEND, [key.encode(), encode_value(value)], 0)

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        check_key(key)
        values = [encode_value(expected_value), encode_value(desired_value)]
        return self._ask(Request.COMPARE_SET, [key.encode(), *values])[0]

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(Request.CHECK, [key.encode() for key in check_keys(keys)]) == [b"1"]

    def delete_key(self, key: str) -> bool:
        check_key(key)
        return self._ask(Request.DELETE, [key.encode()]) == [b"1"]

    def list_keys(self) -> list[str]:
        try:
            return [key.decode() for key in self._ask(Request.LIST, [], None)]
        except UnicodeDecodeError as error:
            raise invalid_reply(self._address, str(error)) from None

    def queue_push(self, key: str, value: Value) -> None:
        check_key(key)
        self._ask(Request.PUSH, [key.encode(), encode_value(value)], 0)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        check_key(key)
        if block:
            return self._ask_and_wait(Request.POP, [key], self._seconds(None))[0]
        code, answer = self._request(Request.POP, [b"", key.encode()], self._seconds(None))
        if code == Reply.EMPTY:
            raise QueueEmptyError(f"queue {key!r} of {self} is empty")
        return self._fields(code, answer, 1)[0]

    def queue_len(self, key: str) -> int:
        check_key(key)
        return self._number(Request.QUEUE_LENGTH, [key.encode()])

    def clone(self) -> Store:
        """Return a client of the same server, with its own time-out, and its own connections from its first
        request on.

        Groups make clones for threads that may never send a request, and a server's connections are limited.
        """
        twin = copy.copy(self)
        twin._server = None
        twin._pool = ConnectionPool(self._address, self._secret, own=self._server is not None)
        twin._finalizer = weakref.finalize(twin, _shut, twin._pool, None)
        return twin

    def close(self) -> None:
        self._finalizer()

    def __repr__(self) -> str:
        return f"TCPStore({self._address})"

    def _ask(self, request: Request, fields: list[bytes], count: int | None = 1) -> list[bytes]:
        """Return the fields of the reply; there must be ``count`` of them unless that is None."""
        return self._fields(*self._request(request, fields, self._seconds(None)), count)

    def _ask_and_wait(self, request: Request, keys: list[str], timeout_s: float) -> list[bytes]:
        milliseconds = str(math.ceil(timeout_s * 1000)).encode()
        code, answer = self._request(request, [milliseconds, *(key.encode() for key in keys)], timeout_s)
        if code == Reply.MISSING:
            raise missing_keys_error(self, [key.decode(errors="replace") for key in answer], timeout_s)
        return self._fields(code, answer, 0 if request == Request.WAIT else len(keys))

    def _number(self, request: Request, fields: list[bytes]) -> int:
        answer = self._ask(request, fields)[0]
        try:
            return int(answer)
        except ValueError:
            raise invalid_reply(self._address, f"{answer[:40]!r} in place of a number") from None

    def _request(self, request: Request, fields: list[bytes], timeout_s: float) -> tuple[int, list[bytes]]:
        code, answer = self._pool.request(request, fields, timeout_s, GRACE_SECONDS)
        if code == Reply.REFUSED and len(answer) == 1:
            raise InvalidArgumentError(f"{self}: {answer[0].decode(errors='replace')}")
        return code, answer

    def _fields(self, code: int, answer: list[bytes], count: int | None) -> list[bytes]:
        if code != Reply.OK or (count is not None and len(answer) != count):
            raise invalid_reply(self._address, f"code {code} with {len(answer)} fields")
        return answer

    def _report_for_work(self, world_size: int, wait: bool) -> None:
        """Count this store in; the last of a round sets the key that the master waits for."""
        started = time.monotonic()
        number = self._number(Request.ADD, [WORKERS.encode(), b"1"])
        turn = (number - 1) // world_size
        complete = f"{WORKERS}/{turn}"
        if number % world_size == 0:
            self._ask(Request.SET, [complete.encode(), b"1"], 0)
        if not wait:
            return
        timeout_s = max(0.0, self.timeout.total_seconds() - (time.monotonic() - started))
        try:
            self._ask_and_wait(Request.WAIT, [complete], timeout_s)
        except StoreTimeoutError:
            came = self._number(Request.ADD, [WORKERS.encode(), b"0"]) - turn * world_size
            raise StoreTimeoutError(
                f"Timed out after {self.timeout.total_seconds():g} seconds waiting for clients. "
                f"{came}/{world_size} clients joined. {self}: the others' ranks are late or gone, or look for"
                " the master elsewhere"
            ) from None


def _shut(pool: ConnectionPool, lease: ServerLease | None) -> None:
    pool.close()
    if lease is not None:
        lease.end()
