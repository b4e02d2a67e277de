"""Which bridge a group uses between its hosts."""

from __future__ import annotations

import os

from torchestra.engine.multihost.bridge import Bridge
from torchestra.engine.multihost.gloo_bridge import GlooBridge
from torchestra.engine.multihost.thread_bridge import ThreadBridge
from torchestra.errors import InvalidArgumentError
from torchestra.store import Store

__all__ = ["BRIDGE_VARIABLE", "open_bridge"]

BRIDGE_VARIABLE = "TORCHESTRA_BRIDGE"
"""Names the bridge: ``gloo`` or ``mpi``; the same for all ranks."""


def open_bridge(store: Store, host: int, size: int, seconds: float, *, threads: bool) -> Bridge:
    """One end of a rail.

    Args:
        store: one that only the ends of the rail, and only for this purpose, use.
        host, size: which end this is, and how many there are.
        seconds: how long to look for the others.
        threads: the ranks are threads of one process.
    """
    given = os.environ.get(BRIDGE_VARIABLE, "").lower()
    if given not in ("", "gloo"):
        raise InvalidArgumentError(f"{BRIDGE_VARIABLE} must be gloo, got {given!r}")
    if threads and not given:
        return ThreadBridge(store, host, size)
    return GlooBridge(store, host, size, seconds)
