"""The store over TCP: a server that holds the keys, and clients in every rank."""

from __future__ import annotations

from torchestra.store.tcp.client import TCPStore
from torchestra.store.tcp.server import TCPStoreServer

__all__ = ["TCPStore", "TCPStoreServer"]
