"""A store served over the network by one of the ranks, or by a separate process."""

from __future__ import annotations

import copy
import time
import weakref
from functools import partial

from torchestra.arguments.annotations import checked_methods
from torchestra.errors import InvalidArgumentError, StoreTimeoutError, shown
from torchestra.store.base import (
    DEFAULT_STORE_TIMEOUT,
    INTERNAL_PREFIX,
    Store,
    check_integer,
)
from torchestra.store.secret import Secret, job_secret
from torchestra.store.tcp.address import Address
from torchestra.store.tcp.client_store import ClientStore, milliseconds
from torchestra.store.tcp.pool import GRACE_SECONDS, ConnectionPool
from torchestra.store.tcp.protocol import CHANGES, Request
from torchestra.store.tcp.server import TCPStoreServer
from torchestra.store.tcp.shared_server import ServerLease, serves
from torchestra.types import Timeout

_MAX_DESCRIPTORS = 1 << 31
WORKERS = f"{INTERNAL_PREFIX}workers"
_WAITS = frozenset({Request.GET, Request.WAIT})
_READS = _WAITS | {Request.CHECK, Request.LIST, Request.QUEUE_LENGTH}
"""Requests that change nothing. One that does is resumed, and not just sent twice: a ``set`` that comes late,
after another client's, would undo that."""
_MAX_RESUMED_BYTES, _MAX_RESUMED_FIELDS = 1 << 26, 1 << 16


@checked_methods
class TCPStore(ClientStore):
    """A store whose contents are in one process, the master's, and which the other processes reach over TCP.

    With ``is_master`` the object also runs the server, in a thread, until it is closed, collected, or its
    process ends; from then on operations of the others raise :class:`~torchestra.DistNetworkError`. Without a
    secret the store is for processes of one user on one host: whatever name of this host ``host_name`` is,
    the server listens, and clients connect, on the loopback interface. With a secret it is for all processes
    that know it. A client may be started before the master: it retries until the time-out. After a fork the
    child opens its own connections; the server stays with the parent.

    A connection that breaks while the server lives is made again, and the operation goes on. One that changes
    something is done once: the server remembers the last answer on a connection. Only ``queue_pop``, and
    changes of more than 64 MiB, raise :class:`~torchestra.DistNetworkError` where nobody knows whether they
    were done.

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
        if master_listen_fd is not None and not 0 <= master_listen_fd < _MAX_DESCRIPTORS:
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

    def clone(self) -> Store:
        """Return a client of the same server, with its own time-out, and its own connections from its first
        request on.

        Groups make clones for threads that may never send a request, and a server's connections are limited.
        """
        clone = copy.copy(self)
        clone._server = None
        clone._pool = ConnectionPool(self._address, self._secret, own=self._server is not None)
        clone._finalizer = weakref.finalize(clone, _shut, clone._pool, None)
        return clone

    def close(self) -> None:
        self._finalizer()

    def __repr__(self) -> str:
        return f"TCPStore({self._address})"

    def _exchange(self, request: Request, fields: list[bytes], timeout_s: float) -> tuple[int, list[bytes]]:
        again = partial(_fields_again, request, fields) if request in _READS else None
        resumes = request in CHANGES and _is_short(fields)
        return self._pool.request(request, fields, timeout_s, GRACE_SECONDS, again, resumes=resumes)

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


def _is_short(fields: list[bytes]) -> bool:
    """Return whether a request may be sent as a part of another one, and sent once more."""
    return len(fields) <= _MAX_RESUMED_FIELDS and sum(map(len, fields)) <= _MAX_RESUMED_BYTES


def _fields_again(request: Request, fields: list[bytes], left_s: float) -> list[bytes]:
    """Return the fields of a request that is sent again; one that waits has less time then."""
    return [milliseconds(left_s), *fields[1:]] if request in _WAITS else fields


def _shut(pool: ConnectionPool, lease: ServerLease | None) -> None:
    pool.close()
    if lease is not None:
        lease.end()
