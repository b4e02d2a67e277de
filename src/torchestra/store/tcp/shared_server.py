"""The server of a master: its own, or one that several masters of the process share."""

from __future__ import annotations

import multiprocessing.util
import sys
import threading

from torchestra.errors import InvalidArgumentError
from torchestra.store.tcp.address import Address
from torchestra.store.tcp.server import TCPStoreServer

_CLOSE_SECONDS = 3.0

_lock = threading.RLock()
_shared: dict[Address, tuple[TCPStoreServer, set[int]]] = {}
_kept: dict[Address, ServerLease] = {}


class ServerLease:
    """A master's share in a server. A shared server ends with its last lease.

    Args:
        address: where to listen.
        secret: what clients must prove to know.
        listen_fd: a bound socket to listen on.
        shared: whether to share the server with other masters at this address.

    Raises:
        DistNetworkError: something else uses the port.
        InvalidArgumentError: the shared server has another secret.
    """

    def __init__(
        self, address: Address, secret: bytes | None, listen_fd: int | None = None, *, shared: bool = False
    ) -> None:
        self._key: Address | None = None
        if not shared:
            self.server = TCPStoreServer(address.host, address.port, secret=secret, listen_fd=listen_fd)
            return
        with _lock:
            entry = _shared.get(address)
            # A forked child finds its parent's servers here, which are closed in it.
            if entry is None or entry[0].closed:
                server = TCPStoreServer(address.host, address.port, secret=secret, listen_fd=listen_fd)
                entry = (server, set())
                _shared[Address(address.host, server.port)] = entry
            elif not entry[0].uses_secret(secret):
                raise InvalidArgumentError(
                    f"the server at {address} is shared in this process with another secret"
                )
            self.server, leases = entry
            self._key = Address(address.host, self.server.port)
            leases.add(id(self))

    def end(self) -> None:
        """End the lease; close the server if it was the last one."""
        if self._key is None:
            self.server.close()
            return
        with _lock:
            server, leases = _shared.get(self._key, (None, set()))
            if server is not self.server:
                return
            leases.discard(id(self))
            if not leases:
                del _shared[self._key]
                self.server.close()


def keep_server(host: str, port: int, secret: bytes | None) -> int:
    """Keep the shared server at an address until the process ends, starting it if needed; return its port.

    Other processes may join another world at any time after this process left the last one, so the server
    must not end in between. They may also still send requests when this process has finished, so its end is
    delayed, by at most 3 seconds, until they have gone too (unless an exception ends it).

    Args:
        host: the interface to listen on.
        port: the port; 0 starts a server of its own on a free port.
        secret: what clients must prove to know.

    Raises:
        DistNetworkError: the port is in use by something else.
        InvalidArgumentError: the server has another secret.
    """
    address = Address.checked(host, port, listening=True)
    with _lock:
        kept = _kept.get(address)
        if kept is None or kept.server.closed:
            kept = ServerLease(address, secret, shared=True)
            address = Address(host, kept.server.port)
            _kept[address] = kept
            # Unlike atexit, this is also called at the end of a multiprocessing child.
            multiprocessing.util.Finalize(None, _linger, (address,), exitpriority=1)
    return kept.server.port


def serves(port: int) -> bool:
    """Return whether a shared server of this process listens on a port."""
    with _lock:
        return any(server.port == port and not server.closed for server, _ in _shared.values())


def _linger(address: Address) -> None:
    failed = sys.exc_info()[0] is not None or getattr(sys, "last_value", None) is not None
    kept = _kept.get(address)
    if kept is not None and not failed:
        kept.server.linger(_CLOSE_SECONDS)
