"""A client's sessions with the replicas of a store: as many as threads make requests concurrently.

A session makes one request at a time, to the replica that it takes for the primary, and repeats it at another
one when the connection breaks, no answer comes, or it is sent elsewhere. Requests that change something bear
the session's number for them, so that repeating does no harm (contents.py). A session whose request has
failed is not used again: whether that request is carried out later is unknown.

A wait is asked for in slices: so it ends up at the new primary even where the network swallows everything and
the old connection never breaks.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import threading
import time
from collections.abc import Sequence

from torchestra.errors import DistNetworkError, DistStoreError, InvalidArgumentError
from torchestra.store.base import interruptible_sleep
from torchestra.store.replicated.addresses import Addresses
from torchestra.store.replicated.contents import UNNUMBERED
from torchestra.store.replicated.messages import MAX_REQUEST, REFRESH, SESSION_BYTES, SUBMIT
from torchestra.store.replicated.refreshing import Refresher
from torchestra.store.tcp.address import Address
from torchestra.store.tcp.client_store import invalid_reply
from torchestra.store.tcp.connection import Connection
from torchestra.store.tcp.protocol import ProtocolError, Reply, Request, number
from torchestra.system.forking import forget_in_children

GRACE_SECONDS = 10.0
NO_PRIMARY_SECONDS = 15.0
"""After how long without a primary a request fails, whatever its time-out."""
_WAITS = frozenset({Request.GET, Request.WAIT})
_SLICE_SECONDS = 5.0
_ANSWER_SECONDS = 3.0
_SLOWEST_BYTES_PER_S = 10e6
_DIAL_SECONDS = 2.0
FAILOVER_SECONDS = _ANSWER_SECONDS + _DIAL_SECONDS
"""How long a request lasts that goes to a machine without power, and then to one that takes that for the
primary's."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.25


class Session:
    """One session: its name, the number of its last request, and its connection to some replica."""

    __slots__ = ("address", "connection", "name", "number", "replica")

    def __init__(self) -> None:
        self.name = secrets.token_bytes(SESSION_BYTES)
        self.number = 0
        self.replica = 0
        self.address: Address | None = None
        self.connection: Connection | None = None

    def disconnect(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None


class SessionPool:
    """Sends requests from any thread. Connects when first needed.

    Args:
        addresses: where the replicas listen, as this process knows.
        secret: all prove that they know it.
        name: of the store, for messages.
        refresher: of the addresses; None if replicas cannot be replaced, or that does not matter.
    """

    def __init__(
        self, addresses: Addresses, secret: bytes | None, name: str, refresher: Refresher | None = None
    ) -> None:
        self._addresses, self._secret, self._name = addresses, secret, name
        self._refresher = refresher
        self._primary = 0  # a guess
        self._lock = threading.Lock()
        self._idle: list[Session] = []
        self._all: set[Session] = set()
        self._closed = False
        forget_in_children(self)

    def request(
        self, code: int, fields: Sequence[bytes], timeout_s: float, primary_timeout_s: float | None = None
    ) -> tuple[int, list[bytes]]:
        """Return the reply to a request.

        Args:
            timeout_s: how long a request that waits may wait.
            primary_timeout_s: how long to look for a primary; by default up to :data:`NO_PRIMARY_SECONDS`.

        Raises:
            DistNetworkError: there was no primary for so long; names the replicas that are out of reach.
            InvalidArgumentError: the request is too large; nothing has been sent.
        """
        if (size := sum(map(len, fields))) > MAX_REQUEST:
            raise InvalidArgumentError(f"{self._name}: a request has at most {MAX_REQUEST} bytes, got {size}")
        if primary_timeout_s is None:
            primary_timeout_s = min(timeout_s + GRACE_SECONDS, NO_PRIMARY_SECONDS)
        session = self._take()
        try:
            reply = _Exchange(self, session, code, fields, timeout_s, primary_timeout_s).run()
        except BaseException:
            with self._lock:
                self._all.discard(session)
            session.disconnect()
            raise
        with self._lock:
            if self._closed or session not in self._all:
                session.disconnect()
            else:
                self._idle.append(session)
        return reply

    def refresh(self) -> None:
        """Ask the primary for the addresses, if it has later ones than this pool was told.

        Raises:
            DistError: there is no primary, or this pool is closed.
        """
        self.request(REFRESH, [], 0.0, _ANSWER_SECONDS)

    def close(self) -> None:
        """Close all connections, also those in use; later requests are refused."""
        if self._refresher is not None:
            self._refresher.discard(self)
        with self._lock:
            self._closed = True
            for session in self._idle:
                session.disconnect()
            for session in self._all.difference(self._idle):
                if (connection := session.connection) is not None:
                    connection.interrupt()
            self._all.clear()
            self._idle.clear()

    def forget(self) -> None:
        """In a forked child, drop the parent's sessions; new ones are begun when needed."""
        self._lock = threading.Lock()
        for session in self._all:
            session.disconnect()
        self._all, self._idle = set(), []

    def _take(self) -> Session:
        with self._lock:
            if self._closed:
                raise self.closed_error()
            if self._idle:
                return self._idle.pop()
            session = Session()
            self._all.add(session)
        if self._refresher is not None:
            self._refresher.add(self)
        return session

    def closed_error(self) -> DistStoreError:
        return DistStoreError(f"{self._name} is closed")

    @property
    def count(self) -> int:
        """Return how many replicas there are."""
        return len(self._addresses)

    @property
    def is_closed(self) -> bool:
        return self._closed

    def connect(self, session: Session) -> Connection:
        """Return the session's connection to the supposed primary, made anew if need be."""
        primary, address = self._primary, self._addresses[self._primary]
        if session.connection is None or session.replica != primary or session.address != address:
            session.disconnect()
            session.replica, session.address = primary, address
            session.connection = Connection(address, self._secret, time.monotonic() + _DIAL_SECONDS)
        return session.connection

    def note_not_primary(self, replica: int, primary: int | None = None) -> None:
        """Note that a replica is not the primary, and which is, if that is known."""
        if primary is not None and 0 <= primary < len(self._addresses):
            self._primary = primary
        elif self._primary == replica:
            self._primary = (replica + 1) % len(self._addresses)

    def note_addresses(self, told: Sequence[bytes]) -> None:
        """Note where the replicas are now: a version, and their addresses."""
        try:
            self._addresses.update(number(told[0]), [each.decode() for each in told[1:]])
        except (ProtocolError, UnicodeDecodeError, InvalidArgumentError) as error:
            raise self.invalid(f"addresses: {error}") from None

    def no_primary_error(self, states: dict[int, str], waited_s: float) -> DistNetworkError:
        """Return the error that tells what is the matter with which replica."""
        majority = len(self._addresses) // 2 + 1
        out = sum(state.startswith("is out of reach") for state in states.values())
        reached = len(self._addresses) - out
        told = "; ".join(
            f"replica {replica} at {self._addresses[replica]} {state}"
            for replica, state in sorted(states.items())
        )
        advice = "they may be too busy, or cut off from each other"
        if reached < majority:
            advice = (
                f"a majority ({majority} of {len(self._addresses)}) is needed, and {reached} can be"
                " reached from here: the others' processes have ended, or the network to them is cut"
            )
        return DistNetworkError(f"{self._name}: no primary for {waited_s:.1f} s: {told}; {advice}")

    def invalid(self, error: ProtocolError | str) -> DistNetworkError:
        return invalid_reply(self._name, str(error))


class _Exchange:
    """One request of a session, until it has its reply."""

    def __init__(
        self,
        pool: SessionPool,
        session: Session,
        code: int,
        fields: Sequence[bytes],
        timeout_s: float,
        primary_timeout_s: float,
    ) -> None:
        self._pool, self._session = pool, session
        self._code, self._fields = code, fields
        self._primary_timeout_s = primary_timeout_s
        self._number = 0 if code in UNNUMBERED else session.number + 1
        self._until = time.monotonic() + timeout_s
        self._lost_at: float | None = None
        self._pause = _FIRST_PAUSE
        self._states: dict[int, str] = {}

    def run(self) -> tuple[int, list[bytes]]:
        while True:
            remaining = self._until - time.monotonic()
            reply = self._attempt(max(0.0, min(remaining, _SLICE_SECONDS)))
            if reply is None:
                self._recover()
                continue
            self._lost_at, self._pause = None, _FIRST_PAUSE
            if reply[0] == Reply.MISSING and (not reply[1] or remaining > _SLICE_SECONDS):
                continue
            if self._number:
                self._session.number = self._number
            return reply

    def _attempt(self, wait_s: float) -> tuple[int, list[bytes]] | None:
        """Ask the supposed primary once; None if it is none, or out of reach."""
        session, pool = self._session, self._pool
        fields = list(self._fields)
        limit_s = _ANSWER_SECONDS + sum(map(len, fields)) / _SLOWEST_BYTES_PER_S
        if self._code in _WAITS:
            fields[0] = str(math.ceil(wait_s * 1000)).encode()
            limit_s += wait_s
        head = [session.name, str(self._number).encode(), str(int(self._code)).encode()]
        try:
            connection = pool.connect(session)
            reply = connection.request(SUBMIT, head + fields, time.monotonic() + limit_s)
        except OSError as error:
            session.disconnect()
            self._states[session.replica] = f"is out of reach ({error.strerror or error})"
            pool.note_not_primary(session.replica)
            return None
        except ProtocolError as error:
            raise pool.invalid(error) from error
        if reply[0] != Reply.REDIRECT:
            return reply
        self._follow_redirect(reply[1])
        return None

    def _follow_redirect(self, named: list[bytes]) -> None:
        replica = self._session.replica
        self._states[replica] = "knows of no primary: it does not hear from a majority"
        primary = None
        if len(named) > 1:
            self._pool.note_addresses(named[1:])
        if named and named[0]:
            with contextlib.suppress(ProtocolError):
                primary = number(named[0])
                self._states[replica] = f"takes replica {primary} for the primary"
        self._pool.note_not_primary(replica, primary)

    def _recover(self) -> None:
        """Pause before the next attempt; raise if there has been no primary for too long."""
        if self._pool.is_closed:
            raise self._pool.closed_error()
        now = time.monotonic()
        if self._lost_at is None:
            self._lost_at = now
            return
        waited_s = now - self._lost_at
        unasked = self._pool.count - len(self._states)
        if waited_s > self._primary_timeout_s + unasked * _ANSWER_SECONDS:
            raise self._pool.no_primary_error(self._states, waited_s)
        interruptible_sleep(self._pause)
        self._pause = min(self._pause * 1.5, _LONGEST_PAUSE)
