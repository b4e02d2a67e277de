"""A store on several replicas that agree by Viewstamped Replication."""

from __future__ import annotations

from torchestra.store.replicated.client import LostReplica, ReplicatedStore
from torchestra.store.replicated.server import StoreReplica
from torchestra.store.replicated.standby import ReplicaListener, Standby

__all__ = ["LostReplica", "ReplicaListener", "ReplicatedStore", "Standby", "StoreReplica"]
