"""The ports of a job, and the environment that names them to its ranks."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping

from torchestra.launcher.cores import usable_cores

_HOST = "127.0.0.1"
_BACKLOG = 1024


class PortReservation:
    """Ports of this host, for one job.

    Those of torchestra's own store listen before any rank exists. MASTER_PORT is only bound:
    rank 0 of a program that uses torch.distributed under this launcher listens there. It can (both sides
    set SO_REUSEADDR), and the system assigns that port to no other process meanwhile.

    Args:
        host: the interface of MASTER_PORT; empty for all.
        replicas: how many processes are to serve the store, each at a port of its own.

    Attributes:
        listeners: the listening sockets of the store, by replica.
    """

    def __init__(self, host: str = _HOST, replicas: int = 1) -> None:
        self.listeners = [socket.create_server((_HOST, 0), backlog=_BACKLOG) for _ in range(replicas)]
        self._bound = socket.socket()
        self._bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._bound.bind((host, 0))

    @property
    def master_port(self) -> int:
        """The number of MASTER_PORT."""
        return int(self._bound.getsockname()[1])

    def environment(self, base: Mapping[str, str], nproc: int) -> dict[str, str]:
        """Return the environment of every rank of a job, except RANK and LOCAL_RANK."""
        size = str(nproc)
        return {
            **with_threads_per_rank(base, nproc),
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": _HOST,
            "MASTER_PORT": str(self.master_port),
            "TORCHESTRA_SECRET": base.get("TORCHESTRA_SECRET") or secrets.token_hex(16),
            "TORCHESTRA_STORE": ",".join(f"{_HOST}:{each.getsockname()[1]}" for each in self.listeners),
        }

    def close(self) -> None:
        """Release the ports."""
        for listener in self.listeners:
            listener.close()
        self._bound.close()


def with_threads_per_rank(base: Mapping[str, str], nproc: int) -> dict[str, str]:
    """Return ``base`` with OMP_NUM_THREADS: a rank's share of the cores unless ``base`` sets it."""
    return {"OMP_NUM_THREADS": str(max(1, usable_cores() // nproc)), **base}
