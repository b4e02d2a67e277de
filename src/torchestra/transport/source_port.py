"""The ports that a rank connects from, by which others know it among strangers before it says anything.

They follow from the rank's public key, which only those know who have read its endpoint record. The rank
draws keys until the ports are free, and reserves them: no other program of its host gets one by chance. (One
that asks for just this port may listen there; then the rank connects from another, pair.py.) There are two,
as the system does not let a rank connect twice from the same port to the same peer within a moment. An
address translator may change the port: then the rank is a stranger until it has proved its key.
"""

from __future__ import annotations

import hashlib
import socket
import struct

import zmq

_FIRST, _COUNT = 32768, 28232  # what Linux gives to connections, by default
_PORTS = 2
_ATTEMPTS = 20


def source_ports(public: bytes) -> tuple[int, ...]:
    """Return the ports that the owner of a public key, in Z85, connects from."""
    digest = hashlib.sha256(b"torchestra source ports " + public).digest()
    return tuple(_FIRST + number % _COUNT for number in struct.unpack_from(f"!{_PORTS}Q", digest))


def source_address(address: str, port: int) -> str:
    """Return what makes ZeroMQ connect to an address, ``tcp://10.0.0.1:40123``, from a port of this host."""
    here = "[::]" if address.startswith("tcp://[") else "0.0.0.0"
    return f"tcp://{here}:{port};{address.removeprefix('tcp://')}"


class Identity:
    """A new key pair, and its source ports, which stay reserved until :meth:`close`.

    Args:
        is_ipv6: whether connections use IPv6.
        not_from: the first and the last port that others may want to listen at, or None.

    Attributes:
        public, private: the keys, in Z85.
        ports: the source ports; none if there were none for any of the keys that were drawn.
    """

    def __init__(self, *, is_ipv6: bool, not_from: tuple[int, int] | None) -> None:
        first, last = not_from or (1, 0)
        for _ in range(_ATTEMPTS):
            self.public, self.private = zmq.curve_keypair()
            self._reserved: list[socket.socket] = []
            self.ports = source_ports(self.public)
            if all(not first <= port <= last and self._reserve(port, is_ipv6) for port in self.ports):
                return
            self.close()
        self.ports = ()

    def _reserve(self, port: int, is_ipv6: bool) -> bool:
        reserved = socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET)
        self._reserved.append(reserved)
        # ZeroMQ binds its sockets to the same port; that is allowed where none of them listens.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            reserved.bind(("::" if is_ipv6 else "", port))
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Give the ports back."""
        for each in self._reserved:
            each.close()
