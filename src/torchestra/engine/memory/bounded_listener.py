"""A listening Unix socket that strangers cannot fill.

Any process that knows its name can connect to an abstract Unix socket, and every process on the host can see
the names. So the listener ends a connection of another user at once, as the kernel tells whose it is; and of
this user's own, it holds those that have not proved themselves at a bounded cost: each has a limited time, of
too many it drops the oldest, and if no descriptors are left, it drops one. A process of the job that was
dropped connects again by itself.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator

from torchestra.store.rate_limited import RateLimitedWarnings
from torchestra.store.tcp.locality import peer_user

MAX_UNAUTHENTICATED = 64
_ACCEPTED_AT_ONCE = 64
_ACCEPT_PAUSE_SECONDS = 0.05


class BoundedListener:
    """Listen at an abstract Unix socket (SOCK_SEQPACKET) for processes of this user; for one thread.

    Args:
        name: of the socket, without the leading zero byte.
        what: the purpose, for the log, such as ``"group 'default'"``.
        timeout_s: how long a connection has to prove itself.
        expected: returns how many processes of the job are still to come; they have room in addition to
            :data:`MAX_UNAUTHENTICATED`.
        refusals: logs the refused connections.

    Raises:
        OSError: the name is taken, or no descriptors are left.
    """

    def __init__(
        self,
        name: str,
        what: str,
        timeout_s: float,
        expected: Callable[[], int],
        refusals: RateLimitedWarnings,
    ) -> None:
        self._what = what
        self._timeout_s = timeout_s
        self._expected = expected
        self._refusals = refusals
        # When the time of each is over. They are in the order in which they came, so in that of their times.
        self._deadlines: dict[socket.socket, float] = {}
        self._paused_until = 0.0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._selector = selectors.DefaultSelector()
        except BaseException:
            self._listener.close()
            raise
        try:
            self._listener.bind("\0" + name)
            self._listener.listen(socket.SOMAXCONN)
            self._listener.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ)
        except BaseException:
            self.close()
            raise

    def ready(self, timeout_s: float) -> Iterator[socket.socket]:
        """Yield the connections (non-blocking) that have data to read, or have ended.

        Accepts new ones, and ends those whose time is over. The caller reads from each, and calls
        :meth:`drop` or :meth:`release` once it has identified the peer.

        Args:
            timeout_s: how long to wait for something to do; 0 to return at once.
        """
        if self._paused_until:
            self._pause_accepting(timeout_s)
        came = [key.fileobj for key, _ in self._selector.select(timeout_s)]
        for connection in came:
            assert isinstance(connection, socket.socket)
            if connection in self._deadlines:
                yield connection
        # Last: new connections displace the oldest, which may just have sent something.
        if self._listener in came:
            self._accept()
        now = time.monotonic()
        while self._deadlines:
            connection, deadline = next(iter(self._deadlines.items()))
            if deadline >= now:
                return
            self.drop(connection)

    def renew(self, connection: socket.socket) -> None:
        """Count a connection as the newest, as it has begun to prove itself; its time is the same."""
        self._deadlines[connection] = self._deadlines.pop(connection)

    def drop(self, connection: socket.socket) -> None:
        """End a connection."""
        self.release(connection)
        connection.close()

    def release(self, connection: socket.socket) -> None:
        """Leave a connection to the caller, which has identified the peer."""
        del self._deadlines[connection]
        self._selector.unregister(connection)

    def close(self) -> None:
        """End all connections, and listen no more. Closing twice is no error."""
        self._selector.close()
        self._listener.close()
        for connection in self._deadlines:
            connection.close()
        self._deadlines.clear()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._make_room(error)
                return
            if (user := peer_user(connection)) != os.geteuid():
                connection.close()
                self._refusals.warn("%s: a process of user %s wanted the group's memory", self._what, user)
                continue
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ)
            self._deadlines[connection] = time.monotonic() + self._timeout_s
            if len(self._deadlines) > MAX_UNAUTHENTICATED + self._expected():
                self.drop(next(iter(self._deadlines)))

    def _make_room(self, error: OSError) -> None:
        """Drop a connection, as most likely no descriptors are left; with none to drop, pause accepting."""
        if self._deadlines:
            self.drop(next(iter(self._deadlines)))
            return
        self._refusals.warn("%s: cannot accept a connection: %s", self._what, error)
        self._selector.unregister(self._listener)
        self._paused_until = time.monotonic() + _ACCEPT_PAUSE_SECONDS

    def _pause_accepting(self, timeout_s: float) -> None:
        """Accept no connection for a moment; without it, a caller that waits for one would spin."""
        if timeout_s:
            time.sleep(max(0.0, min(timeout_s, self._paused_until - time.monotonic())))
        if time.monotonic() >= self._paused_until:
            self._paused_until = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)
