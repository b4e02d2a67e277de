"""The replicas of a job's store, of which the launchers on several hosts serve one each.

The launchers meet in a store that the one of node 0 serves, and there they tell each other where their
replicas listen. From then on ranks and launchers use the replicated store, which the loss of node 0 does not
end. A replica that has been silent for the heartbeat bound is replaced by the launcher of a host that serves
none: of one more, of a spare one, or of one that came back.
"""

from __future__ import annotations

from torchestra.engine.multihost.heartbeat_bound import heartbeat_bound
from torchestra.store import Store
from torchestra.store.replicated import ReplicaListener
from torchestra.transport.addresses import own_address

_MAX_REPLICAS = 5
SPARE_SECONDS = 5.0
"""How long two nodes wait for a spare host that is to serve a replica."""


def replica_listener(store: Store) -> ReplicaListener:
    """Return where this launcher is to serve a replica: on the interface that leads to the others' store."""
    return ReplicaListener(own_address(store), heartbeat_bound())


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
