"""Stores: the key-value maps through which ranks meet and agree before they can talk."""

from __future__ import annotations

from torchestra.store.base import DEFAULT_STORE_TIMEOUT, Store
from torchestra.store.fake import FakeStore
from torchestra.store.file import FileStore
from torchestra.store.hash import HashStore
from torchestra.store.prefix import PrefixStore
from torchestra.store.replicated import LostReplica, ReplicatedStore, StoreReplica
from torchestra.store.tcp import TCPStore, TCPStoreServer

# Imported before users of stores register their exit handlers, so that its own runs after theirs.
import torchestra.store.torch_agent  # noqa: F401  # isort: skip

__all__ = [
    "DEFAULT_STORE_TIMEOUT",
    "FakeStore",
    "FileStore",
    "HashStore",
    "LostReplica",
    "PrefixStore",
    "ReplicatedStore",
    "Store",
    "StoreReplica",
    "TCPStore",
    "TCPStoreServer",
]
