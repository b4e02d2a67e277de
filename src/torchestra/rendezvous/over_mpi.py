"""A meeting point for ranks of mpiexec on several hosts, which rank 0 tells the others through MPI.

mpiexec tells its ranks their numbers but not where to meet. MPI already connects them: so rank 0 opens a
store on a free port of all its interfaces, and broadcasts its addresses and, unless the job has one, a new
secret. Only processes that mpiexec has started can take part. A secret that the user has set is not sent,
since MPI encrypts nothing: every rank must have it. The others try the addresses in turn, since some may be
unreachable (those on a network of containers, say).
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
import time
from typing import Any, NamedTuple

from torchestra.engine.multihost.mpi import start_mpi
from torchestra.errors import CollectiveTimeoutError, DistNetworkError, InvalidArgumentError
from torchestra.store import TCPStore
from torchestra.store.base import interruptible_sleep
from torchestra.store.secret import SECRET_ADVICE
from torchestra.store.tcp.address import Address, dial
from torchestra.store.tcp.shared_server import keep_server
from torchestra.transport.addresses import interface_address

_BLOCK = 4096
_POLL_SECONDS = 0.001
_TRY_SECONDS = 2.0


class _StoreAddress(NamedTuple):
    """The address of the store at which the ranks meet. ``secret`` is empty if all have one."""

    addresses: list[str]
    port: int
    secret: str

    def __repr__(self) -> str:
        return f"_StoreAddress({self.addresses}, {self.port})"  # no message may show the secret


_lock = threading.Lock()
_address: _StoreAddress | None = None


def open_over_mpi(rank: int, world_size: int, secret: bytes | None, timeout_s: float) -> TCPStore:
    """Return the store of rank 0. Must be called by every rank of mpiexec; the first time, they wait for each
    other.

    Args:
        rank, world_size: this rank, and how many there are, as mpiexec says.
        secret: the job's, where it has one.

    Raises:
        InvalidArgumentError: the rank, or their number, is not that of MPI.
        CollectiveTimeoutError: not all ranks came in time.
        DistNetworkError: no address of rank 0 was reached.
        DistBackendError, ImportError: MPI cannot be used.
    """
    global _address
    deadline = time.monotonic() + timeout_s
    mpi = start_mpi(timeout_s, world_size)
    world = mpi.COMM_WORLD
    if (world.rank, world.size) != (rank, world_size):
        raise InvalidArgumentError(
            f"rank {rank} of {world_size} is rank {world.rank} of {world.size} to MPI; ranks that are not"
            " those of mpiexec need an address to meet at: set MASTER_ADDR and MASTER_PORT for all of them"
        )
    with _lock:
        if _address is None:
            own = _serve(secret) if rank == 0 else None
            _address = _from_rank_0(mpi, own, deadline)
    shared = _address.secret.encode() or secret
    if shared is None:
        raise InvalidArgumentError(f"rank 0 has a secret, and rank {rank} has none; {SECRET_ADVICE}")
    return _reached(_address, shared, rank, deadline)


def _serve(secret: bytes | None) -> _StoreAddress:
    """Have this process serve a store until it ends."""
    made = "" if secret is not None else secrets.token_hex(16)
    port = keep_server("0.0.0.0", 0, secret or made.encode())
    return _StoreAddress(own_addresses(), port, made)


def own_addresses() -> list[str]:
    """Return the IPv4 addresses of this host: those of its name first, loopback addresses last."""
    addresses: list[str] = []
    with contextlib.suppress(OSError):
        addresses += socket.gethostbyname_ex(socket.gethostname())[2]
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):
            addresses.append(interface_address(name))
    return sorted(dict.fromkeys(addresses), key=lambda address: address.startswith("127."))


def _from_rank_0(mpi: Any, own: _StoreAddress | None, deadline: float) -> _StoreAddress:
    """Return rank 0's message to all."""
    block = bytearray(_BLOCK)
    if own is not None:
        text = json.dumps(own).encode()
        block[: len(text)] = text
    request = mpi.COMM_WORLD.Ibcast([block, mpi.BYTE], 0)
    while not request.Test():
        if time.monotonic() > deadline:
            raise CollectiveTimeoutError("rank 0 did not send its address through MPI in time", (0,))
        interruptible_sleep(_POLL_SECONDS)
    return _StoreAddress(*json.loads(bytes(block).rstrip(b"\0")))


def _reached(found: _StoreAddress, secret: bytes, rank: int, deadline: float) -> TCPStore:
    """Return a store at the first address of rank 0 that answers."""
    failure = ""
    while True:
        for address in found.addresses:
            until = min(deadline, time.monotonic() + _TRY_SECONDS)
            try:
                dial(Address(address, found.port), until, secured=True).close()
                remaining = max(0.1, deadline - time.monotonic())
                return TCPStore(address, found.port, timeout=remaining, secret=secret)
            except (OSError, DistNetworkError) as error:
                failure = str(error)
        if time.monotonic() > deadline:
            raise DistNetworkError(
                f"rank {rank} reached rank 0 at none of its addresses, port {found.port}:"
                f" {', '.join(found.addresses)}; set MASTER_ADDR and MASTER_PORT for all ranks ({failure})"
            )
        interruptible_sleep(_TRY_SECONDS / 20)
