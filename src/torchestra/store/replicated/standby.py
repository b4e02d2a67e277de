"""A process that replaces a lost replica of a store when there is one, and may serve one from the start."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Sequence

from torchestra.errors import DistError
from torchestra.store.base import interruptible_sleep
from torchestra.store.replicated.client import ReplicatedStore
from torchestra.store.replicated.server import StoreReplica
from torchestra.store.secret import Secret
from torchestra.store.tcp.address import Address, listen
from torchestra.system.deadline import RunningClock
from torchestra.system.forking import forget_in_children

_log = logging.getLogger(__name__)
_ASKED_IN_A_SILENCE = 4
_LINGER_S = 0.5
"""How long a replica goes on when its process knows that all others have ended: they learn it from the
store."""


class ReplicaListener:
    """A socket for a replica, before there is one to serve; later the replica.

    Args:
        host: where to listen, such that the others reach it.
        silent_s: for how long a replica must have been silent to be replaced.
        secret: of the store; see :class:`StoreReplica`.
        secured: whether there is a secret, that one or the environment's.
    """

    def __init__(self, host: str, silent_s: float, secret: Secret = None, *, secured: bool = True) -> None:
        self._host, self.silent_s, self._secret, self._secured = host, silent_s, secret, secured
        self._replica: StoreReplica | None = None
        self._clock, self._asked = RunningClock(), 0.0
        self._lock, self._closed = threading.Lock(), False
        self._listen()
        forget_in_children(self)

    def _listen(self) -> None:
        self._socket: socket.socket | None = listen(Address(self._host, 0), secured=self._secured)
        self.address = str(Address(self._host, self._socket.getsockname()[1]))

    def forget(self) -> None:
        """In a forked child, close the socket: whoever connects is to learn when the parent has ended."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    @property
    def serves(self) -> bool:
        """Return whether it serves a replica."""
        return self._replica is not None

    def serve(self, addresses: Sequence[str]) -> None:
        """Serve the replica; the addresses are those of all, this one among them."""
        self._replica = StoreReplica(
            list(addresses).index(self.address),
            addresses,
            secret=self._secret,
            listen_fd=self._taken_socket(),
        )

    def replace_lost(self, store: ReplicatedStore) -> int | None:
        """Replace a lost replica if there is one and none is served here; end one that has been replaced.

        To be called often; it asks the store now and then.

        Returns:
            Which replica it has begun to serve, if so.

        Raises:
            DistError: the store does not answer.
        """
        if self._replica is not None:
            if self.address not in store.addresses:
                self._begin_anew()
            return None
        if self._clock.elapsed() - self._asked < self.silent_s / _ASKED_IN_A_SILENCE:
            return None
        self._asked = self._clock.elapsed()
        lost = store.replace_lost(self.address, self.silent_s)
        with self._lock:
            if lost is None or self._closed:
                return None
            self._replica = StoreReplica(
                lost.index,
                lost.addresses,
                secret=self._secret,
                listen_fd=self._taken_socket(),
                recovering=True,
                generation=lost.generation,
            )
        return lost.index

    def _begin_anew(self) -> None:
        """End the replica, which another has replaced, and be ready to replace one."""
        with self._lock:
            if not self._closed and self._replica is not None:
                self._replica.close()
                self._replica = None
                self._listen()

    def _taken_socket(self) -> int:
        assert self._socket is not None
        descriptor, self._socket = self._socket.detach(), None
        return descriptor

    def close(self, linger_s: float = _LINGER_S) -> None:
        """End the replica, a moment later if it has served."""
        with self._lock:
            self._closed = True
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._replica is not None:
            with contextlib.suppress(KeyboardInterrupt):
                interruptible_sleep(linger_s)
            self._replica.close()


class Standby:
    """Calls :meth:`ReplicaListener.replace_lost` in a thread, until :meth:`close` or the process's end.

    Args:
        listener: of this process.
        store: of the same secret; it is closed in the end.
    """

    def __init__(self, listener: ReplicaListener, store: ReplicatedStore) -> None:
        self.listener, self.store = listener, store
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="torchestra-standby", daemon=True).start()

    def _run(self) -> None:
        while not self._ended.wait(self.listener.silent_s / _ASKED_IN_A_SILENCE):
            with contextlib.suppress(DistError):  # it is asked again soon
                index = self.listener.replace_lost(self.store)
                if index is not None:
                    _log.warning("replica %d of %r was lost, and is replaced here", index, self.store)

    def close(self) -> None:
        """End the thread, and what is served here."""
        self._ended.set()
        self.listener.close(0.0)
        self.store.close()
