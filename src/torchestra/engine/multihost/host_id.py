"""Host ids: a guess at which ranks share a host, before they try.

Processes with different ids are on different hosts. Those with the same may be on one: that is decided by
attaching to each other's memory (host_discovery.py), so an id that two hosts share by accident (virtual
machines that were started from one snapshot) does no harm.
"""

from __future__ import annotations

import os
import socket

from torchestra.engine.thread_ranks import current_thread_rank
from torchestra.system.proc import boot_id

HOST_VARIABLE = "TORCHESTRA_HOST_ID"
"""Overrides what the system says: processes with different values are on different hosts."""


def host_id() -> str:
    """Return the id of the calling rank's host: the same for all ranks that may share memory.

    It is TORCHESTRA_HOST_ID, or else derived from the kernel's boot and the network namespace, because ranks
    pass memory through sockets that are visible within one namespace only.
    """
    here = current_thread_rank()
    if here is not None and here.host:
        return here.host
    if host := os.environ.get(HOST_VARIABLE):
        return host
    return _of_the_kernel() or socket.gethostname()


def certain_host_id() -> str:
    """Return the id of the calling process's host if the kernel tells it; empty if something else is said.

    Processes with the same one that see each other's process ids can pass memory to each other.
    """
    here = current_thread_rank()
    pretends = HOST_VARIABLE in os.environ or (here is not None and here.host)
    return "" if pretends else _of_the_kernel()


def _of_the_kernel() -> str:
    try:
        namespace = os.readlink("/proc/self/ns/net")
    except OSError:
        return ""
    boot = boot_id()
    return f"{boot}/{namespace}" if boot else ""


def host_name() -> str:
    """Name the calling rank's host, for messages: TORCHESTRA_HOST_ID, or else its host name."""
    here = current_thread_rank()
    if here is not None and here.host:
        return here.host
    return os.environ.get(HOST_VARIABLE) or socket.gethostname()
