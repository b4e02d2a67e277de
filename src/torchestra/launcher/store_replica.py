"""The replicas of a job's store, of which the launchers on several hosts serve one each.

The launchers meet in a store that the one of node 0 serves, and there they tell each other where their
replicas listen. From then on ranks and launchers use the replicated store, which the loss of node 0 does not
end. A replica that has been silent for the heartbeat bound is replaced by the launcher of a host that serves
none: of one more, of a spare one, or of one that came back.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence

from torchestra.engine.multihost.heartbeat_bound import heartbeat_bound
from torchestra.store import ReplicatedStore, Store, StoreReplica
from torchestra.store.base import interruptible_sleep
from torchestra.store.tcp.address import Address, listen
from torchestra.system.deadline import RunningClock
from torchestra.transport.addresses import own_address

_MAX_REPLICAS = 5
SPARE_SECONDS = 5.0
"""How long two nodes wait for a spare host that is to serve a replica."""
_ASKED_IN_A_BOUND = 4
_LINGER_S = 0.5
"""How long a replica goes on when its launcher knows that all others have ended: they learn it from the
store."""


def replica_count(nnodes: int, has_spares: bool = False) -> int:
    """Return how many nodes serve a replica: none where no node could be lost.

    It is an odd number, or with a spare host that serves one more it becomes one.
    """
    if needs_spare(nnodes) and has_spares:
        return nnodes
    return 0 if nnodes < 3 else min(_MAX_REPLICAS, nnodes - 1 + nnodes % 2)


def needs_spare(nnodes: int) -> bool:
    """Return whether a spare host has to serve a replica, so that any host may be lost."""
    return nnodes == 2


class ReplicaListener:
    """A socket for a replica, before there is one to serve; later the replica.

    Args:
        store: at which the launchers meet: the replica listens on the interface that leads there.
    """

    def __init__(self, store: Store) -> None:
        self._host = own_address(store)
        self._replica: StoreReplica | None = None
        self._clock, self._asked = RunningClock(), 0.0
        self._lock, self._closed = threading.Lock(), False
        self._listen()

    def _listen(self) -> None:
        self._socket: socket.socket | None = listen(Address(self._host, 0), secured=True)
        self.address = str(Address(self._host, self._socket.getsockname()[1]))

    @property
    def serves(self) -> bool:
        """Return whether it serves a replica."""
        return self._replica is not None

    def serve(self, addresses: Sequence[str]) -> None:
        """Serve the replica; the addresses are those of all, this one among them."""
        self._replica = StoreReplica(
            list(addresses).index(self.address), addresses, listen_fd=self._taken_socket()
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
        if self._clock.elapsed() - self._asked < heartbeat_bound() / _ASKED_IN_A_BOUND:
            return None
        self._asked = self._clock.elapsed()
        lost = store.replace_lost(self.address, heartbeat_bound())
        with self._lock:
            if lost is None or self._closed:
                return None
            self._replica = StoreReplica(
                lost.index,
                lost.addresses,
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

    def close(self) -> None:
        """End the replica, a moment later if it has served."""
        with self._lock:
            self._closed = True
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._replica is not None:
            with contextlib.suppress(KeyboardInterrupt):
                interruptible_sleep(_LINGER_S)
            self._replica.close()
