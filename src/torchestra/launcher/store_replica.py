"""The replicas of a job's store, of which the launchers on several hosts serve one each.

The launchers meet in a store that the one of node 0 serves, and there they tell each other where their
replicas listen. From then on ranks and launchers use the replicated store, which the loss of node 0 does not
end.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence

from torchestra.store import Store, StoreReplica
from torchestra.store.base import interruptible_sleep
from torchestra.store.tcp.address import Address, listen
from torchestra.transport.addresses import own_address

_MAX_REPLICAS = 5
_LINGER_S = 0.5
"""How long a replica goes on when its launcher knows that all others have ended: they learn it from the
store."""


def replica_count(nnodes: int) -> int:
    """Return how many nodes serve a replica: an odd number, and none where no node could be lost."""
    return 0 if nnodes < 3 else min(_MAX_REPLICAS, nnodes - 1 + nnodes % 2)


class ReplicaListener:
    """A replica's socket, before all addresses are known; later the replica.

    Args:
        store: at which the launchers meet: the replica listens on the interface that leads there.
    """

    def __init__(self, store: Store) -> None:
        host = own_address(store)
        self._socket: socket.socket | None = listen(Address(host, 0), secured=True)
        self.address = str(Address(host, self._socket.getsockname()[1]))
        self._replica: StoreReplica | None = None

    def serve(self, addresses: Sequence[str]) -> None:
        """Serve the replica; the addresses are those of all, this one among them."""
        assert self._socket is not None
        index = list(addresses).index(self.address)
        self._replica = StoreReplica(index, addresses, listen_fd=self._socket.detach())
        self._socket = None

    def close(self) -> None:
        """End the replica, a moment later if it has served."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._replica is not None:
            with contextlib.suppress(KeyboardInterrupt):
                interruptible_sleep(_LINGER_S)
            self._replica.close()
