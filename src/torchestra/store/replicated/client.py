"""A store whose contents are on several replicas, and outlive the loss of a minority of them."""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from torchestra.arguments.annotations import checked_methods
from torchestra.errors import QueueEmptyError, StoreTimeoutError
from torchestra.store.base import DEFAULT_STORE_TIMEOUT, interruptible_sleep, missing_keys_error
from torchestra.store.replicated.addresses import Addresses, parse_address
from torchestra.store.replicated.messages import REPLACE
from torchestra.store.replicated.refreshing import Refresher
from torchestra.store.replicated.sessions import SessionPool
from torchestra.store.secret import Secret, job_secret
from torchestra.store.tcp.client_store import ClientStore, invalid_reply, milliseconds
from torchestra.store.tcp.protocol import ProtocolError, Reply, Request, number
from torchestra.types import Timeout

_BESIDE_A_VALUE_S = 0.02
_REPLACEABLE = 3  # of fewer the others are no majority


@dataclass(frozen=True)
class LostReplica:
    """A replica that is to be replaced, and what to give the :class:`StoreReplica` that does it.

    Attributes:
        index: which one.
        addresses: where all replicas listen now; this one's is the new one.
        generation: how often it has been replaced, counting this time.
    """

    index: int
    addresses: tuple[str, ...]
    generation: int


@checked_methods
class ReplicatedStore(ClientStore):
    """A store that goes on when processes that serve it are lost, as long as a majority of them is left.

    The replicas are :class:`~torchestra.store.StoreReplica` objects in other processes, or in this one, which
    agree by Viewstamped Replication (Liskov and Cowling 2012). With three, one may be lost; with five, two;
    with one or two, none. A change is answered when a majority of them has it, and is made exactly once,
    though it may have to be asked for again; reads go the same way, and see all that was answered before
    (they are linearizable). A wait survives the loss of the replica at which it waits.

    Operations end at their deadline, as those of a :class:`TCPStore` do, and react to Ctrl-C at once. The
    store holds one gigabyte at most in all. Those who wait in :meth:`queue_pop` are served in no particular
    order.

    Args:
        addresses: where the replicas listen, by index, each as ``host:port``; the same for all clients.
        timeout: for reaching a majority of them, and for all later waits; a timedelta or seconds.
        secret: all sides prove that they know it; the environment variable TORCHESTRA_SECRET if None. Without
            one, the replicas must be on this host and of this user.

    Raises:
        DistNetworkError: there is no majority, here within ``timeout``, later for 15 seconds; it names the
            replicas that are out of reach. Or the secrets differ. A change that fails so may have been made.
        InvalidArgumentError: an address is not ``host:port``, or twice there.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        timeout: Timeout = DEFAULT_STORE_TIMEOUT,
        *,
        secret: Secret = None,
    ) -> None:
        self.set_timeout(timeout)
        self._secret = job_secret(secret)
        self._addresses = Addresses(addresses)
        self._refresher = Refresher() if len(self._addresses) >= _REPLACEABLE else None
        self._begin()
        try:
            self._pool.request(Request.CHECK, [], 0.0, self.timeout.total_seconds())
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        self._pool = SessionPool(self._addresses, self._secret, repr(self), self._refresher)
        self._finalizer = weakref.finalize(self, self._pool.close)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return where the replicas listen, by index, as far as this process has heard."""
        return tuple(map(str, self._addresses))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        timeout_s = self._seconds(None)
        until = time.monotonic() + timeout_s
        while True:
            try:
                return super().queue_pop(key, block=False)
            except QueueEmptyError:
                if not block:
                    raise
            try:
                self.wait([key], max(0.0, until - time.monotonic()))
            except StoreTimeoutError:
                raise missing_keys_error(self, [key], timeout_s) from None
            if time.monotonic() > until:
                raise missing_keys_error(self, [key], timeout_s)
            if self.queue_len(key) == 0:  # another was quicker, or a value of that name ended the wait
                interruptible_sleep(_BESIDE_A_VALUE_S)

    def replace_lost(self, address: str, silent: Timeout) -> LostReplica | None:
        """Ask to replace a replica that has been silent for long; None if there is none.

        Whoever is told of one serves it from then on, recovering; until that has the state from the others,
        one loss less can be borne. It does no harm to ask again with the same address.

        Args:
            address: where the caller is going to serve it, as ``host:port``.
            silent: for how long at least the primary has not heard it; two seconds at least.

        Raises:
            DistNetworkError: there is no majority.
            InvalidArgumentError: the address is not ``host:port``.
        """
        fields = [str(parse_address(address)).encode(), milliseconds(self._seconds(silent))]
        code, told = self._pool.request(REPLACE, fields, self._seconds(None))
        if code == Reply.EMPTY:
            return None
        told = self._fields(code, told, 3 + len(self._addresses))
        self._pool.note_addresses(told[2:])
        try:
            return LostReplica(number(told[0]), tuple(each.decode() for each in told[3:]), number(told[1]))
        except (ProtocolError, UnicodeDecodeError) as error:
            raise invalid_reply(self, str(error)) from None

    def clone(self) -> ReplicatedStore:
        """Return a client of the same replicas, with its own time-out and connections."""
        clone = copy.copy(self)
        clone._begin()
        return clone

    def close(self) -> None:
        self._finalizer()

    def __repr__(self) -> str:
        return f"ReplicatedStore({', '.join(self.addresses)})"

    def _exchange(self, request: Request, fields: list[bytes], timeout_s: float) -> tuple[int, list[bytes]]:
        return self._pool.request(request, fields, timeout_s)
