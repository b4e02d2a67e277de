"""Stores: the key-value maps through which ranks meet and agree before they can talk."""

from __future__ import annotations

from torchestra.store.base import DEFAULT_STORE_TIMEOUT, Store
from torchestra.store.fake import FakeStore
from torchestra.store.file import FileStore
from torchestra.store.hash import HashStore
from torchestra.store.prefix import PrefixStore
from torchestra.store.tcp import TCPStore, TCPStoreServer

# Before those who use stores register what they do at exit: its own comes after all that.
import torchestra.store.torch_agent  # noqa: F401  # isort: skip

__all__ = [
    "DEFAULT_STORE_TIMEOUT",
    "FakeStore",
    "FileStore",
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "TCPStoreServer",
]
