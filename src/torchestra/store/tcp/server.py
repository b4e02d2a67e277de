"""The server of a TCPStore: one thread, one selector, one table.

The one thread serves every client, so requests need no lock and each is one step. A request for a key that
does not exist is parked in the table and answered by the ``set`` that creates the key; the server never
polls, and sleeps in the selector until a byte arrives or the next deadline passes.

A client's mistake ends only its own connection. Strangers, that is connections that have not finished the
handshake, cost little: the server reads 72 bytes from each, gives it :data:`HANDSHAKE_SECONDS` to finish, and
holds at most :data:`MAX_UNAUTHENTICATED`. When more arrive, the oldest is dropped if it has had a moment for
the
handshake (a real client that is dropped tries again); if not, newcomers wait in the kernel's queue. So floods
and silent connections leave room for clients, and thousands of clients that connect at once are admitted one
after the other, rather than drop each other. The log tells which clients are refused for good (another
secret, or another user where there is no secret).
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType

from torchestra.errors import DistNetworkError, InvalidArgumentError
from torchestra.store.base import pauses
from torchestra.store.rate_limited import RateLimitedWarnings
from torchestra.store.secret import SECRET_ADVICE, Secret, job_secret
from torchestra.store.table import PendingPop, Table
from torchestra.store.tcp.address import Address, listen, tune
from torchestra.store.tcp.locality import is_loopback, peer_user
from torchestra.store.tcp.peer import Peer
from torchestra.store.tcp.protocol import (
    INSTANCE_BYTES,
    Outcome,
    ProtocolError,
    RefusedError,
    Reply,
    Request,
    encode,
)
from torchestra.store.tcp.requests import Waiting, answer, answer_change
from torchestra.store.tcp.resuming import Resuming, kept
from torchestra.system.forking import forget_in_children
from torchestra.system.limits import start_thread

HANDSHAKE_SECONDS = 30.0
MAX_UNAUTHENTICATED = 256
_ACCEPTED_AT_ONCE = 64
_MOMENT = 0.1
_ACCEPT_PAUSE_SECONDS = 0.1
_LONGEST_SLEEP = 3600.0

_log = logging.getLogger(__name__)


class TCPStoreServer:
    """Serves a store to the TCPStores of this and other processes until :meth:`close`.

    A TCPStore with ``is_master=True`` creates one for itself. Created explicitly, or by
    ``python -m torchestra.store.tcp``, it may serve from a process that is not one of the ranks. It runs in a
    daemon thread of its own and ends with its process at the latest.

    Args:
        host: the name or address of the interface to listen on; only that one is opened, so ``127.0.0.1``
            and ``localhost`` are reached from this host only. ``unix:@name`` is a Unix socket without a
            file, for processes of the same user on this host.
        port: where to listen; 0 lets the system choose one, see :attr:`port`.
        secret: clients must prove that they know it; the environment variable TORCHESTRA_SECRET if None.
            With neither, only processes of the same user on this host may use the store, and it listens on
            the loopback interface, whatever name of this host ``host`` is.
        listen_fd: the descriptor of a bound socket, in place of host and port. The
            server takes it over and closes it.

    Raises:
        DistNetworkError: the port is in use, or the host is not this one; or other hosts could connect, and
            there is no secret.
        InvalidArgumentError: the port is not one of 0 to 65535, or ``listen_fd`` is bound to another one.
    """

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, *, secret: Secret = None, listen_fd: int | None = None
    ) -> None:
        self._secret = job_secret(secret)
        address = Address.checked(host, port, listening=True)
        if listen_fd is None:
            self._listener = listen(address, secured=self._secret is not None)
        else:
            self._listener = _taken_over(listen_fd, address, secured=self._secret is not None)
        self._address = Address(host, 0 if address.is_unix else int(self._listener.getsockname()[1]))
        self._instance = os.urandom(INSTANCE_BYTES)
        self._table = Table()
        self._peers: set[Peer] = set()
        self._resuming = Resuming(self._drop)
        self._unauthenticated: dict[Peer, float] = {}  # and when they connected, the oldest first
        self._deadlines: list[tuple[float, int, Peer]] = []
        self._counter = itertools.count()
        self._woken: list[tuple[Peer, Outcome | Waiting]] = []
        self._resume_at: float | None = None
        self._closing = False
        self._refusals, self._shortages = RateLimitedWarnings(_log), RateLimitedWarnings(_log)
        self._waker, self._wake_end = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_end, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        forget_in_children(self)
        self._thread = threading.Thread(target=self._serve, name=repr(self), daemon=True)
        start_thread(self._thread)

    @property
    def host(self) -> str:
        """Return the host that it was given to listen on."""
        return self._address.host

    @property
    def port(self) -> int:
        """Return the port it listens on; 0 for a Unix socket."""
        return self._address.port

    @property
    def closed(self) -> bool:
        """Return whether it has stopped serving."""
        return self._closing

    def uses_secret(self, secret: bytes | None) -> bool:
        """Return whether ``secret`` is the one clients must prove."""
        return self._secret == secret

    def linger(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` seconds until no client from another process is connected."""
        for _ in pauses(timeout_s):
            if self._closing or not any(
                not (peer.own or peer.is_unauthenticated) for peer in list(self._peers)
            ):
                return

    def close(self) -> None:
        """Close every connection and free the port. Closing twice is no error."""
        if self._closing:
            return
        self._closing = True
        # The thread may have woken, seen that it is to end, and closed the waker already.
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
        if self._thread is not threading.current_thread():
            self._thread.join(10.0)

    def forget(self) -> None:
        """In a forked child, where the thread does not exist, close the inherited descriptors."""
        self._closing = True
        self._release()

    def __enter__(self) -> TCPStoreServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"TCPStoreServer({self._address})"

    def _serve(self) -> None:
        try:
            while not self._closing:
                for key, events in self._selector.select(self._time_to_next()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data is not None:
                        self._guarded(key.data, partial(self._serve_peer, events=events))
                    else:
                        self._wake_end.recv(64)
                self._expire()
        except Exception:
            _log.exception("%r ends after an error of its own", self)
        finally:
            self._closing = True
            self._release()

    def _release(self) -> None:
        for peer in self._peers:
            peer.closed = True
            peer.connection.close()
        self._peers.clear()
        self._selector.close()
        for end in (self._listener, self._waker, self._wake_end):
            end.close()

    def _guarded(self, peer: Peer, action: Callable[[Peer], None]) -> None:
        """Run an action for a peer; an error ends only that peer's connection."""
        if peer.closed:
            return
        try:
            action(peer)
            self._selector.modify(
                peer.connection, selectors.EVENT_WRITE if peer.sending else selectors.EVENT_READ, peer
            )
        except RefusedError as error:
            self._refusals.warn("%r refused %s: %s", self, peer.name(), error)
            self._drop(peer)
        except (OSError, ProtocolError) as error:
            _log.debug("%r drops a connection: %s", self, error)
            self._drop(peer)
        except Exception:
            _log.exception("%r drops a connection after an error of its own", self)
            self._drop(peer)

    def _serve_peer(self, peer: Peer, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            peer.flush()
        if events & selectors.EVENT_READ:
            peer.receive()
        while not peer.sending and peer.wait is None:
            if peer.is_unauthenticated:
                if not peer.shake_hands():
                    return
                if not peer.is_unauthenticated:
                    self._unauthenticated.pop(peer, None)
                    self._resuming.begin(peer)
                    peer.deadline = None
                    self._resume_soon()
                continue
            message = peer.next_message()
            if message is None:
                return
            outcome = self._carry_out(peer, *message)
            self._deliver_woken()
            if outcome is not None:
                self._reply(peer, outcome)

    def _carry_out(self, peer: Peer, code: int, fields: Sequence[bytes]) -> Outcome | Waiting | None:
        """Carry out a message of a client; None if it is to have no reply."""
        if code == Request.RESUME:
            return self._resuming.resume(peer, fields, partial(answer_change, self._table))
        return answer(self._table, code, fields, self._waking(peer))

    def _reply(self, peer: Peer, outcome: Outcome | Waiting) -> None:
        if isinstance(outcome, Waiting):
            peer.wait = outcome.wait
            if peer.has_more:
                raise ProtocolError("a request came while another one was waiting")
            self._set_deadline(peer, time.monotonic() + outcome.timeout_s)
            return
        peer.wait = None
        peer.deadline = None
        peer.answered, peer.last = peer.answered + 1, kept(outcome)
        code, fields = outcome
        try:
            buffers = encode(code, fields)
        except ProtocolError as error:
            buffers = encode(Reply.REFUSED, [f"the answer: {error}; ask for fewer keys at once".encode()])
        peer.send(buffers)

    def _waking(self, peer: Peer) -> Callable[[Outcome], bool]:
        def wake(outcome: Outcome) -> bool:
            if peer.closed or peer.has_gone:
                return False
            # Another peer's request is being processed, so the answer is only queued.
            self._woken.append((peer, outcome))
            return True

        return wake

    def _deliver_woken(self) -> None:
        """Answer the waits that a request has ended, before that request itself is answered."""
        woken, self._woken = self._woken, []
        for peer, outcome in woken:
            self._guarded(peer, partial(self._reply, outcome=outcome))

    def _drop(self, peer: Peer) -> None:
        if peer.closed:
            return
        peer.closed = True
        peer.deadline = None
        if peer.wait is not None:
            self._table.cancel(peer.wait)
        self._peers.discard(peer)
        self._resuming.end(peer)
        if self._unauthenticated.pop(peer, None) is not None:
            self._resume_soon()
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._selector.unregister(peer.connection)
        peer.connection.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            if len(self._unauthenticated) >= MAX_UNAUTHENTICATED and not self._dismiss_one():
                return
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._make_room(error)
                return
            self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        try:
            peer = Peer(connection, self._secret, self._other_user(connection), self._instance)
            connection.setblocking(False)
            tune(connection)
            self._selector.register(connection, selectors.EVENT_READ, peer)
        except OSError:
            connection.close()
            return
        self._peers.add(peer)
        self._unauthenticated[peer] = now = time.monotonic()
        self._set_deadline(peer, now + HANDSHAKE_SECONDS)

    def _dismiss_one(self) -> bool:
        """Drop the oldest unauthenticated connection if it has had its moment; else accept none."""
        oldest, came = next(iter(self._unauthenticated.items()))
        if time.monotonic() - came < _MOMENT:
            self._pause(came + _MOMENT)
            return False
        self._drop(oldest)
        return True

    def _pause(self, until: float) -> None:
        """Accept no connection until a moment of the monotonic clock."""
        self._selector.unregister(self._listener)
        self._resume_at = until

    def _resume_soon(self) -> None:
        """Accept connections again: there is room."""
        if self._resume_at is not None:
            self._resume_at = time.monotonic()

    def _other_user(self, connection: socket.socket) -> int | None:
        """Return the user id of a client to refuse: another user's, where there is no secret."""
        if connection.family != socket.AF_UNIX and self._secret is not None:
            return None
        user = peer_user(connection)
        return None if user == os.geteuid() else user

    def _make_room(self, error: OSError) -> None:
        """Make room when no descriptors are left: drop strangers; if there are none, let newcomers wait."""
        if self._unauthenticated:
            for peer in list(self._unauthenticated):
                self._drop(peer)
            return
        if error.errno in (errno.EMFILE, errno.ENFILE):
            self._shortages.warn("%r is out of file descriptors; raise `ulimit -n` where it runs", self)
        self._pause(time.monotonic() + _ACCEPT_PAUSE_SECONDS)

    def _set_deadline(self, peer: Peer, deadline: float) -> None:
        peer.deadline = deadline
        heapq.heappush(self._deadlines, (deadline, next(self._counter), peer))
        if len(self._deadlines) > 64 + 2 * len(self._peers):
            # Waits that ended early leave their entries behind.
            self._deadlines = [entry for entry in self._deadlines if entry[0] == entry[2].deadline]
            heapq.heapify(self._deadlines)

    def _time_to_next(self) -> float | None:
        moments = [self._deadlines[0][0]] if self._deadlines else []
        if self._resume_at is not None:
            moments.append(self._resume_at)
        return min(_LONGEST_SLEEP, max(0.0, min(moments) - time.monotonic())) if moments else None

    def _expire(self) -> None:
        now = time.monotonic()
        if self._resume_at is not None and self._resume_at <= now:
            self._resume_at = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, _, peer = heapq.heappop(self._deadlines)
            if peer.deadline != deadline or peer.closed:
                continue
            if peer.wait is None:
                self._drop(peer)
            else:
                self._guarded(peer, self._give_up_waiting)

    def _give_up_waiting(self, peer: Peer) -> None:
        wait = peer.wait
        assert wait is not None
        missing = [wait.key] if isinstance(wait, PendingPop) else sorted(wait.missing)
        self._table.cancel(wait)
        self._reply(peer, (Reply.MISSING, [key.encode() for key in missing]))


def _taken_over(descriptor: int, address: Address, *, secured: bool) -> socket.socket:
    try:
        listener = socket.socket(fileno=descriptor)
        bound = listener.getsockname()
    except OSError as error:
        raise InvalidArgumentError(
            f"master_listen_fd {descriptor} is not a socket that can listen: {error.strerror}"
        ) from error
    if not address.is_unix and address.port not in (0, bound[1]):
        listener.close()
        raise InvalidArgumentError(
            f"master_listen_fd is bound to port {bound[1]}, which does not match port {address.port}"
        )
    if not (secured or listener.family == socket.AF_UNIX or is_loopback(bound)):
        listener.close()
        raise DistNetworkError(
            f"master_listen_fd is bound to {bound[0]}, which other hosts can reach, and there is no secret; "
            f"{SECRET_ADVICE}, or bind it to 127.0.0.1"
        )
    listener.listen(socket.SOMAXCONN)
    listener.setblocking(False)
    return listener
