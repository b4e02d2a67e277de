"""Which bridge a group uses between its hosts."""

from __future__ import annotations

import os

from torchestra.engine.multihost.bridge import Bridge
from torchestra.engine.multihost.gloo_bridge import GlooBridge
from torchestra.engine.multihost.mpi import why_no_mpi
from torchestra.engine.multihost.mpi_bridge import MPIBridge
from torchestra.engine.multihost.thread_bridge import ThreadBridge
from torchestra.errors import InvalidArgumentError
from torchestra.store import Store

__all__ = ["BRIDGE_VARIABLE", "choose_bridge", "open_bridge"]

BRIDGE_VARIABLE = "TORCHESTRA_BRIDGE"
"""Names the bridge: ``gloo`` or ``mpi``; the same for all ranks."""


def choose_bridge(*, threads: bool, mpiexec: bool) -> str:
    """The kind of bridge: what TORCHESTRA_BRIDGE says, or else the one that suits how the ranks were started.

    Args:
        threads: the ranks are threads of one process.
        mpiexec: it was mpiexec that started them.

    Raises:
        InvalidArgumentError: there is no such bridge, or not for these ranks.
        ImportError: MPI is asked for, and cannot be used here.
    """
    given = os.environ.get(BRIDGE_VARIABLE, "").lower()
    if given not in ("", "gloo", "mpi"):
        raise InvalidArgumentError(f"{BRIDGE_VARIABLE} must be gloo or mpi, got {given!r}")
    if given == "mpi":
        if threads:
            raise InvalidArgumentError(f"{BRIDGE_VARIABLE}=mpi is for ranks that are processes, not threads")
        if why := why_no_mpi():
            raise ImportError(why)
    if given:
        return given
    if threads:
        return "threads"
    return "mpi" if mpiexec and not why_no_mpi() else "gloo"


def open_bridge(kind: str, store: Store, host: int, size: int, seconds: float) -> Bridge:
    """One end of a rail.

    Args:
        kind: as :func:`choose_bridge` gives it.
        store: one that only the ends of the rail, and only for this purpose, use.
        host, size: which end this is, and how many there are.
        seconds: how long to look for the others.
    """
    if kind == "threads":
        return ThreadBridge(store, host, size)
    return (MPIBridge if kind == "mpi" else GlooBridge)(store, host, size, seconds)
