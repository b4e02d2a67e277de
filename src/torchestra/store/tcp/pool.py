"""A client's connections to one server: as many as threads make requests concurrently.

A thread takes an idle connection, or opens one, and puts it back after the reply. So a thread that
waits holds up no other, short-lived threads leave nothing behind, and a connection whose request was
interrupted (by Ctrl-C, a deadline, an error) is closed rather than reused in an unknown state.

A connection that breaks (a firewall forgets it, a router is started anew) need not cost the request. It is
made again where the server cannot have executed the request, as it was not sent whole, or where executing it
twice does no harm, or where the server remembers whether it has executed it (*resume* in protocol.py).
Otherwise it fails, since nobody knows whether it was executed. A server that has ended
refuses the new connection, or is another one (see *instance* in protocol.py), so its end is noticed at once.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from torchestra.errors import DistNetworkError, DistStoreError
from torchestra.store.base import interruptible_sleep
from torchestra.store.tcp.address import Address
from torchestra.store.tcp.client_store import invalid_reply
from torchestra.store.tcp.connection import Connection
from torchestra.store.tcp.protocol import ProtocolError, Reply, Request
from torchestra.system.forking import forget_in_children

GRACE_SECONDS = 10.0
_FIRST_PAUSE = 0.01
_LONGEST_PAUSE = 0.5
_SILENCE_LIMIT_S = 10.0
_SHORTEST_ATTEMPT = 0.5
_MAX_LOSSES = 3  # of connections that broke one after the other, each soon after it was made
_SOON_S = 1.0

_LOOPBACK = ("localhost", "127.0.0.1")  # IPv6 may be switched off where nothing is wrong

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


class ConnectionPool:
    """Sends requests from any thread. Connects when first needed.

    Args:
        address: where the server listens.
        secret: both sides prove that they know it.
        own: whether the server is in this process.
    """

    def __init__(self, address: Address, secret: bytes | None, *, own: bool = False) -> None:
        self._address = address
        self._own = own
        self._secret = secret
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._closed = False
        forget_in_children(self)

    def connect(self, timeout_s: float) -> None:
        """Make sure that there is a server; wait at most ``timeout_s`` for it to start.

        Raises:
            DistNetworkError: there is none, or it refuses this client.
        """
        self._give_back(self._take(timeout_s))

    def request(
        self,
        code: int,
        fields: Sequence[bytes],
        timeout_s: float,
        grace: float = 0.0,
        again: Callable[[float], Sequence[bytes]] | None = None,
        *,
        resumes: bool = False,
    ) -> tuple[int, list[bytes]]:
        """Return the reply to a request.

        Args:
            timeout_s: how long connecting, and then the reply, may take.
            grace: how many seconds longer the reply may take, because the server itself waits.
            again: returns the fields for another try, given the seconds that are left of ``timeout_s``; None
                if the request must not be executed twice.
            resumes: the request must not be executed twice, and can be resumed.

        Raises:
            DistNetworkError: the connection was lost, or no reply came.
            InvalidArgumentError: the request is too large; nothing has been sent.
        """
        connection = self._take(timeout_s)
        deadline = time.monotonic() + timeout_s + grace
        losses = 0
        while True:
            began = time.monotonic()
            try:
                reply = connection.request(code, fields, deadline)
                break
            except BaseException as error:
                self._discard(connection)
                losses = losses + 1 if time.monotonic() - began < _SOON_S else 1
                replacement = None
                may_go_on = again is not None or resumes or not connection.asked
                if _is_loss(error) and losses <= _MAX_LOSSES and may_go_on:
                    replacement = self._replacement(connection, deadline)
                if replacement is None:
                    if (explained := self._explained(error, timeout_s + grace)) is None:
                        raise
                    raise explained from error
            if resumes and connection.asked and code != Request.RESUME:
                number = str(connection.answered + 1).encode()
                code, fields = Request.RESUME, [connection.nonce, number, str(code).encode(), *fields]
            connection = replacement
            if again is not None:
                fields = again(max(0.0, deadline - grace - time.monotonic()))
        self._give_back(connection)
        if reply[0] == Reply.FORGOTTEN:
            raise DistNetworkError(
                f"lost the connection to the server of TCPStore({self._address}), which does not remember"
                " whether it had carried the request out"
            )
        return reply

    def _explained(self, error: BaseException, limit_s: float) -> DistNetworkError | None:
        """Return what to raise for an error of a connection; None for another one."""
        if isinstance(error, TimeoutError):
            return DistNetworkError(
                f"the server of TCPStore({self._address}) gave no answer within {limit_s:g} s; "
                "its process is stopped or overloaded, or the network is down"
            )
        if isinstance(error, OSError):
            return DistNetworkError(
                f"lost the connection to the server of TCPStore({self._address}): {error}; "
                "the process it ran in (rank 0's, as a rule) has ended or closed the store"
            )
        if isinstance(error, ProtocolError):
            return invalid_reply(f"TCPStore({self._address})", str(error))
        return None

    def _replacement(self, lost: Connection, deadline: float) -> Connection | None:
        """Try once to connect to the same server again; return None if it is gone."""
        with self._lock:
            if self._closed:
                return None
        try:
            connection = Connection(self._address, self._secret, deadline, own=self._own)
        except (OSError, DistNetworkError):
            return None
        with self._lock:
            if connection.instance == lost.instance and not self._closed:
                self._all.add(connection)
                return connection
        connection.close()
        return None

    def close(self) -> None:
        """Close all connections, also those in use; later requests are refused."""
        with self._lock:
            self._closed = True
            for connection in self._idle:
                connection.close()
            for connection in self._all.difference(self._idle):
                connection.interrupt()
            self._all.clear()
            self._idle.clear()

    def forget(self) -> None:
        """In a forked child, drop the parent's connections; new ones are opened when needed."""
        self._own = False
        self._lock = threading.Lock()
        for connection in self._all:
            connection.close()
        self._all = set()
        self._idle = []

    def _take(self, timeout_s: float) -> Connection:
        with self._lock:
            if self._closed:
                raise DistStoreError(f"TCPStore({self._address}) is closed")
            if self._idle:
                return self._idle.pop()
        connection = self._opened(timeout_s)
        with self._lock:
            self._all.add(connection)
        return connection

    def _give_back(self, connection: Connection) -> None:
        with self._lock:
            if self._closed or connection not in self._all:
                connection.close()
            else:
                self._idle.append(connection)

    def _discard(self, connection: Connection) -> None:
        connection.close()
        with self._lock:
            self._all.discard(connection)

    def _opened(self, timeout_s: float) -> Connection:
        return retried(
            self._address,
            lambda deadline: Connection(self._address, self._secret, deadline, own=self._own),
            timeout_s,
        )


def _is_loss(error: BaseException) -> bool:
    """Return whether a request failed because the connection broke, and not because its time is over."""
    return isinstance(error, OSError) and not isinstance(error, TimeoutError)


def retried(address: Address, connect: Callable[[float], _T], timeout_s: float) -> _T:
    """Connect, retrying until it works: the server may start later than its clients.

    Args:
        address: of the server, for messages.
        connect: makes one attempt, given the deadline; raises OSError if another one makes sense.

    Raises:
        DistNetworkError: no attempt succeeded in time, or none can, because the loopback interface is down.
    """
    started = time.monotonic()
    deadline = started + timeout_s
    pause = _FIRST_PAUSE
    warned = False
    while True:
        try:
            return connect(max(deadline, started + _SHORTEST_ATTEMPT))
        except OSError as error:
            # Not the error itself: its traceback would keep everything on the stack alive.
            reason = error.strerror or str(error)
            if error.errno == errno.ENETUNREACH and address.host in _LOOPBACK:
                raise DistNetworkError(
                    f"{address} cannot be reached ({reason}): the loopback interface of this host, or"
                    " container, is down; `ip link set lo up` starts it"
                ) from None
        now = time.monotonic()
        if now + pause >= deadline:
            raise DistNetworkError(
                f"no store answered at {address} within {round(timeout_s, 2):g} s ({reason}); is the master "
                "(rank 0) running, and are MASTER_ADDR and MASTER_PORT its address?"
            )
        if not warned and now - started > _SILENCE_LIMIT_S:
            warned = True
            _log.warning("still trying to reach a store at %s (%s)", address, reason)
        interruptible_sleep(pause)
        pause = min(pause * 1.5, _LONGEST_PAUSE)
