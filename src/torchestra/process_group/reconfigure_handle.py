"""Handles: what names a rank whose group can be reconfigured, and says where to reach it."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

from torchestra.errors import DistNetworkError, InvalidArgumentError, shown
from torchestra.store import HashStore, TCPStore
from torchestra.store.process import ProcessIdentity
from torchestra.store.tcp.address import Address, dial
from torchestra.transport.addresses import own_address

_KIND = "torchestra-rank-1"
_PROBE_S = 1.0


@dataclass(frozen=True)
class ReconfigureHandle:
    """Name a rank, and say where its store is.

    Attributes:
        token: random; no other rank has it.
        address: of the store that the rank serves.
        process: the rank's.
    """

    token: str
    address: Address
    process: ProcessIdentity

    def encode(self) -> str:
        """Return a line, for :meth:`decode`."""
        host, port = self.address.host, self.address.port
        return f"{_KIND};{self.token};{host};{port};{self.process.encode()}"

    @classmethod
    def decode(cls, text: str) -> ReconfigureHandle:
        """Read a line.

        Raises:
            InvalidArgumentError: it is no handle.
        """
        try:
            kind, token, host, port, process = text.split(";")
            if kind != _KIND or not token:
                raise ValueError(kind)
            address = Address.checked(host, int(port), listening=False)
            return cls(token, address, ProcessIdentity.decode(process))
        except (ValueError, TypeError) as error:
            raise InvalidArgumentError(
                f"reconfigure: `handles` must be handles of get_reconfigure_handle(), got {shown(text)}"
            ) from error

    def is_gone(self, secret: bytes | None) -> bool:
        """Return whether the rank is known to have ended, or to have destroyed its group."""
        if self.process.is_dead():
            return True
        try:
            dial(self.address, time.monotonic() + _PROBE_S, secured=secret is not None).close()
        except ConnectionRefusedError:
            return True  # its store is served from before the handle exists
        except (OSError, DistNetworkError):
            pass  # it may be reached later
        return False

    def connect(self, secret: bytes | None, timeout_s: float) -> TCPStore:
        """Return a client of the rank's store.

        Raises:
            DistNetworkError: it was not reached in time, has another secret, or there is none and the rank is
                on another host.
        """
        return TCPStore(self.address.host, self.address.port, timeout=timeout_s, secret=secret)

    def __str__(self) -> str:
        return str(self.process)


class ReconfigureEndpoint:
    """This rank's handle, and the store that it serves there.

    With a secret the store is served over TCP, else through a Unix socket, to processes of this user on this
    host.

    Attributes:
        handle: names this rank.
        store: its store.
        secret: what the ranks prove to each other to know.
    """

    def __init__(self, secret: bytes | None) -> None:
        token = secrets.token_hex(8)
        host = f"unix:@torchestra-rank-{token}" if secret is None else own_address(HashStore())
        self.secret = secret
        self.store = TCPStore(host, 0, is_master=True, secret=secret)
        address = Address(self.store.host, self.store.port)
        self.handle = ReconfigureHandle(token, address, ProcessIdentity.current())
